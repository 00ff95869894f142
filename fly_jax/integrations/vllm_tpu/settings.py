"""What the plugin is asked for: `additional_config["fly_jax"]`, or environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tomllib
from collections.abc import Mapping
from typing import Any

import jax

from fly_jax.decoding.config import DecodingConfig, decoding_parameters, parameter_groups
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import Parameter, check_keys, parameter, parameters_of
from fly_jax.verification.expression import rule_names
from fly_jax.verification.rules import Exact, Rule, per_row

KEY = "fly_jax"
_VARIABLE = "FLY_JAX_"
# Of `DecodingConfig`'s own parameters: K, temperature and limits are the engine's.
_OWN = ("rule", "protect", "memory", "csd_min_count")
# What no request can have otherwise.
_OF_THE_ENGINE = {"protect", "memory", "csd_min_count", "any_version"}
_OF_THE_LOOKUP = {one.name for one in parameters_of(Lookup)}


@dataclasses.dataclass(frozen=True)
class _Plugin:
    """What only the plugin knows."""

    any_version: bool = parameter(False, "run with versions of vLLM that were never tried")


def known() -> dict[str, Parameter]:
    """All that may be asked for, by name."""
    everything, groups = decoding_parameters(), parameter_groups()
    parts = ("Loosened rules", "Limits of loosened rules", "Lookup")
    return (
        {name: everything[name] for name in _OWN}
        | {one.name: one for part in parts for one in groups[part]}
        | {one.name: one for one in parameters_of(_Plugin)}
    )


def asked_for(
    given: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """What was asked for; None if nothing was.

    Args:
      given: `additional_config["fly_jax"]`, if it is there. `{}` asks for FLy as published.
      environment: `FLY_JAX_RULE` asks too, and the other names, in capitals, are read then; what
        `given` says comes first.

    Raises:
      FlyJaxError: an unknown name, or a value that it cannot have.
    """
    if given is None and f"{_VARIABLE}RULE" not in environment:
        return None
    if given is not None and not isinstance(given, Mapping):
        raise FlyJaxError(
            f"additional_config[{KEY!r}] is {given!r}; give an object, such as "
            '{"rule": "fly", "entropy_threshold": 0.3}.'
        )
    found = {
        name: _parsed(environment[variable], one)
        for name, one in known().items()
        if (variable := _VARIABLE + name.upper()) in environment
    }
    asked = found | dict(given or {})
    try:
        check_keys(asked, known())
        for name, one in known().items():
            if name in asked:
                one.check_given(_tuple(asked[name]))
    except FlyJaxError as error:
        raise FlyJaxError(f"In additional_config[{KEY!r}]: {error}") from error
    return asked


def decoding_config(asked: Mapping[str, Any], num_speculative_tokens: int) -> DecodingConfig:
    """How to decode, with the engine's K.

    Raises:
      FlyJaxError: an unknown rule, a window that does not fit into K, or other values of which
        nothing can be made.
    """
    own = {one.name for one in parameters_of(_Plugin)}
    values = {name: _tuple(value) for name, value in asked.items() if name not in own}
    try:
        config = DecodingConfig(**values, num_speculative_tokens=num_speculative_tokens)
        config.to_rule()
        config.to_lookup()
    except FlyJaxError as error:
        raise FlyJaxError(f"In additional_config[{KEY!r}]: {error}") from error
    return config


def request_rule(config: DecodingConfig, override: Any, temperature: float) -> Rule:
    """The rule of one request.

    Args:
      config: the engine's.
      override: `SamplingParams.extra_args["fly_jax"]` of the request, if it is there, or that as
        JSON: "rule" may be "exact", and the numbers of the engine's rule may be others.
      temperature: of the request. The rule csd is greedy, and requests that sample are decoded
        exactly with it.

    Raises:
      FlyJaxError: what cannot be said for one request, or makes another program.
    """
    if isinstance(override, str):  # the OpenAI-compatible server hands on no objects
        with contextlib.suppress(ValueError):
            override = json.loads(override)
    if override is None:
        made = config
    elif isinstance(override, Mapping):
        check_keys(override, set(known()) - _OF_THE_ENGINE - _OF_THE_LOOKUP)
        made = config.replace(**override)
    else:
        raise FlyJaxError(
            f"extra_args[{KEY!r}] is {override!r}; give an object, such as {{'rule': 'exact'}}."
        )
    rule = made.to_rule()
    if isinstance(rule, Exact) or ("csd" in rule_names(made.rule) and temperature > 0):
        return Exact()
    engines = config.to_rule()
    if _structure(per_row([rule], like=[engines])) != _structure(per_row([engines])):
        raise FlyJaxError(
            f"The request asks for the rule {made.rule} with other conditions than the engine's, "
            f"{config.rule}; a request may ask for the rule exact and for other numbers: ask for "
            "that, or start the engine with the rule."
        )
    return rule


def _structure(rule: Rule) -> Any:
    return jax.tree.structure(rule)


def _tuple(value: Any) -> Any:
    """As JSON has it."""
    return tuple(value) if isinstance(value, list) else value


def _parsed(text: str, one: Parameter) -> Any:
    """The value of an environment variable: a text, or what TOML would make of it."""
    if one.kind is str or one.choices or (one.kind is tuple and not text.startswith("[")):
        return [text] if one.kind is tuple else text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
