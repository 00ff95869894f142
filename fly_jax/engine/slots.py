"""Which request is in which slot, and what the caches of each slot hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fly_jax.decoding.kept import num_shared
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.request import RequestState

# Copying a row for fewer tokens than this takes longer than running them.
LEAST_SHARED = 16


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt that a slot's caches hold.

    Attributes:
      slot: where.
      length: tokens; 0 where no slot holds enough.
    """

    slot: int
    length: int


class Slots:
    """The rows of the engine's state."""

    def __init__(self, steps: Sequence[int]) -> None:
        """All are free, and hold nothing.

        Args:
          steps: how many slots, from the first on, rounds may be made for; the last is all.
        """
        number = steps[-1]
        self.occupants: list[RequestState | None] = [None] * number
        self._last: list[RequestState | None] = [None] * number
        self._steps = steps
        # Slots that are free, the one that was freed first in front.
        self._free = list(range(number))

    @property
    def live(self) -> list[tuple[int, RequestState]]:
        """The slots in use, with who is in them."""
        return [(slot, one) for slot, one in enumerate(self.occupants) if one is not None]

    @property
    def reach(self) -> int:
        """For how many slots the next rounds have to be made; 0 for none."""
        used = max((slot + 1 for slot, _ in self.live), default=0)
        return next(step for step in (0, *self._steps) if step >= used)

    @property
    def num_free(self) -> int:
        """Slots that nobody is in."""
        return len(self._free)

    def shared(self, prompt: Sequence[int]) -> Prefix:
        """The longest beginning of a prompt that the caches of a slot hold: see `num_shared`."""
        found = [
            Prefix(slot, num_shared(_text(request_state), prompt))
            for slot, request_state in enumerate(self._last)
            if request_state is not None
        ]
        best = max(found, key=lambda prefix: prefix.length, default=Prefix(0, 0))
        return best if best.length >= LEAST_SHARED else Prefix(0, 0)

    def take(self, request_state: RequestState, prefix: Prefix) -> int:
        """Gives a request a free slot: the one whose text it goes on with, or the stalest.

        It is one of the first, as far as these are free: so rounds are made for few.
        """
        few = next(step for step in self._steps if step > min(self._free))
        slot = next(slot for slot in self._free if slot < few)
        held = self._last[prefix.slot]
        if prefix.slot in self._free and prefix.slot < few and held is not None:
            text = _text(held)
            # Nothing of what it holds is lost that could be relied on.
            goes_on = prefix.length > 0 and prefix.length == num_shared(text, (*text, 0))
            slot = prefix.slot if goes_on else slot
        self._free.remove(slot)
        self.occupants[slot] = self._last[slot] = request_state
        return slot

    def forget(self, slot: int) -> None:
        """Shares nothing more of what a free slot's caches hold."""
        self._last[slot] = None

    def give_back(self, slot: int) -> None:
        """Frees a slot; what its caches hold stays to be shared."""
        self.occupants[slot] = None
        self._free.append(slot)


def _text(request_state: RequestState) -> tuple[int, ...]:
    return (*request_state.generation.prompt_token_ids, *request_state.generation.token_ids)


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
    occupants: tuple[RequestState | None, ...]
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
