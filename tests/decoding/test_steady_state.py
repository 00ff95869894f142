"""What runs costs no more than it must: no compilation after warm-up, no copy, no long pass."""

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.stages import Traced

from fly_jax import Budget, CorrectionMemory, Csd, Engine, Fly, KVCache, Margin, Request, Sampling
from fly_jax.decoding import programs
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.deferral import most_provisional
from fly_jax.decoding.programs import AttentionBuckets, Programs, attention_steps
from fly_jax.decoding.state import DecodeState, RuleInputs

Compilations = Callable[[], list[str]]
Dispatches = list[tuple[DecodeState, DecodeState]]
# The memory learns, so that its keys are exchanged while rows are being decoded.
LEARNING = pairs.SPECS["exact"].with_static(reports_mismatches=True)
# What the others do these do together.
NAMES = ("autoregressive", "exact", "lookup", "sampled", "deferred")
SPECS = {
    **{name: pairs.SPECS[name] for name in NAMES},
    "levels": pairs.SPECS["fly, lookup"].with_static(level_speculative_tokens=(2,), depths=(2, 5)),
    "csd, depths": replace(LEARNING, rule=Budget(Csd(1e-6), 20.0)).with_static(depths=(2, 5)),
}
# Prompts, how many tokens at most, and the seed.
BATCHES = [([[1, 2, 3], [4]], 12, 0), ([[9] * 16, [8, 7] * 3], 20, 1), ([[5, 4, 3, 2]], 3, 2)]


def num_drafts(spec: RoundSpec) -> int:
    if spec in (SPECS["lookup"], SPECS["autoregressive"]):
        return 0
    return 1 + len(spec.static.level_speculative_tokens)


def engine_for(spec: RoundSpec, pair: int = 1, **given: Any) -> Engine:
    memory = CorrectionMemory("v", min_count=0) if spec.rule.uses_memory else None
    return pairs.pair_engine(pair, spec, *(0.2, 1.2)[: num_drafts(spec)], memory=memory, **given)


def decoded(engine: Engine, prompts: list[list[int]], limit: int, seed: int) -> list[list[int]]:
    return [row.token_ids for row in engine.generate(prompts, limit, seed=seed)]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled() -> None:
    """By other files, of what is counted here."""
    jax.clear_caches()


@pytest.mark.parametrize("name", SPECS)
def test_once_warmed_up_nothing_compiles_and_nothing_is_copied(
    name: str, compilations: Compilations, dispatches: Dispatches
) -> None:
    """Not unasked, and no cache: a round that copied those would need twice their memory."""
    engine = engine_for(SPECS[name])
    for prompts, max_new_tokens, seed in BATCHES:
        engine.warm_up_for(engine.requests(prompts, max_new_tokens, seed=seed))
    ours = [one for one in compilations() if re.search(r"jit\((_run|_prefill_chunk)\)", one)]
    assert 0 < len(ours) <= len(engine._compiled), "each once, and what is compiled is counted"
    expected = [decoded(engine, *batch) for batch in BATCHES]
    assert all(map(all, expected))
    assert compilations() == []
    if engine.memory is not None:  # what has been learnt would change the tokens
        assert engine.memory.version > 1
        engine.memory = CorrectionMemory("v", min_count=0)
    dispatches.clear()
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="isallowed host-to-device"):
            jax.jit(jnp.negative)(np.ones(3))  # the guard is up
        assert decoded(engine, *BATCHES[0]) == expected[0]
    assert len(dispatches) > 2
    for state, _ in dispatches:
        leaves = jax.tree.leaves(state.drafter, is_leaf=lambda one: isinstance(one, KVCache))
        caches = [one for one in (state.target, *leaves) if isinstance(one, KVCache)]
        assert len(caches) == 1 + num_drafts(SPECS[name])
        assert state.tokens.is_deleted()
        assert all(cache.keys.is_deleted() and cache.values.is_deleted() for cache in caches)


def test_who_interrupts_does_not_wait_for_all_programs() -> None:
    begun = list[int]()

    def job(number: int) -> Traced:
        begun.append(number)
        return jax.jit(lambda one: one + number).trace(1.0)

    done = programs.compiled([partial(job, number) for number in range(64)], 1)
    assert next(done) == 1
    done.close()
    assert len(begun) < 64


def test_other_weights_compile_nothing_and_others_their_rounds(compilations: Compilations) -> None:
    """Prompts are run, put into slots and begun by the same programs for another K and rule."""

    def programs_of_ours() -> list[str]:
        names = [one.split(" in ")[0].split("jit(")[1].rstrip(")") for one in compilations()]
        return sorted(one for one in names if one.startswith("_"))

    of_none = {"max_length": 160}  # which nothing else here is made for
    decoded(engine_for(SPECS["exact"], **of_none), *BATCHES[0])
    first = programs_of_ours()
    assert {"_begin", "_insert", "_prefill_chunk"} < set(first)
    assert [one for one in first if one.startswith("_run")] == ["_run"]
    other = engine_for(SPECS["exact"], pair=2, **of_none)
    compilations()
    decoded(other, *BATCHES[0])
    assert compilations() == []
    fly = pairs.SPECS["fly"].with_static(num_speculative_tokens=3)
    decoded(engine_for(fly, **of_none), *BATCHES[0])
    assert programs_of_ours() == ["_run"]


