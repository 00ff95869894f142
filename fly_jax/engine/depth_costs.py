"""Seconds of rounds of each K, from which `decoding/depth.py` chooses."""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fly_jax.decoding.depth import HOPED_STRICT_RATE
from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.parameters import MOST_TOKENS

# Weight of a new timing against those before it, and the most times that it may exceed them.
_WEIGHT, _MOST = 0.2, 2.0
# Kept and expected draft tokens before the first round, and the share of them that a round fades;
# one of which less than a token is expected fades less.
_FIRST_TOKENS, _FADING = 32.0, 0.02
# The least share of them that counts as kept, so that drafting is never given up for good; of rated
# drafts the likeliest go on with less.
_LEAST_KEPT, _LEAST_RATED_KEPT = 0.5, 0.05
# Before anything is known: the draft tokens that rows keep, of those usually hoped for, and the
# share that a level below saves of the passes of the draft model that it could save. Else nobody
# would find out.
_FIRST_KEPT, _HOPED_SAVED = 1.0, 0.5
# Another depth is chosen where it promises so much more.
_LEAST_GAIN = 0.05
# How often a round of each depth is timed before the first request; the fastest counts. One that
# takes so many seconds is timed twice. What runs before them, untimed, brings weights into memory.
_TIMINGS, _LONG = 3, 0.7

Program = tuple[int, int]
ByDepth = Sequence[float]


class Round(NamedTuple):
    """The depth of a round, and the draft tokens of all rows that were kept, and expected to be.

    If nothing `is_drafted`, since a lookup finds nothing, it is a round of one token at a time.
    `num_passes` are the draft model's: with a lookup below they depend on the text. `num_rows` had
    something to do, and the `longest` of their drafts had so many tokens.
    """

    depth: int
    kept: int
    expected: float
    is_drafted: bool = True
    num_passes: int = 0
    num_rows: int = 1
    longest: int = MOST_TOKENS


