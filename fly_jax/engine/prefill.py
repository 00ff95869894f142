"""Prefill: prompts are run chunk by chunk, short ones several at a time, before they get slots."""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fly_jax.decoding.config import RoundSpec
from fly_jax.decoding.programs import Programs, Rows
from fly_jax.decoding.state import DecodeState
from fly_jax.engine.request import Request, RequestState
from fly_jax.engine.slots import Prefix

# No chunk size but the largest is below this; each is `_GROWTH` times the one before it, and so
# are the numbers of rows.
_SMALLEST_CHUNK = 16
_GROWTH = 4
# The scores of a layer, [rows, heads, chunk, capacity] in float32, would fill a chip.
_LARGEST_CHUNK = 1024
# Tokens of a pass, over all rows, where no request waits for rounds in between.
OFFLINE_TOKENS = 2048
# Of any pass on a CPU, where more gained little and takes more programs.
SMALL_TOKENS = 64

_Prompts = Sequence[Sequence[int]]


class Chunk(NamedTuple):
    """A piece of prompts that one pass runs."""

    rows: int  # prompts, and rows that only fill the pass
    start: int  # position of the first token
    size: int  # tokens of each row, and padding beyond its prompt
    attended: int  # cache positions that attention reads

    @property
    def program(self) -> tuple[int, int, int]:
        """The key of its program: rows, size, and positions."""
        return self.rows, self.size, self.attended


