"""Seconds of rounds of each K, from which `decoding/depth.py` chooses, and when to look again."""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs

# What a dispatch shows counts so much against those before it, and at most so many times as much.
_WEIGHT, _MOST = 0.2, 2.0
# What rounds give of what is expected follows more slowly: rates follow what is accepted already.
_GIVEN_WEIGHT = 0.05
# Another depth is chosen where it promises so much more.
_LEAST_GAIN = 0.05
# Rounds without a draft before one is tried again; twice as many each time that it does not pay.
_FIRST_WAIT, _LONGEST_WAIT = 64, 1024
# Dispatches of such a try: in the first one a draft model takes in what it has missed.
_TRIES = 2

# How often a round of each depth is timed before the first request; the fastest counts.
_TIMINGS = 3

Program = tuple[int, int]


class Round(NamedTuple):
    """The depth of a round, its tokens, and those expected, had every seat been live.

    Where nothing `is_drafted`, since a lookup finds nothing, it is a round of one token at a time.
    """

    depth: int
    tokens: int
    expected: float
    is_drafted: bool = True


class DepthCosts:
    """Seconds of a round of each depth, by the program: its rows, and how far it attends.

    Beside them is what rounds give of what is expected of them. That is less than all: texts end
    within a block, their slots wait for the next dispatch, and mismatches come in clusters; the
    deeper is drafted, the more is lost.

    Attributes:
      depths: what K is chosen from, in ascending order.
      current: K of the last round that was read.
      num_rounds: that were read, by K.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        """Nothing is known, so that the largest K is taken."""
        self.depths, self.num_speculative_tokens = tuple(depths), max(depths)
        self.current = self.num_speculative_tokens
        self.num_rounds: collections.Counter[int] = collections.Counter(dict.fromkeys(depths, 0))
        self._seconds: dict[Program, np.ndarray] = {}
        self._given: dict[Program, np.ndarray] = {}
        # Rounds in a row without a draft, and with one.
        self._num_plain = self._num_drafted = 0
        self._wait, self._tries = _FIRST_WAIT, 0
        self._tried = itertools.cycle(self.depths[1:])
        self._trial = self.num_speculative_tokens

    def learn(self, program: Program, seconds: Sequence[float]) -> None:
        """Takes what a round of each depth takes."""
        self._seconds[program] = np.asarray(seconds, np.float32)
        self._given[program] = np.ones(len(seconds), np.float32)

    def measure(
        self,
        programs: Programs,
        state: DecodeState,
        inputs: RuleInputs,
        one: DecodeState,
        rows: int,
    ) -> DecodeState:
        """Times a round of each depth by a program that has been compiled.

        Nobody is in the slots of `state`, which is donated; the first `rows` then decode `one`.
        """
        attended, found = state.target.attended, dict.fromkeys(self.depths, math.inf)
        assert attended is not None
        for depth in self.depths * _TIMINGS:
            for row in range(rows):
                state, _ = programs.insert(state.attending(None), one, [row])
            only = programs.put(_only(depth, self.depths))
            state = jax.block_until_ready(state.attending(attended).choosing(only))
            begin = time.perf_counter()
            state, output = programs.run(state, inputs, rows)
            num_rounds = len(rounds_run(jax.device_get(output), rows))
            found[depth] = min(found[depth], (time.perf_counter() - begin) / num_rounds)
        for row in range(rows):
            state = programs.release(state.attending(None), row)
        self.learn((rows, attended), list(found.values()))
        return state

    def next(self, program: Program, *, may_vary: bool) -> np.ndarray:
        """[depths], the seconds from which the next rounds choose, if no token depends on K."""
        known = self._seconds.get(program)
        if known is None or not may_vary:
            return _only(self.num_speculative_tokens, self.depths)
        if self._num_plain >= self._wait:  # how much is accepted is seen only where there is some
            self._tries, self._num_plain, self._trial = _TRIES, 0, next(self._tried)
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
        if self._tries:
            self._tries -= 1
            return _only(self._trial, self.depths)
        # A deeper round, which has not been seen for long, gives no more than a shallower one.
        known = known / np.minimum.accumulate(self._given[program])
        stays = np.equal(self.depths, self.current)
        return np.where(stays, known * np.float32(1 - _LEAST_GAIN), known)

    def observe(self, program: Program, rounds: Sequence[Round], seconds: float | None) -> None:
        """Takes what a dispatch has done, and the seconds, if nothing else ran meanwhile."""
        before, drafted = self.current, [one for one in rounds if one.is_drafted or not one.depth]
        for one in rounds:
            self.num_rounds[one.depth] += 1
            self.current = one.depth
            self._num_plain = self._num_plain + 1 if one.depth == 0 else 0
            self._num_drafted = self._num_drafted + 1 if one.depth else 0
        if self._num_drafted >= _FIRST_WAIT:
            self._wait = _FIRST_WAIT
        if program not in self._seconds or len({one.depth for one in drafted}) != 1:
            return
        at = self.depths.index(drafted[0].depth)
        given = sum(one.tokens for one in drafted) / sum(one.expected for one in drafted)
        _move(self._given[program], at, given, _GIVEN_WEIGHT)
        is_one = len(drafted) == len(rounds) and before == self.current
        if seconds is not None and is_one:
            _move(self._seconds[program], at, seconds / len(rounds))


def rounds_run(output: RoundOutput, num_seats: int) -> list[Round]:
    """The rounds of a dispatch (on the host), where K is chosen, that had something to do."""
    assert output.depth is not None
    assert output.expected is not None
    num_live = np.sum((output.count > 0) | (output.num_drafted > 0), axis=1)
    tokens, drafted = np.sum(output.count, axis=1), np.sum(output.num_drafted, axis=1)
    expected = output.expected / np.maximum(num_live, 1) * num_seats
    return [
        Round(int(output.depth[at]), int(tokens[at]), float(expected[at]), bool(drafted[at]))
        for at, live in enumerate(num_live)
        if live
    ]


def _only(depth: int, depths: Sequence[int]) -> np.ndarray:
    """[depths], seconds with which this one is chosen whatever is accepted."""
    return np.where(np.equal(depths, depth), 1, np.inf).astype(np.float32)


def _move(figures: np.ndarray, at: int, seen: float, weight: float = _WEIGHT) -> None:
    """Takes one of some running figures towards what was seen."""
    figures[at] += weight * (min(seen, _MOST * figures[at]) - figures[at])
