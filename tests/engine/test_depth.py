"""K changes between rounds as costs and acceptance say, and who must not notice does not.

It is chosen as the estimate says, and a chosen K decodes as the same fixed K does.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_kinds import AUTO, DEPTHS, finished
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_types import Patch
from random_pairs import CAPACITY, ROWS, SPECS, autoregressive, pair_engine, random_target

from fly_jax import Engine, Exact, Fly, Lookup, Request, RequestState, Sampling, Verdict, Why
from fly_jax.decoding.config import RoundSpec
from fly_jax.decoding.depth import (
    AcceptanceStats,
    choose_depth,
    expected_tokens,
    observe,
    worth_drafting,
)
from fly_jax.decoding.drafters.model import CATCH_UP_AFTER
from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine import depth_costs
from fly_jax.engine.depth_costs import DepthCosts, Round, rounds_run
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.shapes import RowFlags

counts = st.floats(0.5, 50, width=32)


def stats_of(*counts: Sequence[float], seconds: Sequence[float] = (1.0,)) -> AcceptanceStats:
    """Of each row the draft tokens that were matched, rescued, refused and cut."""
    by_kind = [jnp.asarray(kind, jnp.float32) for kind in zip(*counts, strict=True)]
    same = [(value,) * len(seconds) for value in (1.0, 0.0, 0.0, 1.0)]
    return AcceptanceStats(*by_kind, costs=jnp.asarray((seconds, *same)))


def chosen_of(
    stats: AcceptanceStats, live: RowFlags, depths: tuple[int, ...], left: int = 99, behind: int = 0
) -> int:
    """The index of the depth, where a draft model lacks so much."""
    given = jnp.full(live.shape, left), jnp.int32(behind)
    return depths.index(int(choose_depth(stats, live, depths, 0, *given).depth))


def verdict_of(why: np.ndarray) -> Verdict:
    zeros = jnp.zeros(len(why), jnp.int32)
    return Verdict(zeros, zeros, zeros.astype(jnp.int8), jnp.asarray(why), zeros)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.tuples(*[counts] * 4), st.sampled_from((1, 4, 9)), st.sampled_from((0, 3, 20)))
def test_expected_tokens(row: tuple[float, ...], depth: int, tail: int) -> None:
    matched, rescued, refused, cut = row
    hoped = 0.25  # of tokens, which never fade
    strict = (matched + hoped * 0.75) / (matched + rescued + refused + cut + hoped)
    loose = (matched + rescued + hoped * 0.85) / (matched + rescued + refused + hoped)
    expected, survives = 1.0, 1.0
    for position in range(1, depth + 1):
        survives *= loose if position + tail <= depth else strict
        expected += survives
    found = expected_tokens(stats_of(row), depth, tail)
    np.testing.assert_allclose(found, [expected], rtol=1e-4)


def test_observe_counts_what_ended_the_block() -> None:
    why = np.full((4, 5), Why.DROPPED, np.int8)
    why[0, :3] = Why.MATCHED, Why.RESCUED, Why.REFUSED_GATE
    why[1, :2] = Why.MATCHED, Why.REFUSED_BOUNDARY
    why[2:] = Why.MATCHED
    verdict, live = verdict_of(why), jnp.array([True, True, True, False])
    after = observe(stats_of(*[(0.0,) * 4] * 4), verdict, live)
    found = np.array([after.matched, after.rescued, after.refused, after.cut])
    assert found.tolist() == [[1, 1, 5, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert 1 < float(observe(after, verdict, live).matched[1]) < 2, "counts fade"


def test_the_depth_of_most_tokens_a_second() -> None:
    """No more than a live row may still get; finished rows have no say."""
    live, depths, seconds = jnp.array([True]), (2, 6, 12), (1.0, 1.2, 1.5)
    sure, unsure = (50.0, 0.0, 0.5, 0.0), (1.0, 0.0, 9.0, 0.0)
    cases = ((sure, seconds, 2), (unsure, seconds, 0), (sure, (1.0, 9.0, 9.0), 0))
    for counts, taken, expected in cases:
        assert chosen_of(stats_of(counts, seconds=taken), live, depths) == expected
    stats = stats_of(sure, seconds=seconds)
    assert [chosen_of(stats, live, depths, left) for left in (3, 5, 13)] == [0, 1, 2]
    both = stats_of((90.0, 0.0, 0.1, 0.0), (0.1, 0.0, 9.0, 0.0), seconds=(1.0, 1.5))
    for first in (True, False):
        assert chosen_of(both, jnp.array([first, not first]), (1, 9)) == first


def test_a_draft_goes_on_while_a_further_token_may_pay() -> None:
    stats = stats_of((9, 0, 1, 0), seconds=(1.0, 1.2, 2.0))
    stats = dataclasses.replace(stats, costs=stats.costs.at[2].set(0.1).at[1].set(0.8))
    most, least = worth_drafting(stats, (0, 2, 5))
    assert (int(most), float(least)) == (5, pytest.approx((1.0 / 5 + 0.1) / 1.0 / 0.8))
    for depth in (0, 2, 5):  # one of which alone is known is drafted whole
        forced = dataclasses.replace(stats, costs=jnp.asarray(depth_costs._only(depth, (0, 2, 5))))
        assert tuple(map(float, worth_drafting(forced, (0, 2, 5)))) == (depth, 0)
        more = jnp.array([True]), (0, 2, 5), 0, jnp.array([99]), jnp.int32(0), jnp.ones((1, 5))
        assert int(choose_depth(forced, *more).depth) == depth


def test_passes_that_a_draft_took_are_a_part_of_every_round_with_it() -> None:
    """With many of them another token takes a smaller share of the round."""
    stats, rates = stats_of((9, 0, 1, 0), seconds=(1.0, 2.0)), jnp.array([[0.9]])
    stats = dataclasses.replace(stats, costs=stats.costs.at[2].set(0.1))
    given = stats, jnp.array([True]), (0, 1), 0, jnp.array([99]), jnp.int32(0)
    found = [choose_depth(*given, rates, jnp.int32(n)) for n in (0, 1, 2, 9)]
    assert [int(one.depth) for one in found] == [0, 0, 1, 1]


def test_a_forced_depth_is_that_fixed_k_in_sampling_too(monkeypatch: Patch) -> None:
    """A draw depends on its position, and not on how many others there are."""
    index, depths = 1, (2, 3, 5)
    costs = depth_costs._only(depths[index], depths)
    monkeypatch.setattr(DepthCosts, "next", lambda *_, may_vary: costs)
    found = []
    for more in ({"depths": depths}, {"num_speculative_tokens": depths[index]}):
        engine = pair_engine(0, SPECS["sampled"].with_static(**more), 0.2)
        rows = engine.generate([[1, 2, 3], [4, 5], [6] * 9], 20, seed=3)
        found.append([(row.token_ids, row.why, row.num_draft_tokens) for row in rows])
    assert found[0] == found[1]
    assert found[0][0][2] % depths[index] == 0


def test_a_lookup_finds_something_where_its_rounds_are_measured(monkeypatch: Patch) -> None:
    """Else they would cost no more than one token at a time, and the largest K seem free."""
    measured: list[Round] = []

    def noted(output: RoundOutput) -> list[Round]:
        measured.extend(rounds_run(output))
        return rounds_run(output)

    spec = SPECS["lookup"].with_static(lookup=Lookup(3), depths=(0, 2, 5))
    monkeypatch.setattr(depth_costs, "rounds_run", noted)
    engine = pair_engine(0, spec)
    engine.warm_up_for(engine.requests([[1, 2, 3]], 20))
    assert {one.depth: one.is_drafted for one in measured} == {0: False, 2: True, 5: True}


def test_every_depth_is_measured_and_a_first_run_is_not_what_counts(monkeypatch: Patch) -> None:
    """It takes long, for each depth; one that seemed hopeless for that would never run."""
    now, begun = [0.0], set[tuple[str, int]]()

    def slow_at_first(name: str) -> None:
        run = getattr(Programs, name)

        def running(self: Programs, *given: Any, **how: Any) -> Any:
            if not self._traces:
                kind = how["drafts"] if name != "run" else np.argmin(given[0].stats.costs[0])
                now[0] += 1.0 if (name, int(kind)) in begun else 100.0
                if name == "run" and given[0].stats.costs[3, 0] < 0:  # a draft takes 2.5
                    # And each pass that takes in what the draft model lacks 4.
                    lacks = given[0].length - 2 - given[0].drafter.cache.length
                    now[0] += 2.5 + 4 * max(-(-int(lacks.max()) // CATCH_UP_AFTER), 0)
                begun.add((name, int(kind)))
            return run(self, *given, **how)

        monkeypatch.setattr(Programs, name, running)

    engine = pair_engine(0, SPECS["exact"].with_static(depths=(0, 2, 5)), 0.2)
    for name in ("run", "prefill_chunk"):
        slow_at_first(name)
    monkeypatch.setattr(depth_costs.time, "perf_counter", lambda: now[0])
    assert engine.costs is not None
    assert np.isinf(engine.costs.next((ROWS, CAPACITY), may_vary=True)).any(), "nothing is known"
    engine.warm_up_for(engine.requests([[1, 2, 3]], 20))
    seconds, _, behind, drafting, _ = engine.costs.next((ROWS, CAPACITY), may_vary=True)
    np.testing.assert_allclose(seconds, [0.95, 1.0, 1.0])  # without a draft it counts less
    np.testing.assert_allclose(drafting, [0.0, 1.0, 2.5 - 0.05 * 3.5])  # the last is stayed with
    np.testing.assert_allclose(behind, [0.0, 4.0, 4.0])
    assert engine.costs.read_seconds == 0.0


def test_without_a_draft_for_long_its_rates_are_hoped_for_anew() -> None:
    """One round that is refused ends that hope again."""
    nothing, refused = (
        verdict_of(np.array([[first, *[Why.DROPPED] * 3]], np.int8))
        for first in (Why.DROPPED, Why.REFUSED_GATE)
    )
    live, stats = jnp.array([True]), stats_of((0.0, 0.0, 8.0, 0.0), seconds=(1.0, 2.0))
    chosen = []
    for _ in range(200):
        chosen.append(chosen_of(stats, live, (0, 4)))
        stats = observe(stats, refused if chosen[-1] else nothing, live)
    assert 1 <= sum(chosen) <= 8
    assert 1 not in chosen[:30]


FLY, LIMIT, PROGRAM = Fly(0.2, 2), 24, (1, 256)


def engine(costs: DepthCosts, spec: RoundSpec = AUTO, **given: Any) -> Engine:
    """All of them have the same programs, for a spec."""
    sizes = {"rows": 4, "prefill_chunk": 16, "rules": (FLY,), "offline": False}
    made = pair_engine(2, spec, 0.2, **sizes, **{"load_may_change_text": False, **given})
    made.costs = costs
    return made


class Clock(DepthCosts):
    """Rounds of so many rows take what `seconds` says, by K, whatever they really take."""

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        super().__init__(DEPTHS)
        self.seconds, self.taken = seconds, list[int]()
        for rows, some in seconds.items():
            self.learn((rows, 128), some)

    def observe(self, program: tuple[int, int], rounds: Sequence[Round], _: float | None) -> None:
        self.taken += [one.depth for one in rounds]
        by_depth = self.seconds[program[0]]
        taken = sum(by_depth[self.depths.index(one.depth)] for one in rounds)
        super().observe(program, rounds, taken)


class Schedule(Clock):
    """K is what is said, for those who let it be chosen; the negative of it without the draft."""

    def __init__(self, depths: Iterator[int]) -> None:
        super().__init__({1: [1.0] * 3, 4: [1.0] * 3})
        self.said = depths

    def next(self, program: tuple[int, int], *, may_vary: bool) -> np.ndarray:
        if not may_vary:
            return super().next(program, may_vary=False)
        depth = next(self.said)
        return depth_costs._only(abs(depth), DEPTHS, is_asked=depth >= 0)


@pytest.mark.parametrize("lookup", [None, Lookup(3)])
def test_lossless_requests_do_not_notice(lookup: Lookup | None) -> None:
    """Nor where a lookup drafts in the place of the draft model, or nothing but chance does."""
    said = itertools.cycle((4, 0, -4, 2, *[0, -2, -4] * 7, 4, 4))
    one = engine(costs := Schedule(said), AUTO.with_static(lookup=lookup))
    prompts = [[5, 4, 3], list(range(20)), [9] * 6, [1, 2], [8, 8, 3, 1]]
    found = finished(one, one.requests(prompts, LIMIT))
    expected = autoregressive(random_target(2), prompts, LIMIT)
    assert [state.generation.token_ids for state in found] == expected
    assert set(costs.taken) == set(DEPTHS)
    metrics = ServerMetrics(one)
    for text in (metrics.text().decode(), metrics.text().decode()):
        assert f"\nfly_jax:spec_decode_depth {costs.taken[-1]:.1f}\n" in text
        for depth in DEPTHS:
            number = float(costs.taken.count(depth))
            assert f'\nfly_jax:spec_decode_num_rounds_total{{depth="{depth}"}} {number}\n' in text


def test_a_loosened_or_drawn_request_keeps_its_k_without_leave() -> None:
    """Also where it goes on with a text of which the draft model has not seen the end."""
    drawn = Request([1], sampling=Sampling(0.5))
    for request in (Request([1], rule=FLY), drawn, dataclasses.replace(drawn, rule=FLY)):
        assert not RequestState(request, request.rule or Exact()).lets_k_vary
    assert RequestState(Request([1], sampling=Sampling(0.0)), Exact()).lets_k_vary
    # Of a drawn request that need not come again another text is as good.
    asked = [dataclasses.replace(drawn, repeats=repeats) for repeats in (False, True)]
    for request, expected in zip(asked, ({0}, {4}), strict=True):
        finished(engine(costs := Schedule(itertools.repeat(0))), [request])
        assert set(costs.taken) == expected
    one = engine(costs := Schedule(itertools.repeat(0)))
    (before,) = finished(one, [Request(range(30), LIMIT)])
    assert set(costs.taken) == {0}
    assert before.generation.kept == []
    asked = Request([*range(30), *before.generation.token_ids, 3, 1], LIMIT, rule=FLY)
    found, beside = finished(one, [asked, Request([6, 7, 8], LIMIT)])
    assert found.num_reused >= 16
    assert costs.taken[-1] in (0, 4)
    fixed = pair_engine(2, dataclasses.replace(AUTO, rule=FLY).with_static(depths=()), 0.2, rows=1)
    (alone,) = fixed.generate([asked.prompt], LIMIT)
    served = found.generation
    assert (served.token_ids, served.why, served.kept) == (alone.token_ids, alone.why, alone.kept)
    assert len(alone.kept) == alone.num_rounds
    assert sum(alone.kept) == alone.num_accepted_tokens
    (expected,) = autoregressive(random_target(2), [[6, 7, 8]], LIMIT)
    assert beside.generation.token_ids == expected


def test_a_prompt_is_run_by_the_draft_model_once_something_is_drafted() -> None:
    """Where reading it would not have paid. It begins as one of which it has all."""
    first, prompt = [*range(46)] * 2, [*range(34), *([40, 3] * 10)]
    costs = Schedule(itertools.repeat(0))
    one = engine(costs)
    finished(one, [Request(first, 2)])
    costs.read_seconds = 1e9
    (unused,) = finished(one, [Request(prompt, 2)])
    assert (unused.num_reused, unused.generation.num_draft_passes) == (32, 0)
    other = engine(fixed := Schedule(itertools.repeat(0)))
    fixed.read_seconds = 1e9
    (read,) = finished(other, [Request([*prompt, 7], 2, FLY)])  # of which K may not vary
    assert read.generation.num_draft_passes == 4 * len(fixed.taken) > 0
    costs.said = itertools.repeat(4)
    (found,) = finished(one, [Request(prompt, LIMIT)])
    costs.read_seconds = 0.0
    (again,) = finished(one, [Request(prompt, LIMIT)])
    assert (found.num_reused, again.num_reused) == (32, 48)
    alone = pair_engine(2, AUTO.with_static(depths=()), 0.2, rows=1).generate([prompt], LIMIT)[0]
    for state in (found, again):
        one = state.generation
        assert (one.token_ids, one.kept) == (alone.token_ids, alone.kept)
    # What it had not seen, and the prompt that it was not given, 16 tokens at a time.
    passes = [state.generation.num_draft_passes for state in (found, again)]
    assert (passes[0] - passes[1], passes[1]) == (2, alone.num_draft_passes)


def test_a_lookup_drafts_where_it_promises_more_than_the_draft_model(monkeypatch: Patch) -> None:
    """By what both take; the draft model then makes no pass, and is not blamed for the draft."""
    spec, found = AUTO.with_static(lookup=Lookup()), []
    for drafting in (0.0, 9.0):
        rows = (1.0, 1.2, 1.4), [1.0] * 3, [0.0] * 3, np.sign(DEPTHS) * drafting, [1.0] * 3
        costs = np.asarray(rows, np.float32)
        monkeypatch.setattr(DepthCosts, "next", lambda *_, may_vary, costs=costs: costs)
        (one,) = finished(engine(DepthCosts(DEPTHS), spec), [Request([7, 8, 9] * 9, LIMIT)])
        found.append(one.generation)
    assert found[0].token_ids == found[1].token_ids
    assert found[0].num_draft_passes > found[1].num_draft_passes == 0
    assert min(one.num_draft_tokens for one in found) > 0
    why = verdict_of(np.full((1, 4), Why.REFUSED_GATE, np.int8))
    before = stats_of((4.0, 0.0, 1.0, 0.0))
    asked, copied = (observe(before, why, jnp.array([True]), jnp.bool_(is_it)) for is_it in (1, 0))
    assert float(asked.refused[0]) > 1 > float(copied.refused[0])


@pytest.mark.parametrize("rule", [None, FLY])
def test_drafting_stops_where_it_does_not_pay_and_begins_again(rule: Fly | None) -> None:
    """For a loosened request where load may change its text."""
    costs = Clock({1: [9.0, 1.1, 1.2], 4: [9.0, 50.0, 99.0]})
    one = engine(costs, load_may_change_text=rule is not None)
    for number in (1, 8, 1):
        costs.taken.clear()
        finished(one, [Request([1, 2, 3], LIMIT, rule)] * number)
        undrafted = costs.taken.count(0) / len(costs.taken)
        assert undrafted > 0.5 if number == 8 else undrafted == 0


def rounds(*depths: int, given: float = 1.0) -> list[Round]:
    """They give this share of what is expected of them."""
    return [Round(depth, depth and round(1000 * given), depth and 1000.0) for depth in depths]


class Learnt(DepthCosts):
    """Of one program, whose rounds take so many seconds, by K, and the longest draft."""

    def __init__(
        self, *seconds: float, drafting: float = 0.0, num_passes: int = 0, **drafter: Any
    ) -> None:
        super().__init__(DEPTHS, copies=num_passes > 0, **drafter)
        self.learn(PROGRAM, seconds, drafting, num_passes)

    def after(self, run: list[Round], seconds: float | None = None, times: int = 1) -> np.ndarray:
        """What the next rounds cost when dispatches of these have been seen."""
        for _ in range(times):
            self.observe(PROGRAM, run, seconds)
        return self.next(PROGRAM, may_vary=True)

    def seconds_after(self, *seen: Any, **how: Any) -> np.ndarray:
        """The seconds of the next rounds, with their drafts."""
        costs = self.after(*seen, **how)
        return np.asarray(costs[0] + costs[3])


def chosen(costs: np.ndarray, left: int = 9, num_behind: int = 0) -> int:
    """Of depths of which 1, 2.71 and 4.1 tokens are expected."""
    stats = dataclasses.replace(stats_of((90.0, 0.0, 10.0, 0.0)), costs=jnp.asarray(costs))
    return DEPTHS[chosen_of(stats, jnp.array([True]), DEPTHS, left, num_behind)]


def test_what_runs_is_measured_and_is_left_only_for_something_better() -> None:
    costs = Learnt(1.0, 2.0, 3.0)
    assert chosen(costs.after(rounds(4, 4))) == 4, "the second is as good"
    costs.learn(PROGRAM, [1.0, 1.95, 3.0])
    assert chosen(costs.after([])) == 4, "too little better"
    assert chosen(costs.after(rounds(4, 4), 2 * 5.0, times=50)) == 2
    costs.after(rounds(2))
    assert chosen(costs.after(rounds(2, 2), 2 * 2.9, times=50)) == 0
    # Rounds of several depths, or among which something else ran, say nothing of one.
    costs.after(rounds(0, 4), 1000.0)
    assert chosen(costs.after(rounds(0))) == 0


@pytest.mark.parametrize(("given", "taken"), [(0.25, 0.5), (0.75, 0.75), (3.0, 1.0)])
def test_what_is_expected_in_vain_is_expected_no_more(given: float, taken: float) -> None:
    """Within bounds, and of deeper drafts, which nobody has seen, no more either."""
    costs = Learnt(1.0, 2.0, 3.0).after(rounds(2, 2, given=given), times=200)
    np.testing.assert_allclose(costs[0] + costs[3], [1.0, 0.95 * 2.0, 3.0], rtol=0.01)
    np.testing.assert_allclose(costs[1], [1.0, taken, taken], rtol=0.01)


def test_no_k_of_rated_drafts_is_stayed_with_and_all_share_what_they_keep() -> None:
    """Each has a K of its own, so that rounds of one dispatch differ."""
    costs = Learnt(1.0, 2.0, 3.0, rated=True)
    several = [Round(2, 1, 2.0), Round(4, 2, 4.0), Round(0, 0, 0.0, is_drafted=False)]
    seconds, given, _, drafting, _ = costs.after(several, times=200)
    np.testing.assert_allclose(seconds, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(drafting, 0.0)
    np.testing.assert_allclose(given, 0.5, rtol=0.01)
    np.testing.assert_allclose(costs.after([Round(2, 0, 2.0)], times=400)[1], 0.05)
    *_, deepest = costs.after([Round(2, 0, 2.0), Round(4, 2, 4.0)], 2 * 9.0, times=50)[0]
    assert deepest == 3.0, "of several depths"
    *_, deepest = costs.after([Round(4, 2, 4.0, longest=2)], 2.5, times=50)[0]
    assert deepest == 3.0, "as narrow as a K of 2"
    *_, deepest = costs.after([Round(4, 2, 4.0, longest=3)], 2.5, times=50)[0]
    np.testing.assert_allclose(deepest, 2.5, rtol=0.01)


def test_passes_of_rated_drafts_are_timed_by_themselves() -> None:
    """A K is chosen behind them, by what the target's pass takes."""
    costs = DepthCosts((0, 2, 4), rated=True, copies=True)
    costs.learn((1, 64), [1.0, 1.3, 1.8], 0.4, 4)
    seconds, _, behind, drafting, _ = costs.next((1, 64), may_vary=True)
    np.testing.assert_allclose(seconds, [0.95, 1.3, 1.8], rtol=1e-5)
    np.testing.assert_allclose([behind, drafting], [[0.1] * 3, [0.0] * 3], rtol=1e-5)
    costs.learn((1, 32), [1.0, 1.3, 1.8], 4.0, 4)  # the machine was slow just then
    np.testing.assert_allclose(costs.next((1, 32), may_vary=True)[2], 0.1, rtol=1e-5)
    for _ in range(60):  # whatever number of passes a round has had
        costs.observe((1, 64), [Round(2, 1, 1.0, num_passes=3)], 1.9)
    seconds, _, behind, *_ = costs.next((1, 64), may_vary=True)
    np.testing.assert_allclose([*seconds, behind[0]], [0.95, 1.3, 1.8, 0.2], rtol=1e-3)


