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
# Before anything is known: the draft tokens that rows keep, of those usually hoped for.
_FIRST_KEPT = 1.0
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
    `num_passes` are the draft model's: with a lookup below they depend on the text, and without any
    a lookup has drafted in its place. `num_rows` had something to do, and the `longest` of their
    drafts had so many tokens.
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
    followed for each depth, and by itself where a lookup drafts in the draft model's place. Of the
    rounds that were read, `num_rounds` has the number by K.
    """

    def __init__(self, depths: Sequence[int], *, rated: bool = False, copies: bool = False) -> None:
        """Begins with nothing known, so that the largest K is taken.

        `rated`: `Drafter.rates_drafts`; `copies`: a lookup may draft in the drafter's place, and
        rounds without its passes are such.
        """
        self.depths, self.num_speculative_tokens = tuple(depths), max(depths)
        self._copies = copies
        self._rated = rated  # each draft has a K of its own, and none is stayed with
        self._least_kept = _LEAST_RATED_KEPT if rated else _LEAST_KEPT
        # K of the last round that was read, and whether the drafter was asked in it.
        self.current, self._was_asked = self.num_speculative_tokens, True
        self.num_rounds: collections.Counter[int] = collections.Counter(dict.fromkeys(depths, 0))
        # As timed: the target's pass at each depth, a pass of the drafter, and one over what it
        # lacks. Of rounds that run the first two may change.
        self._timed: dict[Program, np.ndarray] = {}
        self._seconds: dict[Program, np.ndarray] = {}
        self._pass_seconds: dict[Program, float] = {}
        self._num_passes = np.zeros(len(self.depths), np.float32)  # where a lookup finds nothing
        self._passes_made = (
            1.0  # the share of them: with a lookup below, text that repeats saves some
        )
        self._drafts = np.full((2, len(self.depths)), _FIRST_TOKENS, np.float32)
        self._copied = np.full((2, 1), _FIRST_TOKENS, np.float32)  # by a lookup in its place
        hoped = np.cumsum(HOPED_STRICT_RATE ** np.arange(self.num_speculative_tokens + 1)) - 1
        self._hoped = hoped[list(self.depths)]  # draft tokens that a row keeps of a round
        self.kept_of_hoped = _FIRST_KEPT  # draft tokens that rows keep, of those usually hoped for
        self.read_seconds = 0.0  # that a draft model takes for a token of a prompt

    def learn(
        self, program: Program, seconds: ByDepth, drafting: float = 0.0, num_passes: float = 0.0,
        lacking: float = 0.0,
    ) -> None:  # fmt: skip
        """Takes the seconds of the target's pass at each depth, and of the longest draft.

        Nothing is taken to be longer than with more rows or positions: the machine may have been
        slow just then. `num_passes` are those of this draft; `lacking` are the seconds of a pass
        that takes in what a draft model lacks.
        """
        if num_passes:  # one for each token, or one for all
            share = num_passes / self.num_speculative_tokens
            by_depth = [share * depth if num_passes > 1 else min(depth, 1) for depth in self.depths]
            self._num_passes = np.asarray(by_depth, np.float32)
        timed = np.asarray([*seconds, drafting / max(num_passes, 1), lacking], np.float32)
        self._timed[program] = timed
        for one, before in list(self._timed.items()):
            others = [other for other in self._timed if np.all(np.less_equal(one, other))]
            lowest: np.ndarray = np.minimum.reduce([self._timed[other] for other in others])
            if one == program or np.any(lowest < before):
                self._timed[one] = lowest
                self._seconds[one], self._pass_seconds[one] = lowest[:-2].copy(), float(lowest[-2])

    def measure(
        self, programs: Programs, state: DecodeState, inputs: RuleInputs, one: DecodeState,
        lacking: DecodeState | None, rows: int, repeating: DecodeState,
    ) -> DecodeState:  # fmt: skip
        """Times a round of each depth by a program that has been compiled.

        The slots of `state`, which is donated, are free; the first `rows` then decode `repeating`,
        where a lookup finds something, and with the longest draft of a draft model or head `one`,
        where it does not, and `lacking`, not all of which a draft model has seen.
        """
        attended, found = state.target.attended, dict.fromkeys(self.depths, math.inf)
        drafting = num_passes = lacks = 0.0
        assert attended is not None

        def run(
            row: DecodeState, depth: int, *, is_asked: bool = True
        ) -> tuple[list[Round], float]:
            nonlocal state
            for at in range(rows):
                state, _ = programs.insert(state.attending(None), row, [at])
            only = programs.put(_only(depth, self.depths, is_asked=is_asked))
            state = jax.block_until_ready(state.attending(attended).choosing(only))
            begin = time.perf_counter()
            state, output = programs.run(state, inputs, rows)
            return rounds_run(jax.device_get(output)), time.perf_counter() - begin

        text = repeating if self._copies else one
        run(text, self.depths[-1])
        for turn, depth in itertools.product(range(_TIMINGS), self.depths):
            if turn > 1 and programs.agreed(found[depth] > _LONG):
                continue
            ran, seconds = run(text, depth, is_asked=not self._copies)
            drafted = [one for one in ran if one.is_drafted]
            if depth and drafted:  # those behind it for which a lookup found nothing are plain ones
                seconds -= min(found.get(0, 0.0), seconds / len(ran)) * (len(ran) - len(drafted))
                ran = drafted
            found[depth] = min(found[depth], seconds / len(ran))
        if self._copies:
            depth = self.num_speculative_tokens
            ran, seconds = min((run(one, depth) for _ in range(2)), key=lambda one: one[1])
            num_passes = sum(one.num_passes for one in ran) / len(ran)
            drafting = max(seconds / len(ran) - found[depth], 0.0)
            if lacking is not None:
                ran, longer = min((run(lacking, depth) for _ in range(2)), key=lambda one: one[1])
                more = sum(one.num_passes for one in ran) - num_passes * len(ran)
                lacks = max(longer - seconds, 0.0) / max(more, 1)
        for row in range(rows):
            state = programs.release(state.attending(None), row)
        self.learn((rows, attended), list(found.values()), drafting, num_passes, lacks)
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
        """The `AcceptanceStats.costs` of the next rounds, [5, depths]; `may_vary`: K is free."""
        if (known := self._seconds.get(program)) is None or not may_vary:
            return _only(self.num_speculative_tokens, self.depths)
        # Fewer draft tokens take no longer, whatever has been timed.
        known = np.minimum.accumulate(known[::-1])[::-1]
        if self._copies:  # a lookup is to promise so much more than no draft, as a draft is
            known = known * np.where(self.depths, 1, 1 - _LEAST_GAIN)
        behind = np.full(len(self.depths), self._pass_seconds[program])
        drafting: np.ndarray = np.zeros(len(self.depths))
        if not self._rated:
            drafting = self._pass_seconds[program] * self._passes_made * self._num_passes
            # What was done last is stayed with, unless something else promises so much more.
            stays = np.equal(self.depths, self.current) if self._was_asked else -1
            drafting -= _LEAST_GAIN * stays * (known + drafting)
            behind = np.maximum(behind, self._timed[program][-1]) * np.sign(self.depths)
        # A deeper round, perhaps long unseen, is taken to give no more than a shallower one.
        given = np.minimum.accumulate(
            np.maximum(self._drafts[0] / self._drafts[1], self._least_kept)
        )
        copied = np.maximum(self._copied[0] / self._copied[1], _LEAST_RATED_KEPT)
        copied = np.broadcast_to(copied, given.shape) if self._copies else given
        return np.stack((known, given, behind, drafting, copied)).astype(np.float32)

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
        timed = self._timed[program][:-2]
        timed = timed + self._timed[program][-2] * self._passes_made * self._num_passes
        kept = np.minimum(self.kept_of_hoped * self._hoped, self.depths)
        each = timed / (num_live * (1 + kept))
        pays = (each[0] - min(each)) * new >= self.read_seconds * sum(lengths)
        if not pays:
            self.kept_of_hoped += _FADING * max(1 - self.kept_of_hoped, 0)
        return bool(pays)

    def observe(self, program: Program, rounds: Sequence[Round], seconds: float | None) -> None:
        """Counts the rounds of a dispatch, and its seconds if nothing else ran meanwhile."""
        last = self.current, self._was_asked
        drafted = [one for one in rounds if one.is_drafted or not one.depth]
        for one in rounds:
            self.num_rounds[one.depth] += 1
            self.current, self._was_asked = one.depth, self._is_asked(one)
        if program not in self._seconds:
            return
        for one in drafted:
            if one.depth:
                self._count(one)
        if len({(one.depth, self._is_asked(one)) for one in drafted}) != 1:
            return
        at = self.depths.index(drafted[0].depth)
        num_passes = sum(one.num_passes for one in drafted) / len(drafted)
        usual = self._num_passes[at] if num_passes else 0
        if 1 < usual >= num_passes:  # others took in what the draft model lacked
            self._passes_made += _WEIGHT * (num_passes / usual - self._passes_made)
        is_one = len(drafted) == len(rounds)
        is_one &= self._rated or (num_passes <= usual and last == (self.current, self._was_asked))
        # A shorter draft than was asked for takes a narrower pass.
        is_one &= at == 0 or all(one.longest > self.depths[at - 1] for one in drafted)
        if seconds is not None and is_one:
            before, each = self._seconds[program][at], self._pass_seconds[program]
            now = min(seconds / len(rounds), _MOST * (before + each * num_passes))
            if num_passes and self._copies:
                each += _WEIGHT * (max(now - before, 0) / num_passes - each)
                self._pass_seconds[program] = each
            else:
                self._seconds[program][at] += _WEIGHT * (now - before)

    def _is_asked(self, one: Round) -> bool:
        """Tells whether the drafter was, and no lookup drafted in its place."""
        return one.num_passes > 0 or not self._copies

    def _count(self, one: Round) -> None:
        """Counts what was kept of a draft, beside what was expected and what is usually hoped.

        Of rated drafts those of all depths count together: short ones are the unlikely ones.
        """
        at, fading = self.depths.index(one.depth), _FADING * min(one.expected, 1.0)
        drafts = self._drafts if self._rated else self._drafts[:, at : at + 1]
        drafts = drafts if self._is_asked(one) else self._copied
        drafts += np.array([[one.kept], [one.expected]]) - fading * drafts
        if self._is_asked(one):
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


def _only(depth: int, depths: Sequence[int], *, is_asked: bool = True) -> np.ndarray:
    """Costs, [5, depths], by which this depth is chosen whatever is accepted.

    The drafter drafts, or if it is not asked a lookup in its place.
    """
    seconds = np.where(np.equal(depths, depth), 1, np.inf)
    one, nothing = np.ones(len(depths)), np.zeros(len(depths))
    drafting = -one if is_asked else one * np.inf
    return np.stack((seconds, one, nothing, drafting, one)).astype(np.float32)
