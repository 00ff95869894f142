"""The plugin's settings, checked before the engine starts: a wrong one is one sentence."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from fly_jax.decoding.config import DecodingConfig, decoding_parameters, parameter_groups
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.hooks import checked_hooks
from fly_jax.models.checkpoints.source import resolve
from fly_jax.models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from fly_jax.parameters import Parameter, check_keys, parameters_of
from fly_jax.verification.rules import Exact, Rule, from_vllm_names, per_row
from fly_jax.verification.rules.loosened import rule_names

KEY = "fly_jax"
_VARIABLE = "FLY_JAX_"
# Parameters of `DecodingConfig` itself; K, temperature and other limits are the engine's.
_OWN = ("rule", "protect", "memory", "csd_min_count")
# Settings that no request can change.
_OF_THE_ENGINE = {"protect", "memory", "csd_min_count", "any_version"}
_OF_THE_ENGINE |= {one.name for one in parameters_of(Lookup)}
_ANY_VERSION = Parameter(
    "any_version", "", bool, False, "run with versions of vLLM that were never tried"
)

# The engine has a Llama, but no Mistral, in JAX; without a sliding window they are one.
DRAFTS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_LOGGER = logging.getLogger("vllm.fly_jax")  # which vLLM shows
# The config that this process has prepared last; requests are checked against it.
_prepared: list[DecodingConfig] = []


def known() -> dict[str, Parameter]:
    """The settings that may be asked for, by name."""
    everything, groups = decoding_parameters(), parameter_groups()
    parts = ("Loosened rules", "Limits of loosened rules", "Lookup")
    others = [one for part in parts for one in groups[part]]
    own = {name: everything[name] for name in _OWN}
    return own | {one.name: one for one in (*others, _ANY_VERSION)}


def asked_for(
    given: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """The settings that are asked for; None if none are. FlyJaxError for a wrong one.

    What is `given` is `additional_config["fly_jax"]`, if it is there; `{}` asks for FLy as
    published. In the environment `FLY_JAX_RULE` asks too, and the other names, in capitals, are
    read then; what is given takes precedence.
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
    with _in_additional_config():
        asked, parameters = found | from_vllm_names(given or {}), known()
        check_keys(asked, parameters)
        for name, value in asked.items():
            parameters[name].check_given(tuple(value) if isinstance(value, list) else value)
    return asked


def decoding_config(asked: Mapping[str, Any], num_speculative_tokens: int) -> DecodingConfig:
    """The config of decoding with the engine's K; FlyJaxError where none can be made."""
    values = {name: value for name, value in asked.items() if name != _ANY_VERSION.name}
    with _in_additional_config():
        config = DecodingConfig(**values, num_speculative_tokens=num_speculative_tokens)
        config.to_rule()
        config.to_lookup()
        if earlier := config.lookup.num_earlier_tokens:
            raise FlyJaxError(
                f"prompt_lookup_earlier is {earlier}, and vLLM's engine keeps no earlier answers "
                "to look up in; leave it out."
            )
    return config


@contextlib.contextmanager
def _in_additional_config() -> Iterator[None]:
    """Adds to errors where the settings stand."""
    try:
        yield
    except FlyJaxError as error:
        variables = [one for name in known() if (one := _VARIABLE + name.upper()) in os.environ]
        where = " or ".join([f"additional_config[{KEY!r}]", *variables])
        raise FlyJaxError(f"In {where}: {error}") from error


def request_rule(config: DecodingConfig, override: Any, temperature: float) -> Rule:
    """The rule of one request; FlyJaxError where it cannot have one, or makes another program.

    Any error in it is the request's fault, not the engine's. The override is its
    `SamplingParams.extra_args["fly_jax"]`, if it is there, or that as JSON: "rule" may be "exact",
    and the numbers of the engine's rule may be others. The rule csd is greedy, and requests that
    sample are decoded exactly with it.
    """
    if isinstance(override, str):  # the OpenAI-compatible server hands on no objects
        with contextlib.suppress(ValueError):
            override = json.loads(override)
    if override is not None and not isinstance(override, Mapping):
        raise FlyJaxError(
            f"extra_args[{KEY!r}] is {override!r}; give an object, such as {{'rule': 'exact'}}."
        )
    try:
        own = from_vllm_names(override or {})
        check_keys(own, set(known()) - _OF_THE_ENGINE)
        made = config.replace(**own)
        rule, engines = made.to_rule(), config.to_rule()
        if isinstance(rule, Exact) or ("csd" in rule_names(made.rule) and temperature > 0):
            return Exact()
        mine: Any = jax.tree.structure(per_row([rule], like=[engines]))
        is_same = mine == jax.tree.structure(per_row([engines]))
    except FlyJaxError:
        raise
    except Exception as error:
        raise FlyJaxError(
            f"extra_args[{KEY!r}] is {str(override)[:200]}, of which no rule can be made "
            f"({error}); correct it."
        ) from error
    if not is_same:
        raise FlyJaxError(
            f"The request asks for the rule {made.rule} with other conditions than the engine's, "
            f"{config.rule}; a request may ask for the rule exact and for other numbers: ask for "
            "that, or start the engine with the rule."
        )
    return rule