def test_a_lookup_in_the_place_of_a_draft_is_counted_and_timed_by_itself() -> None:
    """Its rounds are the target's passes; what the draft model keeps, and takes, is unchanged."""
    costs = Learnt(1.0, 2.0, 4.0, drafting=2.0, num_passes=4)
    begun = costs.after([])
    np.testing.assert_allclose(begun[0] + begun[3], [0.95, 3.0, 0.95 * 6.0], rtol=1e-5)
    seconds, given, behind, drafting, copied = costs.after([Round(4, 1, 4.0)], 5.0, times=200)
    np.testing.assert_allclose(seconds, [0.95, 2.0, 5.0], rtol=1e-3)
    np.testing.assert_allclose(given, 1.0)
    np.testing.assert_allclose(copied, 0.25, rtol=0.05)
    np.testing.assert_allclose(behind, [0.0, 0.5, 0.5])
    # A draft is to promise so much more then.
    np.testing.assert_allclose(
        drafting, [0.05 * 0.95, 1.0 + 0.05 * 3.0, 2.0 + 0.05 * 7.0], rtol=1e-3
    )
    seconds, given, behind, *_ = costs.after([Round(4, 1, 4.0, num_passes=4)], 9.0, times=200)
    np.testing.assert_allclose(seconds, [0.95, 2.0, 5.0], rtol=1e-3)
    np.testing.assert_allclose(given, [1.0, 1.0, 0.5], rtol=1e-3)
    np.testing.assert_allclose(behind, [0.0, 1.0, 1.0], rtol=1e-3)


