"""Which request is in which slot, and what the caches of each slot hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array

from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.request import Request, RequestState

# Beginnings are shared in multiples of so many tokens: copying a row for fewer takes longer than
# running them, and prompts that share a block begin at one position.
SHARED_BLOCK = 16
_UNSEEN = 2


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt that a slot's caches hold.

    Attributes:
      slot: where.
      length: tokens; 0 where no slot holds enough.
    """

    slot: int
    length: int


NOTHING = Prefix(0, 0)


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

    def held(self, slot: int) -> list[RequestState]:
        """A request for the tokens that the caches of a slot hold, if they hold any."""
        last = self._last[slot]
        return [] if last is None else [RequestState(Request(_text(last)), last.rule)]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The tokens that the caches of each slot hold, as far as they hold any."""
        return [_text(one) for one in self._last if one is not None]

    @property
    def num_free(self) -> int:
        """Slots that nobody is in."""
        return len(self._free)

    def shared(self, prompt: Sequence[int]) -> Prefix:
        """The longest beginning of a prompt that the caches of a slot hold, in whole blocks."""
        found = [
            Prefix(slot, _shared_blocks(_text(one), prompt))
            for slot, one in enumerate(self._last)
            if one is not None
        ]
        best = max(found, key=lambda prefix: prefix.length, default=NOTHING)
        return best if best.length > 0 else NOTHING

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
            goes_on = prefix.length > 0 and prefix.length == _shared_blocks(text, (*text, 0))
            slot = prefix.slot if goes_on else slot
        self._free.remove(slot)
        self.occupants[slot] = self._last[slot] = request_state
        return slot

    def forget(self) -> None:
        """Shares nothing more of what the caches of the slots hold, in which nobody is."""
        self._last = [None] * len(self._last)

    def give_back(self, slot: int) -> None:
        """Frees a slot; what its caches hold stays to be shared."""
        self.occupants[slot] = None
        self._free.append(slot)


def num_shared(row: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens at the beginning of a prompt the caches of a row hold; may be negative.

    The row's last two tokens are not relied on. A draft model has not seen the last one when
    a round ends, nor the one before it where all of its draft was kept; and a row that is
    finished is fed its last one again, with too little attended to, while others go on. Nor is
    the last of the prompt: something has to be run.
    """
    most = min(len(row) - _UNSEEN, len(prompt) - 1)
    return next((at for at in range(most) if row[at] != prompt[at]), most)


def _shared_blocks(row: Sequence[int], prompt: Sequence[int]) -> int:
    """`num_shared`, in whole blocks."""
    return num_shared(row, prompt) // SHARED_BLOCK * SHARED_BLOCK


def _text(request_state: RequestState) -> tuple[int, ...]:
    return (*request_state.generation.prompt_token_ids, *request_state.generation.token_ids)


class Seated(NamedTuple):
    """Requests whose prompts were run together.

    Attributes:
      requests: that have come into slots.
      dispatched: when their prompts began to be dispatched.
      is_there: an array that is there when their prompts have been run.
    """

    requests: tuple[RequestState, ...]
    dispatched: float
    is_there: Array


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Rounds that were dispatched, and what is to be known when they are read.

    Attributes:
      output: of the rounds, perhaps not there yet.
      occupants: who was in which of the slots that are decoded.
      attended: positions that attention reads.
      is_timed: they run right after those before them, with nothing in between.
      seated: the requests that have come into slots since the dispatch before it.
    """

    output: RoundOutput
    occupants: tuple[RequestState | None, ...]
    attended: int
    is_timed: bool
    seated: tuple[Seated, ...] = ()

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
