"""Rounds on their way."""

from __future__ import annotations

import dataclasses

from fly_jax.decoding.state import RoundOutput
from fly_jax.serving.request import Ticket


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Rounds that were dispatched, and what is to be known when they are read.

    Attributes:
      output: of the rounds, perhaps not there yet.
      occupants: who was in which of the slots that are decoded.
      attended: positions that attention reads.
      is_timed: they run right after those before them, with nothing in between.
    """

    output: RoundOutput
    occupants: tuple[Ticket | None, ...]
    attended: int
    is_timed: bool

    @property
    def program(self) -> tuple[int, int]:
        """What it ran by: slots, and positions."""
        return len(self.occupants), self.attended

    @property
    def num_seats(self) -> int:
        """Slots that somebody was in."""
        return sum(one is not None for one in self.occupants)

    @property
    def is_awaited(self) -> bool:
        """Something of it may still settle."""
        return any(one is not None and not one.is_finished for one in self.occupants)

    @property
    def teaching(self) -> list[int]:
        """Slots from which a memory may learn: of greedy requests whose tokens are handed out."""
        return [
            slot
            for slot, one in enumerate(self.occupants)
            if one is not None and not one.is_finished and one.request.sampling is None
        ]