def test_drafts_of_little_hope_fade_slowly() -> None:
    few, many = (Learnt(1.0, 2.0, 3.0).after([Round(2, 0, hope)], times=20) for hope in (0.1, 2.0))
    assert few[1, 1] > 0.9
    assert many[1, 1] == 0.5


def test_a_draft_that_takes_fewer_passes_is_cheaper_at_every_depth() -> None:
    """With a lookup below the draft model, where the text repeats itself."""
    costs = Learnt(1.0, 2.0, 3.0, drafting=4.0, num_passes=4)
    np.testing.assert_allclose(costs.seconds_after([]), [0.95, 4.0, 0.95 * 7.0], rtol=1e-5)
    seconds = costs.seconds_after([Round(4, 1, 1.0, num_passes=2)] * 2, 2 * 5.0, times=60)
    np.testing.assert_allclose(seconds, [0.95, 3.0, 0.95 * 5.0], rtol=0.01)
    before = seconds.tolist()  # after rounds in which the draft model took in what it lacked
    assert costs.seconds_after([Round(4, 1, 1.0, num_passes=9)], 9.0, times=60).tolist() == before


def test_rounds_that_take_less_than_their_drafts_were_timed_stay_positive() -> None:
    costs = Learnt(1.0, 5.0, 9.0, drafting=2.0, num_passes=2)
    seconds = costs.seconds_after([Round(4, 1, 1.0, num_passes=2)], 2.0, times=100)
    np.testing.assert_allclose(seconds, [0.95, 5.0, 0.95 * 9.0], rtol=1e-5)