class DepthCosts:
    """The seconds of a round of each depth, by its program: its rows and the positions it attends.

    They are the target's pass and the draft model's passes. The number of these is followed for all
    depths together: with a lookup below, drafts take fewer where text repeats itself. Of rated
    drafts it is known when K is chosen. The share of the expected draft tokens that rounds give is
    followed for each depth. Of the rounds that were read, `num_rounds` has the number by K.
    """

    def __init__(self, depths: Sequence[int], *, below: int = 0, rated: bool = False) -> None:
        """Begins with nothing known, so that the largest K is taken.

        A lookup `below` a draft model gives it so many tokens; `rated`: `Drafter.rates_drafts`.
        """
        self.depths, self.num_speculative_tokens = tuple(depths), max(depths)
        self._below = below
        self._rated = rated  # each draft has a K of its own, and none is stayed with
        self._least_kept = _LEAST_RATED_KEPT if rated else _LEAST_KEPT
        self.current = self.num_speculative_tokens  # K of the last round that was read
        self.num_rounds: collections.Counter[int] = collections.Counter(dict.fromkeys(depths, 0))
        self._found: dict[Program, np.ndarray] = {}  # the seconds that were timed
        # Of a round of the least K with more passes, and of a pass that was saved; see `learn`.
        self._lacking: dict[Program, float] = {}
        self._saved: dict[Program, float] = {}
        self._seconds: dict[Program, np.ndarray] = {}  # without the draft model's passes
        self._pass_seconds: dict[Program, float] = {}
        self._num_passes = np.zeros(len(self.depths), np.float32)  # where a lookup finds nothing
        self._passes_saved = _HOPED_SAVED  # of those that all proposals from below would save
        self._drafts = np.full((2, len(self.depths)), _FIRST_TOKENS, np.float32)
        hoped = np.cumsum(HOPED_STRICT_RATE ** np.arange(self.num_speculative_tokens + 1)) - 1
        self._hoped = hoped[list(self.depths)]  # draft tokens that a row keeps of a round
        self.kept_of_hoped = _FIRST_KEPT  # draft tokens that rows keep, of those usually hoped for
        self.read_seconds = 0.0  # that a draft model takes for a token of a prompt

    def learn(
        self, program: Program, seconds: ByDepth, num_passes: ByDepth = (), lacking: float = 0.0,
        saved: float = math.inf,
    ) -> None:  # fmt: skip
        """Takes the seconds of a round of each depth, and the draft model's passes in it.

        The target's pass over the fewest draft tokens is taken to be as long as over none. Nothing
        is taken to be longer than with more rows or positions: the machine may have been slow just
        then. `lacking` are the seconds of a round of the least K with a pass for what it lacked, or
        where drafts are rated, with the draft of the largest; `saved`, what a pass less has saved.
        """
        self._found[program], self._lacking[program] = np.asarray(seconds, np.float32), lacking
        self._saved[program] = saved
        if any(num_passes) and self.depths[0] == 0:
            self._num_passes = np.asarray(num_passes, np.float32)
        for one in self._found:
            others = [other for other in self._found if np.all(np.less_equal(one, other))]
            lacking = min(self._lacking[other] for other in others)
            lowest: np.ndarray = np.minimum.reduce([self._found[other] for other in others])
            is_less = lacking < self._lacking[one] or np.any(lowest < self._found[one])
            if one == program or is_less:
                self._found[one], self._lacking[one] = lowest, lacking
                self._seconds[one], self._pass_seconds[one] = self._divided(one)

    def _divided(self, program: Program) -> tuple[np.ndarray, float]:
        """Divides the seconds of rounds into those of the target's pass and a pass of the draft."""
        found, each = self._found[program], 0.0
        if self._rated and self._num_passes.any():
            more = float(self._num_passes[-1] - self._num_passes[0])
            each = max(self._lacking[program] - float(found[0]), 0.0) / max(more, 1.0)
            found = np.maximum(found - each * self._num_passes, 0)
        elif self._num_passes.any():
            # A first pass is wider than those after it, which are most of a long draft.
            enough = self._num_passes >= min(2.0, float(self._num_passes.max()))
            each = max(float(((found - found[0])[enough] / self._num_passes[enough]).min()), 0.0)
            each = min(each, self._saved[program])  # not what wider passes of the target take
            found = np.maximum(found - each * self._num_passes, found[0])
        return found.copy(), each

    def measure(
        self, programs: Programs, state: DecodeState, inputs: RuleInputs, one: DecodeState,
        lacking: DecodeState | None, rows: int, repeating: DecodeState,
    ) -> DecodeState:  # fmt: skip
        """Times a round of each depth by a program that has been compiled.

        The slots of `state`, which is donated, are free; the first `rows` then decode `one`, or
        `lacking`, not all of which a draft model has seen, or `repeating`, where a lookup finds it.
        """
        attended, found = state.target.attended, dict.fromkeys(self.depths, math.inf)
        num_passes, lacks, saved = dict.fromkeys(self.depths, 0.0), 0.0, math.inf
        assert attended is not None

        def run(
            row: DecodeState, depth: int, drafted: int | None = None
        ) -> tuple[list[Round], float]:
            nonlocal state
            for at in range(rows):
                state, _ = programs.insert(state.attending(None), row, [at])
            only = programs.put(_only(depth, self.depths, drafted))
            state = jax.block_until_ready(state.attending(attended).choosing(only))
            begin = time.perf_counter()
            state, output = programs.run(state, inputs, rows)
            return rounds_run(jax.device_get(output)), time.perf_counter() - begin

        # One draft token alone would not bring in what lies below a draft model.
        run(one, next((depth for depth in self.depths if depth > 1), self.depths[-1]))
        for turn, depth in itertools.product(range(_TIMINGS), self.depths):
            # One that would not pay if all of its drafts were kept need not be known so well; but a
            # first run says little: that of one draft token has taken three times as long.
            hopeless = depth > 0 and found[depth] > (1 + depth) * min(found.values())
            if turn > 1 and programs.agreed(hopeless or found[depth] > _LONG):
                continue
            ran, seconds = run(one, depth)
            drafted = [one for one in ran if one.is_drafted]
            if depth and drafted:  # those behind it for which a lookup found nothing are plain ones
                seconds -= min(found.get(0, 0.0), seconds / len(ran)) * (len(ran) - len(drafted))
                ran = drafted
            found[depth] = min(found[depth], seconds / len(ran))
            num_passes[depth] = sum(one.num_passes for one in ran) / len(ran)
        if lacking is not None:
            depth = next(depth for depth in self.depths if depth)
            ran, seconds = min((run(lacking, depth) for _ in range(2)), key=lambda one: one[1])
            more = sum(one.num_passes for one in ran) - num_passes[depth] * len(ran)
            lacks = found[depth] + max(seconds - found[depth] * len(ran), 0.0) / max(more, 1)
        if self._below and (k := self.num_speculative_tokens) and num_passes[k]:
            ran, seconds = min((run(repeating, k) for _ in range(2)), key=lambda one: one[1])
            fewer = num_passes[k] - sum(one.num_passes for one in ran) / len(ran)
            if fewer > 0:
                saved = max(found[k] - seconds / len(ran), 0.0) / fewer
        if self._rated and any(num_passes.values()):
            runs = (run(one, self.depths[0], self.num_speculative_tokens) for _ in range(_TIMINGS))
            lacks = min(seconds / len(ran) for ran, seconds in runs)
        for row in range(rows):
            state = programs.release(state.attending(None), row)
        self.learn((rows, attended), list(found.values()), list(num_passes.values()), lacks, saved)
        return state

    def measure_reading(
        self, programs: Programs, rows: DecodeState, size: int, attended: int
    ) -> None:
        """Times a chunk of the prompts of `rows`, which are donated, with a draft model or not.

        Rounds have run before, and brought the weights into memory; a first run is never all.
        """
        seconds, tokens = {True: math.inf, False: math.inf}, len(rows.length) * size
        for turn, drafts in itertools.product(range(_TIMINGS), seconds):
            if turn > 1 and programs.agreed(seconds[drafts] > _LONG):
                continue
            rows, begin = jax.block_until_ready(rows), time.perf_counter()
            rows = programs.prefill_chunk(rows, size, 0, attended, drafts=drafts)
            jax.block_until_ready(rows)
            seconds[drafts] = min(seconds[drafts], time.perf_counter() - begin)
        self.read_seconds = max(seconds[True] - seconds[False], 0.0) / tokens

    def next(self, program: Program, *, may_vary: bool) -> np.ndarray:
        """The `AcceptanceStats.costs` of the next rounds, [3, depths]; `may_vary`: K is free."""
        if (known := self._seconds.get(program)) is None or not may_vary:
            return _only(self.num_speculative_tokens, self.depths)
        behind = np.full(len(self.depths), self._pass_seconds[program])
        if not self._rated:
            lacking = self._lacking[program] - self._found[program][int(self.depths[0] == 0)]
            behind = np.maximum(behind, lacking) * np.sign(self.depths)
            known = self._with_draft(program, known)
        # Fewer draft tokens take no longer, whatever has been timed.
        known = np.minimum.accumulate(known[::-1])[::-1]
        stays = np.equal(self.depths, self.current) & (not self._rated)
        seconds = np.where(stays, known * np.float32(1 - _LEAST_GAIN), known)
        # A deeper round, perhaps long unseen, is taken to give no more than a shallower one.
        given = np.maximum(self._drafts[0] / self._drafts[1], self._least_kept)
        return np.stack((seconds, np.minimum.accumulate(given), behind)).astype(np.float32)

    def pays_to_read(self, rows: int, num_live: int, lengths: Sequence[int], new: int) -> bool:
        """Tells whether drafts are likely to save as much as a draft model takes to read prompts.

        Where they are not, a little more is hoped for of drafts at the next prompt.

        Args:
          rows: of a round that has the prompts' rows too; `num_live` have something to do.
          lengths: tokens of each prompt that are to be read.
          new: tokens that are to follow them.
        """
        programs = [one for one in self._seconds if one[0] == rows and one[1] >= max(lengths)]
        if not programs:
            return True
        program = min(programs)
        # As all depths were timed: of those that run the seconds may have risen since, alone.
        timed = self._with_draft(program, self._divided(program)[0])
        kept = np.minimum(self.kept_of_hoped * self._hoped, self.depths)
        each = timed / (num_live * (1 + kept))
        pays = (each[0] - min(each)) * new >= self.read_seconds * sum(lengths)
        if not pays:
            self.kept_of_hoped += _FADING * max(1 - self.kept_of_hoped, 0)
        return bool(pays)

    def _with_draft(self, program: Program, seconds: np.ndarray) -> np.ndarray:
        """The seconds of a round of each depth, with the draft model's passes as they are now."""
        passes = self._num_passes - self._passes_saved * self._could_save
        return np.asarray(seconds + self._pass_seconds[program] * passes)

    @property
    def _could_save(self) -> np.ndarray:
        """The passes of each depth that a level below saves if all it proposes is taken.

        To the first pass it proposes nothing, and each of the others also gives a token of its own.
        """
        later = np.maximum(self._num_passes - 1, 0)
        return later - np.ceil(later / (1 + self._below))

    def observe(self, program: Program, rounds: Sequence[Round], seconds: float | None) -> None:
        """Counts the rounds of a dispatch, and its seconds if nothing else ran meanwhile."""
        last, drafted = self.current, [one for one in rounds if one.is_drafted or not one.depth]
        for one in rounds:
            self.num_rounds[one.depth] += 1
            self.current = one.depth
        if program not in self._seconds:
            return
        for one in drafted:
            if one.depth:
                self._count(one)
        if len({one.depth for one in drafted}) != 1:
            return
        at = self.depths.index(drafted[0].depth)
        num_passes = sum(one.num_passes for one in drafted) / len(drafted)
        usual = self._num_passes[at] or num_passes
        if not (could_save := self._could_save[at]):  # which shows nothing of what is below
            self._passes_saved += _FADING * (_HOPED_SAVED - self._passes_saved)
        elif num_passes <= usual:  # others took in what the draft model lacked
            now = (usual - num_passes) / could_save
            self._passes_saved += _WEIGHT * (min(now, 1.0) - self._passes_saved)
        is_one = len(drafted) == len(rounds)
        is_one &= self._rated or (num_passes <= usual and last == self.current)
        # A shorter draft than was asked for takes a narrower pass.
        is_one &= at == 0 or all(one.longest > self.depths[at - 1] for one in drafted)
        if seconds is not None and is_one:
            before, drafting = self._seconds[program][at], self._pass_seconds[program] * num_passes
            now = min(seconds / len(rounds), _MOST * (before + drafting)) - drafting
            self._seconds[program][at] = max(before + _WEIGHT * (now - before), 0)

    def _count(self, one: Round) -> None:
        """Counts what was kept of a draft, beside what was expected and what is usually hoped.

        Of rated drafts those of all depths count together: short ones are the unlikely ones.
        """
        at, fading = self.depths.index(one.depth), _FADING * min(one.expected, 1.0)
        drafts = self._drafts if self._rated else self._drafts[:, at : at + 1]
        drafts += np.array([[one.kept], [one.expected]]) - fading * drafts
        share = one.kept / (self._hoped[at] * one.num_rows)
        self.kept_of_hoped += _FADING * (share - self.kept_of_hoped)