def test_other_numbers_compile_nothing(compilations: Compilations) -> None:
    """Those of each request's rule, of its budget and of its sampling are data."""
    (prompt, *_), limit, seed = BATCHES[0]
    first = Budget(Fly(0.3, 2) | Margin(gap=0.3), 8.0)
    engine = pairs.pair_engine(1, SPECS["exact"], 0.2, rules=[first], offline=False)

    def tokens(rule: Budget, sampling: Sampling) -> list[int]:
        state = engine.submit(Request(prompt, limit, rule, sampling, seed))
        list(engine.run(()))
        return state.generation.token_ids

    before = tokens(first, Sampling(0.7, top_p=0.9))
    assert any("_run" in message for message in compilations()), "compilations go uncounted"
    after = tokens(Budget(Fly(0.0, 0) | Margin(gap=0.0), 9.5), Sampling(1.5, top_p=0.6))
    assert compilations() == []
    assert after != before


def begun(rounds: int, *limits: int) -> tuple[Programs, DecodeState, RuleInputs]:
    """The programs of an engine, and its rows with prompts of these limits, before any round."""
    engine = engine_for(SPECS["exact"].with_static(rounds_per_dispatch=rounds))
    for number, limit in enumerate(limits):
        engine.submit(Request([1, 2, 3 + number], limit))
    engine._run_prompts()
    return engine._programs, engine._held(), engine._inputs()


def test_a_round_of_which_all_rows_have_finished_leaves_them_as_they_are() -> None:
    """It runs all the same, since it is in no loop; the host is one dispatch behind."""
    ours, state, inputs = begun(1, 12, 12)
    inputs = replace(inputs, seated=None)
    while (result := ours.run(state, inputs))[1].count.any():
        state = result[0]
    before = jax.device_get(result[0])
    after, output = jax.device_get(ours.run(result[0], inputs))
    numbers = (output.count, output.num_drafted, output.num_accepted, output.num_rescued)
    assert not any(map(np.any, numbers))
    assert np.all(after.finished)
    np.testing.assert_array_equal(after.length, before.length)
    for row, length in enumerate(before.length):
        np.testing.assert_array_equal(after.tokens[row, :length], before.tokens[row, :length])


def test_a_dispatch_ends_with_the_first_row_that_is_done() -> None:
    """Another request has its place; one that begins after that runs no round."""
    ours, state, inputs = begun(3, 1, 40)
    state, output = ours.run(state, inputs)
    count, finished = jax.device_get((output.count, output.finished))
    assert (count[0, :2] > 0).all()
    assert finished[0].tolist() == [True, False, True]
    assert not count[1:].any(), "the rounds after it do not run"
    before = jax.device_get(state)
    state, output = ours.run(state, inputs)
    after, nothing = jax.device_get((state, output))
    assert not any(map(np.any, jax.tree.leaves(nothing)))
    for leaf, expected in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(leaf, expected)
    # Its request has been read, and nobody has its place yet.
    left = ours.put_numbers(np.array([False, True, False]))
    assert (ours.run(state, replace(inputs, seated=left))[1].count[:, 1] > 0).all()


@given(st.integers(1, 10**4).map(lambda steps: steps * programs.CAPACITY_STEP))
def test_buckets_double_up_to_the_capacity(capacity: int) -> None:
    steps = attention_steps(capacity, is_whole=False)
    assert steps[-1] == capacity
    assert list(steps) == sorted(set(steps))
    assert all(large <= 2 * small for small, large in itertools.pairwise(steps))
    assert steps[0] < 2 * programs.LEAST_ATTENDED
    assert attention_steps(capacity, is_whole=True) == (capacity,)


@settings(max_examples=200, deadline=None)
@given(
    k=st.integers(0, 9), rounds=st.integers(1, 4), window=st.none() | st.integers(1, 4),
    room=st.integers(1, 20), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    limit=st.integers(1, 60), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_a_dispatch_attends_to_what_its_rows_need(
    k: int, rounds: int, window: int | None, room: int, lengths: list[int], limit: int, seed: int
) -> None:
    """Rows advance by up to K + 1 a round, some of it provisional; the host knows it late."""
    static = RoundStatic(k, rounds_per_dispatch=rounds, deferred_window=window or 0)
    chance = random.Random(seed)
    limits = [length + limit for length in lengths]
    capacity = max(limits) + room
    buckets = AttentionBuckets(static, range(1, capacity + 1), room)
    known, actual, settled, pending = ([*lengths] for _ in range(4))
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
        known, pending = pending, [*settled]
        live -= {row for row, end in enumerate(limits) if known[row] == end}