def _parsed(text: str, one: Parameter) -> Any:
    """The value of an environment variable: a text, or what TOML would make of it."""
    if one.kind is str or one.choices or (one.kind is tuple and not text.startswith("[")):
        return [text] if one.kind is tuple else text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


class StartRefusedError(RuntimeError):
    """A `FlyJaxError`'s sentence as no ValueError: pydantic would put that into a report."""


def refuse(error: FlyJaxError) -> NoReturn:
    """Ends the start: vLLM's command by SystemExit, another program by StartRefusedError."""
    command = Path(sys.argv[0])
    if command.name == "vllm" or command.parts[-4:-1] == ("vllm", "entrypoints", "cli"):
        print(f"vllm: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise StartRefusedError(str(error)) from None


def prepare(vllm_config: Any) -> None:
    """Checks what was asked for, and makes the engine use fly_jax's worker.

    Raises FlyJaxError for untried versions, no speculative decoding, a rule that cannot be made
    with this K, a draft model that cannot be used, or a lookup without one.
    """
    asked = asked_for(vllm_config.additional_config.get(KEY), os.environ)
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise FlyJaxError(
            f"fly_jax was asked for (additional_config[{KEY!r}] or FLY_JAX_RULE) without "
            "speculative decoding, where there is nothing to rescue; give speculative_config, such "
            'as {"method": "ngram", "num_speculative_tokens": 10}, or leave fly_jax out.'
        )
    asked = {"rule": "exact"} if asked is None else asked
    found = checked_hooks(any_version=asked.get("any_version", False))
    config = decoding_config(asked, speculative.num_speculative_tokens)
    if config.to_rule().uses_memory and config.limits.memory is None:
        raise FlyJaxError(
            f"The rule {config.rule} rescues what its memory has, and vLLM's engine does not learn "
            "one; give memory=FILE, which calibrate makes, or leave csd out."
        )
    if speculative.method == "draft_model":
        _check_draft(vllm_config)
    elif (lookup := config.to_lookup()) is not None:
        raise FlyJaxError(
            f"additional_config[{KEY!r}] has prompt_lookup_max={lookup.max_ngram}, for a "
            f"lookup below a draft model, and the method is {speculative.method}; give the method "
            "draft_model, or leave it out (the method ngram has its own in speculative_config)."
        )
    vllm_config.additional_config[KEY] = asked  # what a worker in another process reads
    vllm_config.parallel_config.worker_cls = "fly_jax.integrations.vllm_tpu.runner.Worker"
    _prepared[:] = [config]
    keeps = f" The rule {config.rule} keeps tokens that the target refuses."
    _LOGGER.info("fly_jax: %s%s", found, keeps if config.is_loosened else "")


def check_request(params: Any) -> None:
    """Checks `extra_args["fly_jax"]` of a request, if this process prepared; see `request_rule`."""
    if _prepared:
        request_rule(_prepared[0], params.extra_args[KEY], params.temperature)


def target_tokenizer(model_config: Any) -> Tokenizer:
    """The tokenizer of the engine's target, read as fly_jax reads it."""
    revision = model_config.tokenizer_revision or model_config.revision
    name = model_config.tokenizer
    return load_tokenizer(resolve(name, None if os.path.isdir(name) else revision, weights=False))


def _check_draft(vllm_config: Any) -> None:
    draft = vllm_config.speculative_config.draft_model_config
    (name,) = draft.hf_config.architectures
    has_window = name == "MistralForCausalLM" and draft.hf_config.sliding_window is not None
    if name not in DRAFTS or has_window:
        raise FlyJaxError(
            f"The draft model {draft.model} is a {name}, with which the engine cannot draft on "
            f"TPU; give one of {', '.join(DRAFTS)}, without a sliding window."
        )
    if name == "Qwen2ForCausalLM" and not draft.hf_config.tie_word_embeddings:
        raise FlyJaxError(
            f"The draft model {draft.model} is a Qwen 2 with an unembedding of its own, which the "
            "engine's loader cannot load in JAX; give one with tied embeddings, or a Qwen 3."
        )
    target = vllm_config.model_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or target.use_mla:
        raise FlyJaxError(
            "A draft model was asked for with pipeline parallelism or a target with latent "
            "attention, whose cache has no place for it; choose another method."
        )
    if draft.model != target.model:
        mine = load_tokenizer(resolve(draft.model, draft.revision))
        check_same_vocabulary(target_tokenizer(target), mine)
