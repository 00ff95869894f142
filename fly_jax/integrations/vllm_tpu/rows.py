"""Which rule the rows of a step have, and where their budgets lie: the host's side of the rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.settings import KEY, request_rule
from fly_jax.integrations.vllm_tpu.slots import Slots
from fly_jax.verification.rules import Exact, Rule, per_row

_LOGGER = logging.getLogger(__name__)


class StepRows(NamedTuple):
    """The rows of one step.

    Attributes:
      rule: one number for each row everywhere.
      slots: where each row's budget lies; `num_slots` for a row that is padding.
      is_new: rows whose budget has not been touched.
    """

    rule: Rule
    slots: Int32[np.ndarray, " rows"]
    is_new: Bool[np.ndarray, " rows"]


class RowRules:
    """Every request's own rule, from its first step to its last."""

    def __init__(self, config: DecodingConfig, num_slots: int) -> None:
        """Checks nothing: the config has been.

        Args:
          config: the engine's, whose rule a request has that asks for no other.
          num_slots: budgets that are kept; with a rule that has one, a request without is decoded
            exactly.
        """
        self._slots = Slots(num_slots)
        self._config = config
        self._engines = config.to_rule()
        self._rules: dict[str, Rule] = {}
        self._united: tuple[list[Rule], Rule] | None = None

    @property
    def num_slots(self) -> int:
        """Budgets that are kept."""
        return self._slots.num

    def step(
        self,
        rows: Sequence[str | None],
        live: Collection[str],
        parameters: Callable[[str], Any],
    ) -> StepRows:
        """What the program needs to know of a step's rows.

        Args:
          rows: the requests' ids in the order of the rows; None for padding.
          live: ids of all requests that the engine knows; what others had is given back.
          parameters: the `SamplingParams` of a request.
        """
        slots, is_new = self._slots.step(rows, live)
        for gone in [name for name in self._rules if name not in live]:
            del self._rules[gone]
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
        """They seldom change from one step to the next."""
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
