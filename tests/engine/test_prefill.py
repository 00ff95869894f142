"""Prompts are run in chunks of few shapes, several at a time, and no token depends on with whom."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from engine_kinds import KINDS, account, engine_for, finished, models, requests
from random_pairs import SPECS, autoregressive, batch_engine

from fly_jax import Engine, Request, RequestState
from fly_jax.decoding import programs
from fly_jax.decoding.state import DecodeState, RoundOutput
from fly_jax.engine.prefill import ChunkPlan, shared_beginnings
from fly_jax.models import llama

CHANCE = np.random.default_rng(4)
# All in one power of two, so that they are run together.
PROMPTS = [CHANCE.integers(0, 48, length).tolist() for length in range(52, 36, -1)]
LIMIT = 12
Passes, Patch = list[tuple[int, int]], pytest.MonkeyPatch
LIES_ON_CPU = "fly_jax.engine.engine.lies_on_cpu"


def test_chunks_cover_a_prompt() -> None:
    plan = ChunkPlan((256,), tokens=64, num_slots=8, longest=200)
    assert plan.sizes == (16, 64)
    assert plan.rows == (1, 4)
    for rows in plan.rows:
        most = 64 // rows
        for start, end in itertools.product(range(0, 250, 7), range(1, 250, 3)):
            done = start
            for chunk in plan.chunks(start, end, rows):
                assert chunk.start <= done <= chunk.attended
                assert chunk.start + chunk.size <= 256
                assert chunk.rows * chunk.size <= 64
                assert chunk.program in plan.all()
                done = chunk.start + chunk.size
            assert done >= end or start >= end
            assert done - max(start, end) < most


def test_prompts_of_one_kind_begin_together_and_what_they_need_is_part_of_all() -> None:
    plan = ChunkPlan((256, 512), tokens=256, num_slots=16, longest=500)
    assert plan.rows == (1, 4, 16)
    assert plan.kind(0, 100) == plan.kind(0, 65) != plan.kind(0, 64)
    assert plan.kind(0, 2) == plan.kind(0, 16)
    assert plan.kind(16, 80) != plan.kind(0, 64)
    assert plan.kind(0, 257) is None is not plan.kind(0, 256)
    alone = ChunkPlan((256, 512), tokens=64, num_slots=16, longest=500, together=64)
    assert alone.kind(0, 65) is None is not alone.kind(16, 80)
    prompts = [list(range(length)) for length in (3, 20, 100, 300, 480)]
    needed = functools.partial(plan.needed, block=16)
    assert needed(prompts, ()) < plan.all()
    assert needed(prompts[:1], ()) == {(1, 16, 256)}
    # Of what slots hold only that is run which comes behind it.
    assert needed(prompts[2:3], [list(range(90))]) == {(1, 256, 256), (1, 64, 256)}


def test_shared_beginnings() -> None:
    prompts = [[1, 2, 3, 4], [9], [1, 2, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4], [9, 9]]
    assert shared_beginnings(prompts) == [3, 0, 2, 4, 3, 1]
    assert shared_beginnings([[5, 6]]) == [0]


FOURS = {"num_slots": 4, "max_length": 500, "prefill_chunk": 64}


def asked(name: str, prompts: Sequence[list[int]]) -> list[Request]:
    """Requests for continuations of these prompts, each in another way if the kind has several."""
    return [
        dataclasses.replace(one, prompt=prompt, max_new_tokens=LIMIT)
        for one, prompt in zip(requests(KINDS[name], len(prompts)), prompts, strict=True)
    ]


def check_alone(engine: Engine, found: Sequence[RequestState]) -> None:
    """Each gives what it gives where nothing else is run and nothing is held of it."""
    for state in found:
        engine.forget()
        (alone,) = finished(engine, [state.request])
        assert alone.num_reused == 0
        assert account(alone)[:-1] == account(state)[:-1]


def test_sixteen_prompts_run_in_one_pass(passes: Passes, monkeypatch: Patch) -> None:
    monkeypatch.setattr(LIES_ON_CPU, lambda _: False)
    engine = engine_for(KINDS["lookup alone"], num_slots=16, offline=True)
    found = finished(engine, engine.requests(PROMPTS, LIMIT))
    assert passes == [(16, 128)]
    assert engine.prefill_seconds > 0
    expected = autoregressive(models(None, 0)[0], PROMPTS, LIMIT)
    assert [one.generation.token_ids for one in found] == expected
    check_alone(engine, found[::3])
    assert passes[1:] == [(1, 128)] * 6


def test_prompts_between_rounds_are_run_by_fours(passes: Passes) -> None:
    """In chunks, since others wait, and in caches shorter than those of the slots."""
    name = "rules and sampling"
    engine, given = engine_for(KINDS[name], **FOURS), asked(name, PROMPTS[:7])
    assert engine._prefill.plan.positions(4) == 256 < engine._capacity
    found = finished(engine, given[:4])
    assert passes == [(4, 16)] * 4
    found += finished(engine, given[4:])
    assert passes == [(4, 16)] * 7
    for state in found:
        moments = (state.submitted, state.seated, state.prefilled, state.first_token)
        assert list(moments) == sorted(moments)
    # Behind what a slot holds of them, together too: where two are, and where it is another's.
    common = [given[5].prompt[:32], given[6].prompt[:32]]
    again = [[*common[one], *range(one, 14 + one)] for one in (0, 0, 1)]
    passes.clear()
    shared = finished(engine, asked(name, again))
    assert passes == [(4, 16)]
    assert [one.num_reused for one in shared] == [32] * 3
    check_alone(engine, [*found, *shared])


def test_prompts_that_are_run_together_have_short_caches(
    dispatches: list[tuple[DecodeState, DecodeState]],
) -> None:
    """They go on where a slot with a long text begins, and a long text where one of them does.

    Alone, where a round reads no more of a cache than its row needs, they have the same tokens.
    """
    engine = engine_for(KINDS["autoregressive"], **FOURS)
    text = CHANCE.integers(0, 48, 400).tolist()
    lengths = (300, 40, 41, 60, 20, 70, 320, 71, 72, 73, 256, 310)
    prompts = [[*text[: length // 2], *text[-length // 2 :]] for length in lengths]
    found = finished(engine, asked("autoregressive", prompts))
    assert any(one.num_reused for one in found)
    assert {before.target.attended for before, _ in dispatches} == {256, 512}
    check_alone(engine, found)


def test_who_is_cancelled_leaves_the_others_of_a_group_alone(passes: Passes) -> None:
    name = "rules and sampling"
    engine = engine_for(KINDS[name], **FOURS)

    def begun(prompts: Sequence[list[int]]) -> list[RequestState]:
        first = Request([1, 2], 60, ignores_eos=True)
        states = [engine.submit(one) for one in (first, *asked(name, prompts))]
        engine.step()
        engine.step()
        return states

    _, *group = begun(PROMPTS[:3])
    assert engine.num_waiting == 3
    assert (4, 16) in passes
    engine.cancel(group[1])
    engine.step()
    assert engine.num_waiting == 3, "the rows of the others go on"
    finished(engine, [])
    assert group[1].generation.token_ids == []
    assert engine.slots.num_free == 4
    check_alone(engine, group[::2])
    # And a group of which nobody is left is run no further.
    running, *group = begun(PROMPTS[3:5])
    for one in group:
        engine.cancel(one)
    passes.clear()
    assert engine.num_waiting == 0
    finished(engine, [])
    assert passes == []
    assert len(running.generation.token_ids) == 60


def test_what_settles_is_accounted_for_and_the_listener_hears_it_before() -> None:
    engine = engine_for(KINDS["rules and sampling"], **FOURS)
    heard, told = collections.Counter[RequestState](), collections.Counter[RequestState]()

    def listener(output: RoundOutput, occupants: Sequence[RequestState | None]) -> None:
        assert all(isinstance(leaf, np.ndarray) for leaf in (output.tokens, output.count))
        for slot, state in enumerate(occupants):
            if state is not None:
                heard[state] += int(output.count[:, slot].sum())

    engine.listener = listener
    for state, settled in engine.run(asked("rules and sampling", PROMPTS[:6])):
        account, begun = state.generation, told[state]
        told[state] += len(settled.token_ids)
        assert told[state] <= heard[state]
        assert account.token_ids[begun : told[state]] == list(settled.token_ids)
        assert account.why[begun : told[state]] == list(settled.why)
        assert settled.finish_reason in (None, account.finish_reason)
    assert len(told) == 6
    assert told == heard == {state: len(state.generation.token_ids) for state in told}


def test_prompts_of_all_lengths_share_the_programs_of_a_large_model(
    monkeypatch: Patch, compilations: Callable[[], list[str]], passes: Passes
) -> None:
    target, draft = models(None, 1)
    prompts = [CHANCE.integers(0, 48, size).tolist() for size in (7, 45, 160, 422)]
    made = functools.partial(batch_engine, target, draft, SPECS["exact"])
    assert made(1, max_length=500)._prefill.plan.sizes == (16, 64)
    with monkeypatch.context() as on_gpu:
        for name in (LIES_ON_CPU, "fly_jax.decoding.programs.lies_on_cpu"):
            on_gpu.setattr(name, lambda _: False)
        expected = made(1, max_length=500).generate(prompts, LIMIT)
        on_gpu.setattr(llama, "LARGE_BYTES", 0)
        assert made(1, max_length=500)._prefill.plan.sizes == (32, 128, 512)  # of a large one too
    monkeypatch.setattr(llama, "LARGE_BYTES", 0)
    for prompt, one in zip(prompts, expected, strict=True):
        compilations()
        engine = made(1, max_length=len(prompt) + LIMIT)
        assert engine.generate([prompt], LIMIT)[0].token_ids == one.token_ids
        assert bool(compilations()) == (len(prompt) <= 45)  # chunks of 16 and of 64
    # A server's too, of which as many are run between two rounds as it is told.
    engine = made(2, max_length=500, offline=False)
    engine.submit(Request(prompts[0], 200))
    engine.step()
    passes.clear()
    state, numbers = engine.submit(Request(prompts[-1], LIMIT)), list[int]()
    while not state.is_finished:
        engine.step()
        numbers.append(len(passes) - sum(numbers))
    assert state.generation.token_ids == expected[-1].token_ids
    assert {size for _, size in passes} == {64}
    assert [one for one in numbers if one] == [4, 3]
    # Several rows waste no more together.
    shared = engine._programs
    assert shared.row_steps(16) == (1, 2, 4, 8, 16)
    assert shared.attention_buckets(1000, 16).steps[0] >= 512
    assert engine._prefill.plan.kind(0, 65) is None
    capacities = [shared.attention_buckets(300, rows).steps[-1] for rows in (1, 3, 64)]
    assert capacities == [512, 384, programs.cache_capacity(300, shared.room)]
