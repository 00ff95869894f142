"""Which chunks prompts are run in, and which prompts are run together."""

from __future__ import annotations

import itertools

from fly_jax.engine.prefill import ChunkPlan, shared_beginnings


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


def test_prompts_of_one_kind_begin_together_and_are_short() -> None:
    plan = ChunkPlan((256, 512), tokens=256, num_slots=16, longest=500)
    assert plan.rows == (1, 4, 16)
    assert plan.kind(0, 100) == plan.kind(0, 65) != plan.kind(0, 64)
    assert plan.kind(0, 2) == plan.kind(0, 16)
    assert plan.kind(16, 80) != plan.kind(0, 64)
    assert plan.kind(0, 257) is None


def test_what_is_needed_is_part_of_all() -> None:
    plan = ChunkPlan((256, 512), tokens=256, num_slots=4, longest=500)
    prompts = [list(range(length)) for length in (3, 20, 100, 300, 480)]
    needed = plan.needed(prompts, shares=True, block=16)
    assert needed < plan.all()
    assert plan.needed(prompts[:1], shares=True, block=16) == {(1, 16, 256)}


def test_shared_beginnings() -> None:
    prompts = [[1, 2, 3, 4], [9], [1, 2, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4], [9, 9]]
    assert shared_beginnings(prompts) == [3, 0, 2, 4, 3, 1]
    assert shared_beginnings([[5, 6]]) == [0]
