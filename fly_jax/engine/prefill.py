"""Taking prompts in, one after the other and piece by piece, before they get a slot."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import DecodeState
from fly_jax.engine.request import Request, RequestState
from fly_jax.engine.slots import LEAST_SHARED, Prefix


class Intake:
    """One row that a prompt is run in.

    Attributes:
      sizes: that pieces may have, in ascending order.
      request_state: whose prompt is being taken in; None for nobody's.
    """

    def __init__(
        self,
        programs: Programs,
        spec: RoundSpec,
        steps: Sequence[int],
        prefill_chunk: int,
        max_length: int,
    ) -> None:
        """Nobody's prompt is taken in.

        Args:
          programs: that run.
          spec: of the rounds.
          steps: see `ladder`; the last is the capacity.
          prefill_chunk: tokens of the largest piece.
          max_length: see `Engine`.
        """
        self.sizes = piece_sizes(prefill_chunk)
        self.request_state: RequestState | None = None
        self._prefix = Prefix(0, 0)
        self._programs, self._spec = programs, spec
        self._steps, self._max_length = steps, max_length
        self._one: DecodeState | None = None
        self._planned: collections.deque[Piece] = collections.deque()

    def limit(self, request: Request) -> int:
        """Length at which a request is done."""
        return min(len(request.prompt) + request.max_new_tokens, self._max_length)

    def row(self, request_state: RequestState) -> DecodeState:
        """A state of one row, of whose prompt nothing has been run."""
        limit = self.limit(request_state.request)
        return row_of(self._programs, self._spec, request_state, limit, self._steps[-1])

    def begin(self, request_state: RequestState, prefix: Prefix, state: DecodeState) -> None:
        """Takes the next prompt, behind what it shares with a slot of the state."""
        one = self.row(request_state)
        if prefix.length:
            one = self._programs.copy_row(one, state, prefix.slot)
        self.request_state, self._prefix, self._one = request_state, prefix, one
        length = len(request_state.request.prompt)
        self._planned.extend(pieces(prefix.length, length, self.sizes, self._steps))

    def run(self) -> tuple[int, DecodeState | None]:
        """Runs the next piece: its tokens, and the row once the whole prompt has been run."""
        assert self._one is not None
        piece = self._planned.popleft()
        self._one = self._programs.take_in(self._one, piece.size, piece.start, piece.attended)
        return piece.size, None if self._planned else self._one.attending(None)

    def end(self) -> tuple[RequestState, Prefix]:
        """Whose prompt has been run, and what of it was copied."""
        request_state = self.request_state
        assert request_state is not None
        self.drop()
        return request_state, self._prefix

    def drop(self) -> None:
        """Is free for the next prompt."""
        self.request_state = self._one = None
        self._planned.clear()

    def needed(self, prompts: Sequence[Sequence[int]], *, shares: bool) -> list[tuple[int, int]]:
        """The pieces of prompts, by size and how far they attend.

        Args:
          prompts: what will be taken in, in whatever order.
          shares: also behind what one of them has in common with another.
        """
        begins = {(0, len(prompt)) for prompt in prompts}
        if shares:
            shared = shared_beginnings(prompts)
            lengths = map(len, prompts)
            begins |= {one for one in zip(shared, lengths, strict=True) if one[0] >= LEAST_SHARED}
        planned = (pieces(*begin, self.sizes, self._steps) for begin in begins)
        return sorted({(one.size, one.attended) for some in planned for one in some})


# Tokens that a piece may have, besides the largest: each size fits into the next four times.
_SMALLEST_PIECE = 16
_GROWTH = 4


class Piece(NamedTuple):
    """Some tokens of a prompt that one pass takes in.

    Attributes:
      start: position of the first.
      size: how many are run, those beyond the prompt among them.
      attended: cache positions that attention reads.
    """

    start: int
    size: int
    attended: int


def piece_sizes(largest: int) -> tuple[int, ...]:
    """The sizes of pieces, in ascending order."""
    sizes = [largest]
    while sizes[0] // _GROWTH >= _SMALLEST_PIECE:
        sizes.insert(0, sizes[0] // _GROWTH)
    return tuple(sizes)


def pieces(start: int, end: int, sizes: Sequence[int], steps: Sequence[int]) -> Iterator[Piece]:
    """What takes in the tokens of a prompt from `start` to `end`.

    Args:
      start: tokens that the caches hold already.
      end: of the prompt.
      sizes: from `piece_sizes`; the largest is at most the last of `steps`.
      steps: see `ladder`; the last one is the capacity.
    """
    while start < end:
        size = next((size for size in sizes if size >= end - start), sizes[-1])
        # What would run over the end of the cache begins earlier: running tokens twice is harmless.
        at = min(start, steps[-1] - size)
        yield Piece(at, size, next(step for step in steps if step >= at))
        start = at + size


def shared_beginnings(prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens at the beginning of each prompt some other one has too; never all of it."""
    order = sorted(range(len(prompts)), key=lambda index: tuple(prompts[index]))
    found = [0] * len(prompts)
    for one, other in itertools.pairwise(order):  # sorted, neighbours have most in common
        pairs = zip(prompts[one], prompts[other], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for index in (one, other):
            found[index] = max(found[index], min(same, len(prompts[index]) - 1))
    return found


def empty_rows(programs: Programs, spec: RoundSpec, num_slots: int, capacity: int) -> DecodeState:
    """Rows that are finished from the start."""
    ones = np.ones(num_slots, np.int32)
    text = np.zeros((num_slots, capacity), np.int32)
    return _begun(programs, spec, text, ones, ones, ones).unpaced()


def row_of(
    programs: Programs, spec: RoundSpec, request_state: RequestState, limit: int, capacity: int
) -> DecodeState:
    """A state of one row, of whose prompt nothing has been run.

    Args:
      programs: that will run it.
      spec: of the rounds.
      request_state: whose row it is.
      limit: length at which it is done.
      capacity: of the caches.
    """
    prompt = request_state.request.prompt
    text = np.zeros((1, capacity), np.int32)
    text[0, : len(prompt)] = prompt
    length, end, seed = (
        np.array([number]) for number in (len(prompt), limit, request_state.request.seed % 2**32)
    )
    return _begun(programs, spec, text, length, end, seed, request_state.budget)


def _begun(
    programs: Programs,
    spec: RoundSpec,
    text: np.ndarray,
    lengths: np.ndarray,
    limits: np.ndarray,
    seeds: np.ndarray,
    budget: float | None = None,
) -> DecodeState:
    budgets = None
    if spec.rule.budget is not None:
        budgets = np.full(len(text), math.inf if budget is None else budget, np.float32)
    needs_pace = spec.depths or spec.deferred_window
    rows = programs.put_rows(
        text,
        lengths.astype(np.int32),
        limits.astype(np.int32),
        seeds.astype(np.uint32),
        budgets,
        np.zeros(len(spec.depths), np.float32) if needs_pace else None,
    )
    return programs.begin(rows)
