"""The numbers of the requests in the slots, as one program takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import RuleInputs
from fly_jax.engine.request import RequestState
from fly_jax.errors import FlyJaxError
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Exact, Rule, per_row
from fly_jax.verification.sampling import Sampling, sampling_per_row

_GREEDY = Sampling(0.0, top_k=0, top_p=1.0)  # with every step in the program


class RowNumbers:
    """Rule, sampling and ends of each slot; put on the devices when the slots change hands.

    Attributes:
      united: a rule of all slots in which every kind has its place.
    """

    def __init__(
        self, own: Rule, rules: Sequence[Rule] | None, sampling: Sampling | None, num_slots: int
    ) -> None:
        """Nobody is in a slot.

        Args:
          own: rule of requests without one.
          rules: a rule of every other kind but the lossless one; None where all requests are
            decoded with `own` and `sampling`.
          sampling: of all requests then.
          num_slots: rows of the program.
        """
        self._own, self._sampling = own, sampling
        self._like = None if rules is None else (own, Exact(), *rules)
        self.united: Any = own if self._like is None else per_row([own] * num_slots, self._like)
        self._last: tuple[tuple[RequestState | None, ...], RuleInputs] | None = None

    def takes(self, rule: Rule) -> bool:
        """Whether a rule is of one of the kinds."""
        if self._like is None:
            return rule is self._own
        kind: Any = jax.tree.structure(self.united)
        return bool(jax.tree.structure(per_row([rule], self._like)) == kind)

    def inputs(
        self,
        programs: Programs,
        occupants: Sequence[RequestState | None],
        protection: Protection,
        *,
        sampled: bool,
    ) -> RuleInputs:
        """What the round reads of these requests.

        Args:
          programs: for which they are put on the devices.
          occupants: of all slots.
          protection: of all slots.
          sampled: whether some are drawn.
        """
        who = tuple(occupants)
        if self._last is None or self._last[0] != who:
            seated = np.array([one is not None for one in who])
            ends = np.array([one is None or not one.request.ignores_eos for one in who])
            rows = {"seated": programs.put_numbers(seated), "ends": programs.put_numbers(ends)}
            if self._like is not None or self._last is None:
                rule, sampling = self._of_rows(who)
                rows["rule"] = programs.put_numbers(rule)
                rows["sampling"] = programs.put_numbers(sampling)
                rows["protected"] = protection.of(who)
                inputs = RuleInputs(**rows)
            else:
                inputs = dataclasses.replace(self._last[1], **rows)
            self._last = (who, inputs)
        inputs = self._last[1]
        return inputs if sampled else dataclasses.replace(inputs, sampling=None)

    def _of_rows(self, who: Sequence[RequestState | None]) -> tuple[Rule, Sampling | None]:
        if self._like is None:
            return self._own, self._sampling
        rules = [self._own if one is None else one.rule for one in who]
        samplings = [_GREEDY if one is None else one.sampling for one in who]
        return per_row(rules, self._like), sampling_per_row(samplings)


class Protection:
    """The tokens of each slot, on the devices."""

    def __init__(
        self, programs: Programs, own: Sequence[int], always: Sequence[int], num_slots: int
    ) -> None:
        """All slots have the engine's own.

        Args:
          programs: that read them.
          own: tokens of requests that do not say.
          always: tokens of all.
          num_slots: rows.
        """
        self._programs, self._own, self._always = programs, tuple(own), tuple(always)
        self._held: list[Sequence[int] | None] = [None] * num_slots
        self._rows = programs.put_protected([*own, *always], num_slots)

    def of(self, occupants: Sequence[RequestState | None]) -> Bool[Array, "slots vocab"]:
        """The tokens of these requests."""
        for slot, request_state in enumerate(occupants):
            wanted = None if request_state is None else request_state.request.protected_token_ids
            if request_state is None or wanted == self._held[slot]:
                continue  # nobody is rescued anything in a slot without a request
            self.hold(slot, wanted)
        return self._rows

    def hold(self, slot: int, token_ids: Sequence[int] | None) -> None:
        """Changes a slot's tokens; None for the engine's own."""
        own = self._own if token_ids is None else token_ids
        row = self._programs.put_protected([*own, *self._always])
        self._rows = _replaced(self._rows, row, self._programs.put(np.asarray(slot, np.int32), ()))
        self._held[slot] = token_ids


@jax.jit
def _replaced(
    rows: Bool[Array, "slots vocab"], row: Bool[Array, " vocab"], slot: Int[Array, ""]
) -> Bool[Array, "slots vocab"]:
    # The rounds on their way read the rows as they were: nothing is donated.
    return jax.lax.dynamic_update_slice_in_dim(rows, row[None], slot, 0)


class MemoryKeys:
    """What the rounds look mismatches up in."""

    def __init__(self, programs: Programs) -> None:
        """Nothing is on the devices yet."""
        self._programs = programs
        self._known: tuple[CorrectionMemory, int] | None = None
        self._keys: Int32[Array, "pairs 2"] | None = None

    def of(self, memory: CorrectionMemory) -> Int32[Array, "pairs 2"]:
        """The keys as they are now; see `CorrectionMemory.keys`."""
        known = (memory, memory.version)
        if self._keys is None or known != self._known:
            self._keys = self._programs.put(memory.keys(), (None, None))
            self._known = known
        return self._keys


def check_memory(spec: RoundSpec, memory: CorrectionMemory | None) -> None:
    """Raises FlyJaxError for rounds that need a memory, without one."""
    if memory is None and (spec.rule.uses_memory or spec.reports_mismatches):
        raise FlyJaxError(
            "This rule looks mismatches up in a memory, or is to teach one, and none was "
            "given; pass memory=CorrectionMemory(…), empty or filled."
        )
