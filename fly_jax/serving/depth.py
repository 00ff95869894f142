"""From what K is chosen for the rows in the slots: what rounds take, and when to look again.

The choice itself is the decoder's (`decoding/depth.py`): it is made on the device, in each round,
from the live rows' acceptance and the seconds that it is given for every depth. Here these seconds
are kept, one dispatch old.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Sequence

import jax
import numpy as np

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs

# A round measured by the host counts so much against those before it, and at most so many times.
_WEIGHT, _MOST = 0.2, 2.0
# Another depth is chosen where it promises so much more.
_LEAST_GAIN = 0.05
# Rounds without a draft before one is tried again; twice as many each time that it does not pay.
_FIRST_WAIT, _LONGEST_WAIT = 64, 1024
# Dispatches of such a try: in the first one a draft model takes in what it has missed.
_TRIES = 2

# How often a round of each depth is timed before the first request; the fastest counts.
_TIMINGS = 3

Program = tuple[int, int]


class DepthCosts:
    """Seconds of a round of each depth, by the program: its rows, and how far it attends.

    Attributes:
      depths: what K is chosen from, in ascending order.
      current: K of the last round that was read.
      num_rounds: that were read, by K.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        """Nothing is known, so that the largest K is taken.

        Args:
          depths: see the class.
        """
        self.depths = tuple(depths)
        self.current = self.depths[-1]
        self.num_rounds: collections.Counter[int] = collections.Counter(dict.fromkeys(depths, 0))
        self._seconds: dict[Program, np.ndarray] = {}
        # Rounds in a row without a draft, and with one.
        self._num_plain = self._num_drafted = 0
        self._wait, self._tries = _FIRST_WAIT, 0

    def learn(self, program: Program, seconds: Sequence[float]) -> None:
        """Takes what a round of each depth takes."""
        self._seconds[program] = np.asarray(seconds, np.float32)

    def measure(
        self,
        programs: Programs,
        state: DecodeState,
        inputs: RuleInputs,
        one: DecodeState,
        rows: int,
    ) -> DecodeState:
        """Times a round of each depth by a program that has been compiled.

        Args:
          programs: that run.
          state: of all slots, in which nobody is; donated.
          inputs: of all slots.
          one: what each of the first `rows` slots decodes meanwhile; it has room for these rounds.
          rows: that are decoded.
        """
        attended, found = state.target.attended, dict.fromkeys(self.depths, math.inf)
        assert attended is not None
        one = programs.unstopped(one)
        for depth in self.depths * _TIMINGS:
            for row in range(rows):
                state = programs.insert(state.attending(None), one, row)
            only = programs.put(_only(depth, self.depths), (None,))
            state = jax.block_until_ready(state.attending(attended).choosing(only))
            begin = time.perf_counter()
            state, output = programs.run(state, inputs, rows)
            num_rounds = len(rounds_run(jax.device_get(output)))
            found[depth] = min(found[depth], (time.perf_counter() - begin) / num_rounds)
        for row in range(rows):
            state = programs.release(state.attending(None), row)
        self.learn((rows, attended), list(found.values()))
        return state

    def next(self, program: Program, *, may_vary: bool) -> np.ndarray:
        """[depths], the seconds from which the next rounds choose.

        Args:
          program: that will run.
          may_vary: no token depends on K.
        """
        known = self._seconds.get(program)
        if known is None or not may_vary:
            return _only(self.depths[-1], self.depths)
        if self._num_plain >= self._wait:  # how much is accepted is seen only where there is some
            self._tries, self._num_plain = _TRIES, 0
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
        if self._tries:
            self._tries -= 1
            return _only(self.depths[1], self.depths)
        stays = np.equal(self.depths, self.current)
        return np.where(stays, known * np.float32(1 - _LEAST_GAIN), known)

    def observe(self, program: Program, rounds: Sequence[int], seconds: float | None) -> None:
        """Takes what a dispatch has done.

        Args:
          program: that ran.
          rounds: K of each of its rounds, as far as they had something to do.
          seconds: that it took; None where something else ran meanwhile.
        """
        is_same = set(rounds) == {self.current}
        self.num_rounds.update(rounds)
        for self.current in rounds:
            is_plain = self.current == 0
            self._num_plain = (self._num_plain + 1) * is_plain
            self._num_drafted = (self._num_drafted + 1) * (not is_plain)
        if self._num_drafted >= _FIRST_WAIT:
            self._wait = _FIRST_WAIT
        known = self._seconds.get(program)
        if known is not None and seconds is not None and is_same:
            at = self.depths.index(self.current)
            known[at] += _WEIGHT * (min(seconds / len(rounds), _MOST * known[at]) - known[at])


def rounds_run(output: RoundOutput) -> list[int]:
    """K of each round of a dispatch, where it is chosen, without those that had nothing to do."""
    assert output.depth is not None
    has_run = np.any((output.count > 0) | (output.num_drafted > 0), axis=1)
    return [int(depth) for depth in output.depth[has_run]]


def _only(depth: int, depths: Sequence[int]) -> np.ndarray:
    """[depths], seconds with which this one is chosen whatever is accepted."""
    return np.where(np.equal(depths, depth), 1, np.inf).astype(np.float32)
