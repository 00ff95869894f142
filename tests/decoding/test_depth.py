"""K is chosen as the estimate says, and a chosen K decodes as the same fixed K does."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_types import Patch
from random_pairs import CAPACITY, ROWS, SPECS, pair_engine
from refusals import assert_refused

from fly_jax import Lookup, Verdict, Why
from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.depth import AcceptanceStats, choose_depth, expected_tokens, observe
from fly_jax.decoding.drafters.model import CATCH_UP_AFTER
from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine import depth_costs
from fly_jax.engine.depth_costs import DepthCosts, Round, rounds_run
from fly_jax.shapes import RowFlags

counts = st.floats(0.5, 50, width=32)


def stats_of(*counts: Sequence[float], seconds: Sequence[float] = (1.0,)) -> AcceptanceStats:
    """Of each row the draft tokens that were matched, rescued, refused and cut."""
    by_kind = [jnp.asarray(kind, jnp.float32) for kind in zip(*counts, strict=True)]
    same = [(value,) * len(seconds) for value in (1.0, 0.0)]
    return AcceptanceStats(*by_kind, costs=jnp.asarray((seconds, *same)))


def chosen_of(
    stats: AcceptanceStats, live: RowFlags, depths: tuple[int, ...], left: int = 99
) -> int:
    """The index of the depth, where a draft model lacks nothing."""
    return int(choose_depth(stats, live, depths, 0, jnp.full(live.shape, left), jnp.int32(0))[0])


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
    again = observe(after, verdict, live)
    assert 1 < float(again.matched[1]) < 2, "counts fade"


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


def test_a_forced_depth_is_that_fixed_k_in_sampling_too(monkeypatch: Patch) -> None:
    """A draw depends on its position, and not on how many others there are."""
    index, depths = 1, (2, 3, 5)
    costs = np.array([np.where(np.arange(3) == index, 1, np.inf), [1.0] * 3, [0.0] * 3])
    monkeypatch.setattr(DepthCosts, "next", lambda *_, may_vary: costs.astype(np.float32))
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
                if name == "run":  # and each pass that takes in what the draft model lacks 4
                    lacks = given[0].length - 2 - given[0].drafter.cache.length
                    now[0] += 4 * max(-(-int(lacks.max()) // CATCH_UP_AFTER), 0)
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
    seconds, _, behind = engine.costs.next((ROWS, CAPACITY), may_vary=True)
    np.testing.assert_allclose(seconds, [1.0, 1.0, 0.95])  # the last one is stayed with
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


def test_wrong_depths() -> None:
    for depths in ((3, 2), (2, 2, 6), (-1, 6), (2, 4)):
        assert_refused("depths", RoundStatic, 6, depths=depths)