def test_what_a_draft_model_lacks_is_made_good_where_enough_tokens_are_left() -> None:
    """A token takes a second alone and half of one drafted, and each pass before that a quarter."""
    learnt = Learnt(1.0, 1.0, 1.0, drafting=1.0, num_passes=4)
    costs = learnt.after(rounds(0))
    np.testing.assert_allclose(costs[2], [0.0, 0.25, 0.25], rtol=1e-5)
    assert [chosen(costs, left) for left in (5, 60)] == [4, 4]
    assert [chosen(costs, left, num_behind=8) for left in (1, 3, 60)] == [0, 0, 4]
    assert [chosen(costs, 10**6, num_behind=number) for number in (8, 10**3)] == [4, 0]
    learnt.learn(PROGRAM, [1.0, 1.0, 1.0], 1.0, 4, lacking=8.0)  # where arithmetic binds
    np.testing.assert_allclose(learnt.after([])[2], [0.0, 8.0, 8.0], rtol=1e-5)


def test_fewer_draft_tokens_rows_or_positions_are_never_taken_to_be_slower() -> None:
    """A machine that was slow while one program was timed would keep its K wrong for good."""
    seconds = Learnt(3.0, 2.0, 2.5).seconds_after(rounds(0))
    np.testing.assert_allclose(seconds, [0.95 * 2.0, 2.0, 2.5], rtol=1e-5)
    costs = Learnt(5.0, 6.0, 7.0)
    costs.learn((4, 128), [1.0, 1.5, 9.0])  # fewer positions than PROGRAM has
    seconds = costs.seconds_after(rounds(0))
    np.testing.assert_allclose(seconds, [0.95 * 5.0, 6.0, 7.0], rtol=1e-5)
    costs.learn((4, 512), [4.0, 8.0, 9.0])
    np.testing.assert_allclose(costs.seconds_after([]), [0.95 * 4.0, 6.0, 7.0], rtol=1e-5)
    costs.learn(PROGRAM, [9.0, 5.0, 9.0])
    np.testing.assert_allclose(costs.seconds_after([]), [0.95 * 4.0, 5.0, 9.0], rtol=1e-5)
    costs = Learnt(2.0, 4.0, 6.0, drafting=8.0, num_passes=4)
    costs.learn((4, 512), [1.0, 9.0, 9.0], 4.0, 4)  # 1 a pass, not 2
    np.testing.assert_allclose(costs.after([])[0], [0.95, 4.0, 6.0])
    np.testing.assert_allclose(costs.after([])[2], [0.0, 1.0, 1.0])


