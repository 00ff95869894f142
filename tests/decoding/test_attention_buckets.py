"""Short rows pay for no long ones: attention reads a prefix of a cache, and never too little."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pairs import MOST_TOKENS, greedy, pair_engine, random_target, until_end

from fly_jax.decoding import programs
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.deferral import most_provisional
from fly_jax.decoding.programs import CAPACITY_STEP, LEAST_ATTENDED, AttentionBuckets
from fly_jax.decoding.state import DecodeState
from fly_jax.engine import engine
from fly_jax.verification.rules import Exact

RARE = (7,)  # rows end far apart


@given(st.integers(1, 10**4).map(lambda steps: steps * CAPACITY_STEP))
def test_buckets_double_up_to_the_capacity(capacity: int) -> None:
    static = RoundStatic(3)
    steps = AttentionBuckets(static, capacity, 4, is_whole=False).steps
    assert steps[-1] == capacity
    assert list(steps) == sorted(set(steps))
    assert all(large <= 2 * small for small, large in itertools.pairwise(steps))
    assert steps[0] < 2 * LEAST_ATTENDED
    assert AttentionBuckets(static, capacity, 4, is_whole=True).steps == (capacity,)


def test_a_long_cache_of_which_a_prefix_is_read_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, dispatches: list[tuple[DecodeState, DecodeState]]
) -> None:
    """While rows of all lengths grow through the steps."""
    prompts = [[5, 9], [2] * 3, [token % 48 for token in range(3, 43)], [1, 2, 3, 4, 5]]
    spec = RoundSpec(Exact(), RoundStatic(3, None, RARE))
    monkeypatch.setattr(programs, "CAPACITY_STEP", 16)
    # Prompts are run together in caches of the first step, which has room for a chunk.
    monkeypatch.setattr(engine, "OFFLINE_PREFILL_TOKENS", 16)

    def decode(least: int) -> tuple[list[list[int]], list[int]]:
        monkeypatch.setattr(programs, "LEAST_ATTENDED", least)
        dispatches.clear()
        rows = pair_engine(1, spec, 0.2, rows=2).generate(prompts, 90)
        attended = {before.target.attended for before, _ in dispatches}
        return [row.token_ids for row in rows], sorted(attended)

    found, steps = decode(16)
    assert len(steps) > 3
    assert steps[-1] == 112
    assert decode(1024) == (found, [112])
    assert max(map(len, found)) > 60
    expected = [until_end(row, RARE) for row in greedy(random_target(1), prompts)]
    assert [row[:MOST_TOKENS] for row in found] == expected


@settings(max_examples=200, deadline=None)
@given(
    k=st.integers(0, 9),
    rounds=st.integers(1, 4),
    window=st.none() | st.integers(1, 4),
    room=st.integers(1, 20),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    limit=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_a_dispatch_attends_to_what_its_rows_need(
    k: int, rounds: int, window: int | None, room: int, lengths: list[int], limit: int, seed: int
) -> None:
    """Rows advance by up to K + 1 a round, some of it provisional; the host knows it late."""
    static = RoundStatic(k, rounds_per_dispatch=rounds, deferred_window=window or 0)
    chance = random.Random(seed)
    limits = [length + limit for length in lengths]
    capacity = max(limits) + room
    buckets = AttentionBuckets(static, capacity, room, is_whole=False)
    buckets.steps = tuple(range(1, capacity + 1))
    known = list(lengths)
    actual, settled, pending = list(lengths), list(lengths), list(lengths)
    live = set(range(len(lengths)))
    while live:
        positions = buckets.next_dispatch((known[row], limits[row]) for row in live)
        assert positions in buckets.all(list(zip(lengths, limits, strict=True)))
        for _ in range(rounds):
            for row, end in enumerate(limits):
                if settled[row] == end:
                    continue
                assert positions >= actual[row] + room
                length = min(actual[row] + chance.randint(1, k + 1), end)
                if window is None:
                    actual[row] = settled[row] = length
                    continue
                # A window that fails takes the row back to the first provisional token.
                actual[row] = chance.choice((length, settled[row] + 1))
                least = max(actual[row] - most_provisional(window), settled[row])
                settled[row] = chance.randint(least, actual[row])
                if actual[row] == end:  # nothing stays open at the end
                    settled[row] = end
        for row, length in enumerate(pending):
            known[row] = length
            if length == limits[row]:
                live.discard(row)
        pending = list(settled)
