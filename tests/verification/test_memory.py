"""The memory of corrections: what it counts, what it forgets, and what it reads back."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from random_pairs import PROMPTS, SPECS, pair_engine
from refusals import assert_refused, sentence

from fly_jax import Csd, Engine, Exact, FlyJaxError, Generation, Rule, Why
from fly_jax.verification.correction_memory import CorrectionMemory, is_remembered, load_memory

look_up = jax.jit(is_remembered)


def filled(counts: dict[tuple[int, int], int], **limits: int) -> CorrectionMemory:
    memory = CorrectionMemory("some tokens", **limits)
    for pair, count in counts.items():
        memory.add([pair], count)
    return memory


def test_a_pair_is_looked_up_once_it_was_counted_often_enough() -> None:
    memory = CorrectionMemory("v", min_count=2, num_keys=4)
    for _ in range(2):
        memory.add([(5, 9), (1, 2)])
    assert not look_up(memory.keys(), np.array([5]), np.array([9])).any()
    before = memory.version
    memory.add([(5, 9)])
    assert memory.version > before
    found = look_up(memory.keys(), np.array([[5, 5, 9, 1, 0]]), np.array([[9, 8, 5, 2, 9]]))
    assert found.tolist() == [[True, False, False, False, False]]
    assert (memory.count(5, 9), memory.count(1, 2), memory.count(2, 1)) == (3, 2, 0)


@pytest.mark.parametrize("num_keys", [1, 7, 64, 100])
def test_the_search_finds_what_is_there_and_nothing_else(num_keys: int) -> None:
    rng = np.random.default_rng(num_keys)
    # Ids as large as those of Llama 3, where no product of two fits into 32 bits.
    tokens = np.array([0, 1, 2, 65_536, 128_254, 128_255])
    pairs = [(int(a), int(b)) for a in tokens for b in tokens if rng.random() < 0.6]
    memory = filled(dict.fromkeys(pairs, 7), num_keys=num_keys)
    known = memory.keys().tolist()
    draft, target = (grid.ravel() for grid in np.meshgrid(tokens, tokens))
    found = look_up(memory.keys(), draft, target).tolist()
    assert found == [pair in known for pair in np.stack([draft, target], axis=1).tolist()]
    assert sum(found) == min(num_keys, len(pairs))


def test_the_most_frequent_pairs_are_on_the_device_and_of_equal_ones_the_latest() -> None:
    memory = filled({(1, 1): 7, (2, 2): 9, (3, 3): 7, (4, 4): 7}, num_keys=2)
    assert memory.keys().tolist() == [[2, 2], [4, 4]]


def test_the_rarest_pairs_go_first_and_of_equal_ones_the_oldest() -> None:
    memory = filled({(index, 0): 2 for index in range(16)}, capacity=16)
    memory.add([(0, 0), (1, 0)])  # counted thrice
    memory.add([(2, 0)], 0)  # merely seen again
    memory.add([(99, 99)])
    assert len(memory) == 15
    assert [index for index in range(16) if memory.count(index, 0) == 0] == [3, 4]
    assert memory.count(99, 99) == 1


def test_forgetting_a_pair_that_is_looked_up_changes_the_version() -> None:
    memory = filled({(1, 1): 7}, capacity=1)
    before = memory.version
    memory.add([(2, 2)])
    assert memory.version > before
    assert not look_up(memory.keys(), np.array([1]), np.array([1])).any()


def test_merging_adds_the_counts() -> None:
    one, other = filled({(1, 2): 4, (3, 4): 1}), filled({(1, 2): 5, (5, 6): 2})
    merged = one.merged(other)
    assert sorted(merged.counts()) == [(1, 2, 9), (3, 4, 1), (5, 6, 2)]
    assert look_up(merged.keys(), np.array([1]), np.array([2])).all()
    assert (one.count(1, 2), other.count(1, 2)) == (4, 5)
    small = filled({(1, 1): 9}, capacity=2).merged(filled({(2, 2): 3, (3, 3): 4}))
    assert (len(small), small.count(2, 2)) == (2, 0)
    assert_refused("another vocabulary", one.merged, CorrectionMemory("other tokens"))


def test_a_file_brings_everything_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "memory.npz"
    memory = filled({(7, 8): 9, (128_000, 5): 1, (3, 3): 2})
    memory.note = "ünder way"
    memory.save(path)
    found = load_memory(path, "some tokens", min_count=1)
    assert [found.count(*pair) for pair in ((7, 8), (128_000, 5), (3, 3))] == [9, 1, 2]
    assert (found.note, found.min_count, len(found)) == ("ünder way", 1, 3)
    assert found.keys()[:2].tolist() == [[3, 3], [7, 8]]
    found.save(path)
    assert list(path.parent.iterdir()) == [path]


def test_bad_files(tmp_path: Path) -> None:
    path, other = tmp_path / "memory.npz", tmp_path / "array.npy"
    memory = filled({(index, 1): 9 for index in range(300)})
    memory.save(path)
    whole = path.read_bytes()
    with np.load(path) as file:
        stored = dict(file)
    np.save(other, np.zeros(3))

    def archive(**arrays: np.ndarray) -> bytes:
        np.savez(path, **arrays)
        return path.read_bytes()

    def refusal() -> str:
        text = sentence(load_memory, path, "some tokens")
        assert str(path) in text
        return text

    for damaged in (
        *(b"", whole[:-30], whole[: len(whole) // 2], b"PK\x03\x04" + whole[9:], b"{}"),
        *(archive(something=np.zeros(3)), other.read_bytes()),
        archive(**stored | {"counts": np.array([1])}),
        archive(**stored | {"pairs": np.full((300, 2), -1, np.int32)}),
        archive(**stored | {"format": np.int64(2)}),
        archive(**stored | {"counts": np.zeros(300, np.int64)}),
    ):
        path.write_bytes(damaged)
        assert "damaged" in refusal()
    for at in range(0, len(whole), 61):  # whatever a flipped bit does, it is not a crash
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with contextlib.suppress(FlyJaxError):
            assert load_memory(path, "some tokens").count(5, 1) == 9
    CorrectionMemory("other tokens").save(path)
    assert "another vocabulary" in refusal()
    path.unlink()
    assert "cannot be read" in refusal()
    assert_refused("cannot be written", memory.save, tmp_path)
    assert_refused("min_count=-1", CorrectionMemory, "v", min_count=-1)


def engine_with(rule: Rule, memory: CorrectionMemory) -> Engine:
    spec = SPECS["exact"].with_static(reports_mismatches=True, audits=True)
    return pair_engine(1, dataclasses.replace(spec, rule=rule), 0.2, memory=memory)


def counts(memory: CorrectionMemory) -> list[tuple[int, int]]:
    return sorted((drafted, own) for drafted, own, times in memory.counts() for _ in range(times))


def told(rows: Sequence[Generation], *whys: Why) -> list[tuple[int, int]]:
    """What was drafted and what the target would say, where tokens stand for these reasons."""
    reports = (one for row in rows for one in row.reports)
    return sorted((one.draft_id, one.choice_id) for one in reports if one.why in whys)


def test_exact_decoding_teaches_what_it_corrects() -> None:
    memory = CorrectionMemory("v")
    teacher = engine_with(Exact(), memory)
    teacher.warm_up_for(teacher.requests(PROMPTS, 20))
    assert len(memory) == 0
    rows = teacher.generate(PROMPTS, 20)
    assert counts(memory) == told(rows, Why.CORRECTED)
    assert len(memory) > 5


def test_csd_rescues_what_the_memory_knows_and_nothing_else() -> None:
    plain = engine_with(Exact(), CorrectionMemory("v")).generate(PROMPTS, 20)
    rows = engine_with(Csd(1e-6), CorrectionMemory("v", min_count=10**6)).generate(PROMPTS, 20)
    assert [row.token_ids for row in rows] == [row.token_ids for row in plain]
    known, memory = told(plain, Why.CORRECTED), CorrectionMemory("v", min_count=0)
    memory.add(known)
    rows = engine_with(Csd(1e-6), memory).generate(PROMPTS, 20)
    rescued = told(rows, Why.RESCUED)
    assert len(rescued) > 3
    assert {*rescued} <= {*known, *told(rows, Why.CORRECTED)}  # what it learnt meanwhile


def test_csd_learns_while_it_decodes() -> None:
    """From nothing: what was corrected once is rescued from then on, and counted further."""
    memory = CorrectionMemory("v", min_count=0)
    learner = engine_with(Csd(1e-6), memory)
    first, again = (learner.generate(PROMPTS, 20) for _ in range(2))
    rescues = [sum(row.num_rescued_tokens for row in rows) for rows in (first, again)]
    assert rescues[1] > rescues[0]
    assert counts(memory) == told([*first, *again], Why.CORRECTED, Why.RESCUED)
