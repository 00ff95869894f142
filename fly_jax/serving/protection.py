"""Which tokens are never rescued, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from fly_jax.decoding.programs import Programs
from fly_jax.serving.request import Ticket


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

    def of(self, occupants: Sequence[Ticket | None]) -> Bool[Array, "slots vocab"]:
        """The tokens of these requests."""
        for slot, ticket in enumerate(occupants):
            wanted = None if ticket is None else ticket.request.protected_token_ids
            if ticket is None or wanted == self._held[slot]:
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
