"""The rule, the place and the sampling of each row of a step; free of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.startup import KEY, request_rule
from fly_jax.verification.rules import Exact, Rule, per_row
from fly_jax.verification.sampling import Sampling

_LOGGER = logging.getLogger(__name__)


class RequestPlaces:
    """The `num` places of requests, each kept from a request's first step to its last.

    More requests may be alive where some were preempted; those without a place, and padding, have
    the place `num`.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._of: dict[str, int] = {}
        self._free = list(range(num))[::-1]

    def step(
        self, rows: Sequence[str | None], live: Collection[str]
    ) -> tuple[Int32[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
        """The place of each row's request, by its id (None for padding), and whether it is new.

        Frees the places of requests that are not `live`, as the engine knows them.
        """
        for gone in [name for name in self._of if name not in live]:
            slot = self._of.pop(gone)
            self._free += [slot] if slot < self.num else []
        is_new = np.zeros(len(rows), bool)
        slots = np.full(len(rows), self.num, np.int32)
        for index, name in enumerate(rows):
            if name is None:
                continue
            if name not in self._of:
                self._of[name] = self._free.pop() if self._free else self.num
                is_new[index] = True
            slots[index] = self._of[name]
        return slots, is_new


class StepRows(NamedTuple):
    """The rows of one step."""

    rule: Rule  # one number for each row everywhere
    slots: Int32[np.ndarray, " rows"]  # where each budget lies; `num_slots` for padding
    is_new: Bool[np.ndarray, " rows"]  # those whose budget has not been touched


class RowRules:
    """The rules of all requests, each from its first step to its last."""

    def __init__(self, config: DecodingConfig, num_slots: int) -> None:
        """Takes a checked config; with a budget, requests without a slot are decoded exactly."""
        self._slots, self.num_slots = RequestPlaces(num_slots), num_slots
        self._config = config
        self._engines = config.to_rule()
        self._rules: dict[str, Rule] = {}
        self._united: tuple[list[Rule], Rule] | None = None

    def step(
        self, rows: Sequence[str | None], live: Collection[str], parameters: Callable[[str], Any]
    ) -> StepRows:
        """The rules of rows, by requests' `SamplingParams`; places as `RequestPlaces.step`."""
        slots, is_new = self._slots.step(rows, live)
        self._rules = {name: rule for name, rule in self._rules.items() if name in live}
        for name in rows:
            if name is not None and name not in self._rules:
                self._rules[name] = self._rule_of(name, parameters(name))
        rules = [self._engines if name is None else self._rules[name] for name in rows]
        return StepRows(self._per_row(rules), slots, is_new)

    def padding(self, num_rows: int) -> StepRows:
        """A step of no requests, of the form that every step has."""
        slots = np.full(num_rows, self.num_slots, np.int32)
        return StepRows(self._per_row([self._engines] * num_rows), slots, np.zeros(num_rows, bool))

    def _per_row(self, rules: list[Rule]) -> Rule:
        """Unites the rules of rows, which seldom change from one step to the next."""
        if self._united is None or self._united[0] != rules:
            self._united = rules, per_row(rules, like=[self._engines])
        return self._united[1]

    def _rule_of(self, name: str, parameters: Any) -> Rule:
        override = (parameters.extra_args or {}).get(KEY)
        try:
            return request_rule(self._config, override, parameters.temperature)
        except FlyJaxError as error:  # where the server's own check does not reach
            _LOGGER.warning("Request %s is decoded with the rule exact: %s", name, error)
            return Exact()


def sampling_of(
    temperature: Float[Array, " requests"],
    top_k: Int[Array, " requests"],
    top_p: Float[Array, " requests"],
) -> Sampling:
    """The engine's numbers as a `Sampling`; the engine's temperature of a greedy request is -1."""
    return Sampling(jnp.maximum(temperature, 0), jnp.maximum(top_k, 0), top_p)
