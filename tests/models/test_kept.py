"""Converted weights: what is mapped is what was converted, and only from a file that is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf_files import CONFIG, tensors_of, write
from golden import assert_same
from launch_types import Patch
from refusals import assert_refused
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


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def quiet(sentence: str) -> None:
    raise AssertionError(sentence)


def unstacked(path: Path, where: Path | None, dtype: str = "float32", **given: Any) -> Llama:
    given = {"say": quiet, "weights_cache": where or "off"} | given
    return load_llama(path, dtype=dtype, unstacked=True, **given)


@pytest.mark.parametrize(
    ("dtype", "int8", "cached_bytes"), [*((*one, 0) for one in TYPES), ("float32", False, 2**30)]
)
def test_converted_mapped_and_read_by_groups_are_the_same(
    checkpoint: Path, where: Path, monkeypatch: Patch, dtype: str, int8: bool, cached_bytes: int
) -> None:
    """Of large models, and of one that is small for a CPU's caches."""
    monkeypatch.setattr(llama, "_CACHED_BYTES", cached_bytes)
    types = {"dtype": dtype, "int8": int8}
    in_memory = unstacked(checkpoint, None, **types)
    assert in_memory.is_unstacked
    assert_same(in_memory.stacked(), load_llama(checkpoint, **types))
    for _ in range(2):  # made, and mapped
        assert_same(unstacked(checkpoint, where, **types), in_memory)
        stacked = load_llama(checkpoint, **types, weights_cache=where, say=quiet)
        assert_same(stacked, in_memory.stacked())
    assert [file.suffix for file in where.iterdir()] == [".safetensors"]


def test_a_file_of_safetensors_is_mapped_and_not_copied(checkpoint: Path, where: Path) -> None:
    model, source = unstacked(checkpoint, where), open_weights(checkpoint)
    assert load._has_rows(source)
    found = load._Kept(source, np.dtype("float32"), int8=False)
    assert found.map(checkpoint, where, quiet)
    layer = groups(source.config)[-1]
    placed = found.read(layer, None)["gate"]
    assert placed.unsafe_buffer_pointer() == found.tensor(layer, "gate").ctypes.data
    (file,) = where.iterdir()
    up = load_file(file)["layer_001.up"]
    np.testing.assert_array_equal(up, model.stacked().parameters()["up"][1].T)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-1],
    "too long": lambda data: data + b"0",
    "empty": lambda data: b"",
    "half written": lambda data: data[:-5000] + bytes(4100) + data[-900:],
    "one bit": lambda data: data[:-300_000] + bytes([data[-300_000] ^ 1]) + data[-299_999:],
    "another header": lambda data: data[:100] + b"!" + data[101:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(checkpoint: Path, where: Path, damage: str) -> None:
    model, said = unstacked(checkpoint, where), list[str]()
    (file,) = where.iterdir()
    whole = file.read_bytes()
    file.unlink()  # the model keeps what it has mapped
    file.write_bytes(DAMAGES[damage](whole))
    assert_same(unstacked(checkpoint, where, say=said.append), model)
    assert said == [f"The converted weights in {file} are damaged; they are made anew."]
    assert file.read_bytes() == whole
    assert_same(unstacked(checkpoint, where), model)


def test_a_checkpoint_that_changed_is_another_one(checkpoint: Path, where: Path) -> None:
    unstacked(checkpoint, where)
    weights = checkpoint if checkpoint.is_file() else checkpoint / "model.safetensors"
    at = weights.stat().st_mtime_ns
    os.utime(weights, ns=(at, at + 1))
    for dtype, int8 in (TYPES[0], *TYPES):
        unstacked(checkpoint, where, dtype, int8=int8)
    assert len(list(where.iterdir())) == 1 + len(TYPES)


def test_what_was_not_read_longest_goes(checkpoint: Path, where: Path, monkeypatch: Patch) -> None:
    """Of what is kept: the folder may have other files, which are their owner's."""
    for dtype in ("float32", "bfloat16"):
        unstacked(checkpoint, where, dtype)
    larger, smaller = sorted(where.iterdir(), key=lambda file: -file.stat().st_size)
    os.utime(larger, (1e9, 1e9))
    os.utime(smaller, (2e9, 2e9))
    unstacked(checkpoint, where)  # reads the larger one
    assert larger.stat().st_atime > 1e9
    os.utime(smaller, (1e9, 1e9))
    monkeypatch.setattr(load, "_MOST_BYTES", larger.stat().st_size + smaller.stat().st_size)
    others = [where / "model.gguf", where / "folder"]
    others[0].write_bytes(b"GGUF" * larger.stat().st_size)
    others[1].mkdir()
    for other in others:
        os.utime(other, (1, 1))
    unstacked(checkpoint, where, int8=True)
    assert {larger, *others} <= {*where.iterdir()}
    assert smaller not in where.iterdir()


@pytest.mark.parametrize("is_full", [False, True])
def test_where_they_have_no_room_the_weights_are_in_memory(
    checkpoint: Path, where: Path, monkeypatch: Patch, is_full: bool
) -> None:
    """Whether too few bytes may be kept, or the disk has none."""
    said: list[str] = []

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "pwrite", full) if is_full else (load, "_MOST_BYTES", 1000)))
        model = unstacked(checkpoint, where, say=said.append)
    assert_same(model, unstacked(checkpoint, None))
    (sentence,) = said
    if is_full:
        refused = f"The converted weights are not kept in {where} (No space left on device); "
        assert sentence == refused + "make room, or give --weights_cache another folder, or off."
    else:
        assert "are not kept: at most" in sentence
    assert not list(where.iterdir())


@pytest.mark.parametrize("is_kept", [True, False])
def test_weights_that_are_not_finite_are_named(where: Path, model: Llama, is_kept: bool) -> None:
    tensors = tensors_of(model)
    tensors["blk.1.ffn_up.weight"] = np.full_like(tensors["blk.1.ffn_up.weight"], np.inf)
    path = write(where.with_name("model.gguf"), tensors)
    with pytest.raises(FlyJaxError, match=r"blk\.1\.ffn_up\.weight in .* holds NaN or infinite"):
        unstacked(path, where if is_kept else None)
    assert not list(where.glob("*"))


def test_a_pair_is_kept_where_the_flag_says(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLY_JAX_WEIGHTS_CACHE", str(tmp_path / "variable"))
    write_pair(tmp_path)
    opened = open_pair(tmp_path / "target", tmp_path / "draft")
    load_pair(opened)
    assert_refused("drafts of its own", load_pair, opened, tmp_path / "draft")
    assert not (tmp_path / "variable").exists()
    pair = load_pair(opened, weights_cache=None, say=quiet)
    assert len(list((tmp_path / "variable").iterdir())) == 2
    again = load_pair(opened, weights_cache=tmp_path / "flag", say=quiet)
    assert len(list((tmp_path / "flag").iterdir())) == 2
    assert_same(pair.target, again.target)
    (tmp_path / "file").write_text("")
    said, nowhere = list[str](), tmp_path / "file" / "in"
    load_pair(opened, weights_cache=nowhere, say=said.append)
    assert len(said) == 2  # one of each model
    assert said[0].startswith(f"Converted weights cannot be kept in {nowhere}")
