"""Converted weights: what is mapped is what was converted, and only from a file that is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_files import CONFIG, tensors_of, write
from launch_types import Patch
from safetensors.numpy import load_file
from tiny_pair import write_pair

from fly_jax.decoding.pair import load_pair, open_pair
from fly_jax.errors import FlyJaxError
from fly_jax.models import llama
from fly_jax.models.architectures import groups
from fly_jax.models.checkpoints import load
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama

TYPES = [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama.random(CONFIG, jax.random.key(1))


@pytest.fixture(autouse=True)
def _small_ones_are_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr(load, "_LEAST_BYTES", 0)


@pytest.fixture(params=["safetensors", "gguf"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, model: Llama) -> Path:
    if request.param == "gguf":
        return write(tmp_path / "model.gguf", tensors_of(model), "Q8_0")
    save_hf(model, tmp_path / "hf")
    return tmp_path / "hf"


def quiet(sentence: str) -> None:
    raise AssertionError(sentence)


def unstacked(path: Path, where: Path | None, dtype: str = "float32", int8: bool = False) -> Llama:
    return load_llama(
        path, dtype=dtype, int8=int8, unstacked=True, weights_cache=where or "off", say=quiet
    )


def assert_equal(one: Llama, other: Llama) -> None:
    mine, theirs = one.parameters(), other.parameters()
    assert mine.keys() == theirs.keys()
    for name in mine:
        for a, b in zip(*map(jax.tree.leaves, (mine[name], theirs[name])), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            np.testing.assert_array_equal(a, b, name)


@pytest.mark.parametrize(
    ("dtype", "int8", "cached_bytes"), [*((*one, 0) for one in TYPES), ("float32", False, 2**30)]
)
def test_converted_mapped_and_read_by_groups_are_the_same(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    dtype: str, int8: bool, cached_bytes: int,
) -> None:  # fmt: skip
    """Of large models, and of one that is small for a CPU's caches."""
    monkeypatch.setattr(llama, "_CACHED_BYTES", cached_bytes)
    where = tmp_path / "kept"
    by_groups = load_llama(checkpoint, dtype=dtype, int8=int8)
    in_memory = unstacked(checkpoint, None, dtype, int8)
    assert in_memory.is_unstacked
    assert_equal(in_memory.stacked(), by_groups)
    for _ in range(2):  # made, and mapped
        assert_equal(unstacked(checkpoint, where, dtype, int8), in_memory)
        stacked = load_llama(checkpoint, dtype=dtype, int8=int8, weights_cache=where, say=quiet)
        assert_equal(stacked, in_memory.stacked())
    assert [file.suffix for file in where.iterdir()] == [".safetensors"]


def test_what_is_mapped_is_not_copied(checkpoint: Path, tmp_path: Path) -> None:
    where = tmp_path / "kept"
    unstacked(checkpoint, where)
    source = open_weights(checkpoint)
    assert load._has_rows(source)
    found = load._Kept(source, np.dtype("float32"), int8=False)
    assert found.map(checkpoint, where, quiet)
    layer = groups(source.config)[-1]
    placed = found.read(layer, None)["gate"]
    assert placed.unsafe_buffer_pointer() == found.tensor(layer, "gate").ctypes.data


def test_the_file_is_one_of_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    where = tmp_path / "kept"
    model = unstacked(checkpoint, where)
    (file,) = where.iterdir()
    tensors = load_file(file)
    np.testing.assert_array_equal(tensors["layer_001.up"], model.stacked().parameters()["up"][1].T)


def zeroed(data: bytearray) -> bytearray:
    data[-5000:-900] = bytes(4100)
    return data


def flipped(data: bytearray) -> bytearray:
    data[-300_000] ^= 1
    return data