def test_a_prompt_is_read_where_drafts_save_as_much() -> None:
    """When 2 rows are decoded, and of the best K 2.3125 tokens are hoped for in 1.5 seconds."""
    costs = Learnt(1.0, 1.5, 2.0)
    costs.read_seconds, costs.kept_of_hoped = 0.1, 1.0
    saved = 64 * (1 - 1.5 / 2.3125) / 2
    assert [costs.pays_to_read(1, 2, [round(saved * one)], 64) for one in (9, 11)] == [True, False]
    assert not costs.pays_to_read(1, 2, [round(saved * 5)] * 2, 60)
    assert costs.pays_to_read(9, 9, [200], 64), "nobody knows"
    slower = Learnt(1.0, 3.5, 9.0)
    slower.read_seconds, slower.kept_of_hoped = 0.1, 1.0
    slower.after(rounds(0, 0), 2 * 1.9, times=60)  # as those that draft would be, too
    assert not slower.pays_to_read(1, 1, [10], 64)
    costs.after(rounds(4, given=0.0), times=200)
    assert not costs.pays_to_read(1, 2, [1], 64)
    for _ in range(200):
        costs.pays_to_read(1, 2, [200], 64)
    assert costs.pays_to_read(1, 2, [1], 64), "where many were not read, one is tried again"


def test_a_round_of_which_all_is_provisional_has_rows_too() -> None:
    nothing, drafted = np.zeros((1, 3), int), np.array([[4, 0, 0]])
    numbers = {"depth": np.array([4]), "expected": np.array([5.0])}
    numbers |= {"num_draft_passes": drafted[0, :1], "live": np.array([[True, True, False]])}
    (one,) = rounds_run(SimpleNamespace(count=nothing, num_drafted=drafted, **numbers))  # type: ignore[arg-type]
    assert (one.kept, one.num_rows) == (0, 2)
    costs = Learnt(1.0, 1.5, 2.0)
    costs.after([one])
    assert costs.pays_to_read(1, 2, [1], 64)


def test_rounds_for_which_nothing_was_found_say_nothing_of_their_depth() -> None:
    costs, nothing = Learnt(1.0, 2.0, 3.0), Round(4, 0, 3.0, is_drafted=False)
    before = costs.after(rounds(4)).tolist()
    costs.after([nothing] * 4, 4 * 9.0)
    assert costs.after([Round(4, 3, 3.0), nothing], 2 * 9.0).tolist() == before
    assert costs.num_rounds[4] == 7
