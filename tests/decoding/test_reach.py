"""Short rows pay for no long ones: batches of like length, and attention to a prefix of a cache."""

from __future__ import annotations

import itertools
import random

import pytest
from fly_jax.decoding.capacity import Reach, bucket_for, ladder, like_lengths
from fly_jax.decoding.decoder import Decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pairs import (
    CAPACITY,
    MOST_TOKENS,
    greedy,
    random_draft,
    random_target,
    until_end,
)

from fly_jax.decoding import capacity as capacities
from fly_jax.decoding import programs
from fly_jax.decoding.deferral import most_provisional
from fly_jax.decoding.spec import RoundSpec
from fly_jax.verification.rules import Exact, Fly

RARE = (7,)  # rows end far apart


@pytest.fixture
def fine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ladder with a step where short tests get to."""
    monkeypatch.setattr(capacities, "LEAST_ATTENDED", 16)
    monkeypatch.setattr(capacities, "CAPACITY_STEP", 16)


@given(st.integers(1, 10**6))
def test_a_ladder_doubles_up_to_the_capacity(capacity: int) -> None:
    steps = ladder(capacity)
    assert steps[-1] == capacity
    assert list(steps) == sorted(set(steps))
    assert all(large <= 2 * small for small, large in itertools.pairwise(steps))
    assert steps[0] < 2 * capacities.LEAST_ATTENDED or len(steps) == 1


@pytest.mark.usefixtures("fine_steps")
def test_a_long_cache_of_which_a_prefix_is_read_changes_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While rows of all lengths grow through the steps."""
    prompts = [[5, 9], [2] * 3, [token % 48 for token in range(3, 43)], [1, 2, 3, 4, 5]]
    spec = RoundSpec(Exact(), 3, None, RARE)
    target, draft = random_target(1), random_draft(1, 0.2)
    attended = []
    run = programs._run

    def spy(*arguments: object) -> object:
        state = arguments[4]
        attended.append(state.target.attended)  # type: ignore[attr-defined]
        return run(*arguments)

    monkeypatch.setattr(programs, "_run", spy)

    def decode(capacity: int) -> list[list[int]]:
        decoder = Decoder(target, draft, spec, capacity=capacity, batch_size=2)
        return [
            row.token_ids
            for batch in (prompts[:2], prompts[2:])
            for row in decoder.decode(batch, 90, seed=0)
        ]

    found = decode(2048)
    steps = sorted(set(attended))
    assert len(steps) > 3
    assert steps[-1] <= 128
    monkeypatch.setattr(capacities, "LEAST_ATTENDED", 1024)
    attended.clear()
    assert decode(CAPACITY) == found
    assert set(attended) == {CAPACITY}
    assert max(map(len, found)) > 60
    expected = [until_end(row, RARE) for row in greedy(target, prompts)]
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
def test_a_dispatch_reaches_what_its_rows_need(
    k: int, rounds: int, window: int | None, room: int, lengths: list[int], limit: int, seed: int
) -> None:
    """Rows advance by up to K + 1 a round, some of it provisional; the host knows it late."""
    spec = RoundSpec(Exact(), k, rounds_per_dispatch=rounds)
    if window is not None:
        spec = RoundSpec(Fly(0.3, window), k, rounds_per_dispatch=rounds, boundary="defer")
    chance = random.Random(seed)
    limits = [length + limit for length in lengths]
    reach = Reach(spec.structure(None), range(1, max(limits) + room + 1), room)
    known = list(lengths)
    actual, settled, pending = list(lengths), list(lengths), list(lengths)
    live = set(range(len(lengths)))
    while live:
        positions = reach.next_dispatch((known[row], limits[row]) for row in live)
        assert positions in reach.all(list(zip(lengths, limits, strict=True)))
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


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=30),
    batch_size=st.integers(1, 8),
)
def test_batches_are_of_like_length(lengths: list[int], batch_size: int) -> None:
    prompts = [[0] * length for length in lengths]
    batches = like_lengths(prompts, batch_size)
    assert sorted(index for batch in batches for index in batch) == list(range(len(prompts)))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert batches == sorted(batches)
    by_class: dict[int, list[int]] = {}
    for batch in batches:
        assert batch == sorted(batch)
        own = [max(lengths[index], capacities.LEAST_ATTENDED) for index in batch]
        # One power of two bounds them all: none is long enough for another class.
        bound = 1 << (max(own) - 1).bit_length()
        assert all(bound // 2 < length <= bound for length in own)
        by_class.setdefault(bound, []).append(len(batch))
    # All batches of a class but the last one are full.
    for sizes in by_class.values():
        assert all(size == batch_size for size in sizes[:-1])


def test_short_prompts_stay_in_their_order() -> None:
    prompts = [[0] * length for length in (9, 200, 3, 40, 256)]
    assert like_lengths(prompts, 2) == [[0, 1], [2, 3], [4]]


@given(length=st.integers(1, 5000), rows=st.integers(1, 300))
def test_a_bucket_holds_its_prompts(length: int, rows: int) -> None:
    bucket = bucket_for(length, rows)
    piece = programs.prefill_piece(rows)
    assert bucket >= length
    assert bucket % piece == 0 if length > piece else bucket <= max(2 * length, 16)