def rounds_run(output: RoundOutput) -> list[Round]:
    """The rounds of a dispatch (on the host, with chosen K) that had something to do."""
    assert output.depth is not None
    assert output.expected is not None
    kept = np.sum(output.count - (output.count > 0), axis=1)
    longest, rows = np.max(output.num_drafted, axis=1), np.sum(output.live, axis=1)
    is_drafted = (longest > 0) | (output.num_draft_passes > 0)  # a draft may end before it begins
    told = output.depth, kept, output.expected, is_drafted, output.num_draft_passes
    rounds = zip(
        np.any(output.live, axis=1), *(one.tolist() for one in (*told, rows, longest)), strict=True
    )
    return [Round(*one) for is_run, *one in rounds if is_run]


def _only(depth: int, depths: Sequence[int], drafted: int | None = None) -> np.ndarray:
    """Costs, [3, depths], by which this depth is chosen whatever is accepted.

    A rated draft then has as many tokens, or as many as are to be `drafted`.
    """
    seconds = np.where(np.equal(depths, depth), 1, np.inf)
    if drafted is not None and drafted > depth:
        seconds = np.where(np.equal(depths, drafted), np.finfo(np.float32).max / 2, seconds)
    return np.stack((seconds, np.ones(len(depths)), np.zeros(len(depths)))).astype(np.float32)