class ChunkPlan:
    """A plan of chunks of few shapes, so that few programs are compiled."""

    def __init__(
        self, steps: Sequence[int], *, tokens: int, num_slots: int, longest: int,
        together: int | None = None,
    ) -> None:  # fmt: skip
        """Takes prompts of at most `longest` tokens; `steps` are those of `AttentionBuckets`.

        Those with more than `together` tokens are run alone, if given: padding costs time.
        """
        self.tokens, self._steps = tokens, steps  # the first of all rows that a pass runs at most
        self._together = longest if together is None else together
        sizes = [min(tokens, _LARGEST_CHUNK, 1 << (longest - 1).bit_length(), steps[-1])]
        while sizes[0] // _GROWTH >= _SMALLEST_CHUNK:
            sizes.insert(0, sizes[0] // _GROWTH)
        self.sizes = tuple(sizes)  # tokens of a row
        rows, most = [1], min(num_slots, max(tokens // sizes[0], 1))
        while rows[-1] < most:
            rows.append(min(rows[-1] * _GROWTH, most))
        self.rows = tuple(rows)  # prompts that are run together

    def sizes_of(self, rows: int) -> tuple[int, ...]:
        """Sizes of chunks of so many rows."""
        most = min(max(self.tokens // rows, self.sizes[0]), self.positions(rows))
        return tuple(size for size in self.sizes if size <= most)

    def positions(self, rows: int) -> int:
        """Cache positions of each of so many rows: prompts that are run together are short."""
        return self._steps[-1 if rows == 1 else 0]

    def chunks(self, start: int, end: int, rows: int = 1) -> Iterator[Chunk]:
        """The chunks that run the tokens from `start` to `end` of so many rows."""
        sizes = self.sizes_of(rows)
        while start < end:
            size = next((size for size in sizes if size >= end - start), sizes[-1])
            # A chunk that would overrun the cache begins earlier: running tokens twice is harmless.
            at = min(start, self.positions(rows) - size)
            yield Chunk(rows, at, size, next(step for step in self._steps if step >= at))
            start = at + size

    def groups(self, length: int, number: int) -> list[tuple[list[Chunk], int]]:
        """The chunks of groups of equally long prompts that share nothing, with their numbers."""
        most = self.rows[-1] if self.kind(0, length) else 1
        whole, rest = divmod(number, most)
        rows = {next(rows for rows in self.rows if rows >= most): whole}
        if rest:
            few = next(rows for rows in self.rows if rows >= rest)
            rows[few] = rows.get(few, 0) + 1
        return [(list(self.chunks(0, length, few)), times) for few, times in rows.items() if times]

    def kind(self, start: int, end: int) -> tuple[int, int] | None:
        """The kind of a prompt: prompts of one kind are run together; None for alone."""
        # A pass over a long one has enough tokens by itself.
        if end > self._steps[0] or end - start > self._together:
            return None
        return start, max(end - start - 1, _SMALLEST_CHUNK - 1).bit_length()

    def all(self) -> set[tuple[int, int, int]]:
        """The keys of all programs that may run."""
        alone, least = itertools.product((1,), self.sizes, self._steps), self._steps[0]
        together = ((rows, size, least) for rows in self.rows[1:] for size in self.sizes_of(rows))
        return {*alone, *together}

    def needed(self, prompts: _Prompts, held: _Prompts, block: int) -> set[tuple[int, int, int]]:
        """The programs that run these prompts, in whatever order they come.

        One also begins behind whole blocks that it has in common with another, or that are held;
        with blocks of 0 there are none.
        """
        begins = {(0, len(prompt)) for prompt in prompts}
        if block:
            shared = shared_beginnings([*prompts, *held])[: len(prompts)]
            begins |= {
                (length // block * block, len(prompt))
                for length, prompt in zip(shared, prompts, strict=True)
            }
        rows = self.rows if len(prompts) > 1 else (1,)
        return {
            chunk.program
            for begin in begins
            for number in (rows if self.kind(*begin) else (1,))
            for chunk in self.chunks(*begin, number)
        }


class Prefill:
    """The prompts that are being run, in rows of their own, `begun` by `time.perf_counter`.

    They are those of the `group`, with what a slot held of each; empty for nobody's.
    """

    def __init__(
        self, programs: Programs, spec: RoundSpec, plan: ChunkPlan, capacity: int, max_length: int
    ) -> None:
        """Begins with no prompts; `capacity` is that of a row's caches, in positions."""
        self.plan = plan
        self.group: list[tuple[RequestState, Prefix]] = []
        self.begun = 0.0
        self._programs, self._spec = programs, spec
        self._capacity, self._max_length = capacity, max_length
        self._rows: DecodeState | None = None
        self._drafts = True
        self._chunks: collections.deque[Chunk] = collections.deque()

    def limit(self, request: Request) -> int:
        """Length at which a request is done."""
        return min(len(request.prompt) + request.max_new_tokens, self._max_length)

    def rows(
        self, requests: Sequence[RequestState], number: int, positions: int | None = None
    ) -> DecodeState:
        """Makes rows whose prompts have not run; those beyond the requests are finished."""
        lengths, limits = np.ones((2, number), np.int32)
        text = np.zeros((number, self._capacity), np.int32)
        seeds = np.zeros(number, np.uint32)
        budgets = np.full(number, math.inf, np.float32)
        for row, one in enumerate(requests):
            prompt = one.request.prompt
            text[row, : len(prompt)] = prompt
            lengths[row], limits[row] = len(prompt), self.limit(one.request)
            seeds[row] = one.request.seed % 2**32
            budgets[row] = math.inf if one.budget is None else one.budget
        given = None if self._spec.rule.budget is None else budgets
        rows = Rows(text, lengths, limits, seeds, given)
        return self._programs.begin(rows, positions or self.plan.positions(number))

    def begin(
        self, group: Sequence[tuple[RequestState, Prefix]], state: DecodeState, *, drafts: bool
    ) -> None:
        """Takes the next prompts, of one kind, without what they share with slots of the state.

        See `Programs.prefill_chunk` for `drafts`.
        """
        self.group, self.begun, self._drafts = list(group), time.perf_counter(), drafts
        number = next(rows for rows in self.plan.rows if rows >= len(group))
        self._rows = self.rows([one for one, _ in group], number)
        for at, (_, prefix) in enumerate(group):
            if prefix.length:
                self._rows = self._programs.copy_row(self._rows, state, prefix.slot, at)
        longest = max(len(one.request.prompt) for one, _ in group)
        self._chunks.extend(self.plan.chunks(group[0][1].length, longest, number))

    def run(self, *, waits: bool) -> tuple[int, DecodeState | None]:
        """Runs a chunk, perhaps behind the last; returns its tokens, and rows that are done."""
        assert self._rows is not None
        if waits:
            jax.block_until_ready(self._rows.length)
        chunk = self._chunks.popleft()
        where = chunk.size, chunk.start, chunk.attended
        self._rows = self._programs.prefill_chunk(self._rows, *where, drafts=self._drafts)
        return chunk.rows * chunk.size, None if self._chunks else self._rows

    def end(self) -> None:
        """Ends the group; the next prompts may come."""
        self.group, self._rows = [], None
        self._chunks.clear()


def shared_beginnings(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Counts the tokens at each prompt's beginning that another prompt shares; never all of it."""
    order = sorted(range(len(prompts)), key=lambda index: tuple(prompts[index]))
    found = [0] * len(prompts)
    for one, other in itertools.pairwise(order):  # sorted, neighbours have most in common
        pairs = zip(prompts[one], prompts[other], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for index in (one, other):
            found[index] = max(found[index], min(same, len(prompts[index]) - 1))
    return found