DAMAGES: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "cut off": lambda data: data[:-1],
    "too long": lambda data: data + b"0",
    "empty": lambda data: b"",
    "half written": zeroed,
    "one bit": flipped,
    "another header": lambda data: data[:100] + b"!" + data[101:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    where, said = tmp_path / "kept", list[str]()
    model = unstacked(checkpoint, where)
    (file,) = where.iterdir()
    whole = file.read_bytes()
    file.unlink()  # the model keeps what it has mapped
    file.write_bytes(DAMAGES[damage](bytearray(whole)))
    again = load_llama(checkpoint, unstacked=True, weights_cache=where, say=said.append)
    assert_equal(again, model)
    assert said == [f"The converted weights in {file} are damaged; they are made anew."]
    assert file.read_bytes() == whole
    assert_equal(unstacked(checkpoint, where), model)


def test_a_checkpoint_that_changed_is_another_one(checkpoint: Path, tmp_path: Path) -> None:
    where = tmp_path / "kept"
    unstacked(checkpoint, where)
    weights = checkpoint if checkpoint.is_file() else checkpoint / "model.safetensors"
    at = weights.stat().st_mtime_ns
    os.utime(weights, ns=(at, at + 1))
    unstacked(checkpoint, where)
    for dtype, int8 in TYPES:
        unstacked(checkpoint, where, dtype, int8)
    assert len(list(where.iterdir())) == 1 + len(TYPES)


def test_what_was_not_read_for_longest_goes(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    where = tmp_path / "kept"
    unstacked(checkpoint, where)
    unstacked(checkpoint, where, "bfloat16")
    larger, smaller = sorted(where.iterdir(), key=lambda file: -file.stat().st_size)
    os.utime(larger, (1e9, 1e9))
    os.utime(smaller, (2e9, 2e9))
    unstacked(checkpoint, where)  # reads the larger one
    assert larger.stat().st_atime > 1e9
    os.utime(smaller, (1e9, 1e9))
    monkeypatch.setattr(load, "_MOST_BYTES", larger.stat().st_size + smaller.stat().st_size)
    unstacked(checkpoint, where, int8=True)
    assert larger in where.iterdir()
    assert smaller not in where.iterdir()


def test_without_room_the_weights_are_in_memory(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    where, said = tmp_path / "kept", list[str]()
    monkeypatch.setattr(load, "_MOST_BYTES", 1000)
    model = load_llama(checkpoint, unstacked=True, weights_cache=where, say=said.append)
    assert_equal(model, unstacked(checkpoint, None))
    assert len(said) == 1
    assert "are not kept: at most" in said[0]
    assert not list(where.iterdir())


def test_a_disk_that_is_full_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    where, said = tmp_path / "kept", list[str]()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        model = load_llama(checkpoint, unstacked=True, weights_cache=where, say=said.append)
    assert_equal(model, unstacked(checkpoint, None))
    assert said == [
        f"The converted weights are not kept in {where} (No space left on device); make room, or "
        "give --weights_cache another folder, or off."
    ]
    assert not list(where.iterdir())


@pytest.mark.parametrize("where", ["kept", None])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, model: Llama, where: str) -> None:
    tensors = tensors_of(model)
    tensors["blk.1.ffn_up.weight"] = np.full_like(tensors["blk.1.ffn_up.weight"], np.inf)
    path = write(tmp_path / "model.gguf", tensors)
    with pytest.raises(FlyJaxError, match=r"blk\.1\.ffn_up\.weight in .* holds NaN or infinite"):
        unstacked(path, tmp_path / "kept" if where else None)
    assert not list((tmp_path / "kept").glob("*"))


def test_a_pair_of_one_device_is_kept_where_the_flag_says(
    tmp_path: Path, monkeypatch: Patch, model: Llama
) -> None:
    monkeypatch.setenv("FLY_JAX_WEIGHTS_CACHE", str(tmp_path / "variable"))
    write_pair(tmp_path)
    opened = open_pair(tmp_path / "target", tmp_path / "draft")
    load_pair(opened)
    assert not (tmp_path / "variable").exists()
    pair = load_pair(opened, weights_cache=None, say=quiet)
    assert len(list((tmp_path / "variable").iterdir())) == 2
    again = load_pair(opened, weights_cache=tmp_path / "flag", say=quiet)
    assert len(list((tmp_path / "flag").iterdir())) == 2
    assert_equal(pair.target, again.target)
    (tmp_path / "file").write_text("")
    said: list[str] = []
    load_pair(opened, weights_cache=tmp_path / "file" / "in", say=said.append)
    assert len(said) == 2  # one of each model
    assert said[0].startswith(f"Converted weights cannot be kept in {tmp_path / 'file' / 'in'}")
