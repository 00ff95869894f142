"""Checkpoints come back as they were saved, and what `convert` writes as it was converted.

Under any mesh, split as the layout says; a killed conversion goes on where it stopped. What is
mapped is what was converted, and only from a file that is whole.
"""

import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf_files import CONFIG, tensors_of, write
from golden import GOLDEN, assert_same, layout_on
from launch_types import Folders, Patch
from refusals import assert_refused, sentence
from safetensors.numpy import load_file, save_file

from fly_jax import FlyJaxError, load_pair, open_pair
from fly_jax.models import llama
from fly_jax.models.architectures import Group, LlamaConfig, groups, parameter_specs
from fly_jax.models.checkpoints import load
from fly_jax.models.checkpoints.converted import read_record, stored_files, write_group
from fly_jax.models.checkpoints.gguf_source import GgufSource
from fly_jax.models.checkpoints.hugging_face import HuggingFaceSource
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.source import identity
from fly_jax.models.checkpoints.write import carry_tokenizer, convert, save_hf
from fly_jax.models.llama import Llama


def tiny(*, tied: bool) -> LlamaConfig:
    """Dimensions all differ, so that no two can be mixed up."""
    return LlamaConfig(
        vocab_size=56, embed_size=20, ffw_size=48, num_layers=3, num_heads=8, num_kv_heads=4,
        head_size=6, max_context=64, tied_embeddings=tied,
    )  # fmt: skip


def saved(folder: Path, config: LlamaConfig) -> Llama:
    """A random Llama in bfloat16, written into the folder. NumPy makes it: nothing compiles."""
    random = np.random.default_rng(7)
    parameters = {
        name: jnp.asarray(random.normal(size=spec.shape).astype(ml_dtypes.bfloat16))
        for name, spec in parameter_specs(config).items()
    }
    model = Llama(config, parameters)
    save_hf(model, folder)
    return model


@pytest.mark.parametrize(("tied", "dtype"), [(False, jnp.float32), (True, jnp.bfloat16)])
def test_loads_what_was_saved(tmp_path: Path, tied: bool, dtype: jnp.dtype) -> None:
    model = saved(tmp_path, tiny(tied=tied))
    loaded = load_llama(tmp_path, dtype=dtype)
    assert_same(loaded, model, dtype)
    assert loaded.config == model.config == open_weights(tmp_path).config
    assert ("unembedding" in loaded.parameters()) is not tied
    for parameter in loaded.parameters().values():
        assert parameter.devices() == {jax.devices()[0]}


LAYOUTS = ["1x1 tensor", "2x4 tensor", "8 tensor", "2x2x2 tensor_long", "2x4 replicated"]
# What lies on a device of the second layout, which guards against one that splits nothing.
SPLIT = {"query": (3, 20, 1, 6), "key": (3, 20, 2, 6), "output": (3, 1, 6, 20)}
SPLIT |= {"embedding": (7, 20), "down": (3, 6, 20), "unembedding": (20, 7), "mlp_norm": (3, 20)}


@pytest.mark.parametrize("mesh_and_rules", LAYOUTS)
def test_loads_straight_into_its_layout(tmp_path: Path, mesh_and_rules: str) -> None:
    model = saved(tmp_path, tiny(tied=False))
    layout = layout_on(*mesh_and_rules.split())
    loaded = load_llama(tmp_path, layout=layout, dtype=jnp.bfloat16)
    assert loaded.layout == layout
    assert_same(loaded, model, jnp.bfloat16)
    for name, spec in parameter_specs(model.config).items():
        wanted = layout.sharding(spec.axes, spec.shape)
        parameter = loaded.parameters()[name]
        assert parameter.sharding.is_equivalent_to(wanted, parameter.ndim), name
        (shape,) = {shard.data.shape for shard in parameter.addressable_shards}
        assert shape == wanted.shard_shape(spec.shape), name
        assert mesh_and_rules != "2x4 tensor" or shape == SPLIT.get(name, shape), name


@pytest.mark.parametrize("stored", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_reads_each_stored_type(tmp_path: Path, stored: type) -> None:
    saved(tmp_path, tiny(tied=False))
    tensors = load_file(tmp_path / "model.safetensors")
    changed = {name: values.astype(stored) for name, values in tensors.items()}
    save_file(changed, tmp_path / "model.safetensors")
    found = load_llama(tmp_path).parameters()["unembedding"]
    np.testing.assert_array_equal(found, changed["lm_head.weight"].astype(np.float32).T)


def test_files_are_for_those_whom_the_umask_lets_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved(tmp_path, tiny(tied=False))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("source", "int8"), [(HuggingFaceSource, False), (HuggingFaceSource, True), (GgufSource, False)]
)
def test_no_more_than_a_layer_is_held_beside_the_model(
    tmp_path: Path, monkeypatch: Patch, source: type[HuggingFaceSource | GgufSource], int8: bool
) -> None:
    """benchmarks/load_memory.py measures the same in bytes of the process."""
    # Rows of 32 numbers, and ends of texts, are what GGUF files have.
    sizes = {"num_layers": 6, "embed_size": 32, "ffw_size": 64, "head_size": 8}
    config = dataclasses.replace(tiny(tied=True), **sizes, bos_token_id=1, eos_token_ids=(2,))
    path, tensors = tmp_path, tensors_of(saved(tmp_path, config))
    if source is GgufSource:
        path = write(tmp_path / "model.gguf", tensors, "Q8_0", config=config)
    original, held = source.read, []

    def held_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def read(self: Any, group: Group, layout: None) -> dict[str, jax.Array]:
        arrays = original(self, group, layout)
        held.append(held_bytes() - before)
        return arrays

    monkeypatch.setattr(source, "read", read)
    gc.freeze()  # what other tests have left need not be looked through each time
    before = held_bytes()
    model = load_llama(path, int8=int8)
    gc.unfreeze()
    assert len(held) == 2 + 6
    whole = sum(array.nbytes for array in model.parameters().values())
    layer = 4 * sum(math.prod(spec.shape) for spec in Group("", 0).specs(config).values())
    assert max(held) <= whole + layer


def test_copies_are_the_same_and_anything_else_is_not(tiny_pair: Folders, tmp_path: Path) -> None:
    target, draft = tiny_pair
    copy, known = shutil.copytree(target, tmp_path / "copy"), identity(target)
    assert identity(draft) != known  # of the same shapes, names and sizes
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    assert identity(copy) != known
    weights.write_bytes(data)
    assert identity(copy) == known
    (copy / "config.json").write_text("{}")
    assert identity(copy) != known


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "output"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in several files, with a tokenizer."""
    folder = shutil.copytree(GOLDEN / "llama3_sharded", tmp_path / "source")
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source and what it becomes, made once for the tests that only read."""
    folder = tmp_path_factory.mktemp("converted")
    saved(folder / "source", tiny(tied=False))
    for dtype in ("bfloat16", "int8"):
        convert(folder / "source", folder / dtype, dtype)
    return {name: folder / name for name in ("source", "bfloat16", "int8")}


@pytest.mark.parametrize(
    ("dtype", "mesh"), [("bfloat16", None), ("bfloat16", "2x4"), ("int8", "8"), ("int8", "2x4")]
)
def test_loads_under_any_mesh(
    converted: dict[str, Path], dtype: str, mesh: str | None, monkeypatch: Patch
) -> None:
    if mesh == "2x4":  # with heads in front of their inputs, as in a TPU's memory
        monkeypatch.setattr(llama, "_platform_of", lambda _: "tpu")
        monkeypatch.setattr(llama, "_LANES", 1)
    layout = layout_on(mesh)
    original = load_llama(converted["source"], layout=layout, int8=dtype == "int8")
    loaded = load_llama(converted[dtype], layout=layout)
    assert_same(loaded, original)
    for name, values in original.parameters().items():
        assert loaded.parameters()[name].format == values.format
    order = original.parameters()["query"].format.layout.major_to_minor
    assert order == ((0, 2, 1, 3) if mesh == "2x4" else (0, 1, 2, 3))


def test_it_is_quantised_as_it_loads_or_again(converted: dict[str, Path], tmp_path: Path) -> None:
    assert_same(load_llama(converted["bfloat16"], int8=True), load_llama(converted["int8"]))
    convert(converted["bfloat16"], tmp_path / "again", "int8")
    assert_same(load_llama(tmp_path / "again"), load_llama(converted["int8"]))
    assert_refused("is int8 already", convert, converted["int8"], tmp_path / "third")


def test_what_is_carried_over(source: Path, output: Path, tmp_path: Path) -> None:
    convert(source, output, "float32")
    assert (output / "tokenizer.model").read_bytes() == b"pieces"
    assert not list(output.glob("*.safetensors*"))
    assert open_weights(output).config.eos_token_ids == (2, 7)
    assert_same(load_llama(output), load_llama(source))
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    convert(source, output, "float32")  # is finished: nothing is written again
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    other = tmp_path / "other"
    saved(other, tiny(tied=False))
    carry_tokenizer(output, open_weights(output), other)  # alone
    assert (other / "tokenizer.model").read_bytes() == b"pieces"
    open_weights(other)  # is no conversion


TEMPORARY = ".orbax-checkpoint-tmp"
# Ends in the middle of a layer.
KILLED = """
import os, pathlib, signal, sys
from fly_jax.models.checkpoints import converted
from fly_jax.models.checkpoints.write import convert
write = converted.write_group
def killed(folder, group, parts):
    if group.layer == 1:
        (folder / "orbax" / "layer_001.orbax-checkpoint-tmp").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, group, parts)
converted.write_group = killed
convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), "int8")
"""


def test_a_killed_conversion_goes_on_where_it_stopped(source: Path, output: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(output)]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    assert process.returncode == -signal.SIGKILL
    assert_refused("was not finished", open_weights, output)
    groups = [path for path in (output / "orbax").iterdir() if path.suffix != TEMPORARY]
    before = {path: path.stat().st_mtime_ns for path in groups}
    assert len(before) == 4
    time.sleep(0.01)
    convert(source, output, "int8")
    assert {path: path.stat().st_mtime_ns for path in groups} == before
    assert len(list((output / "orbax").iterdir())) == 3 + 2
    assert_same(load_llama(output), load_llama(source, int8=True))


def test_another_conversion_is_not_mixed_in(source: Path, output: Path) -> None:
    convert(source, output, "int8")
    assert_refused("holds a conversion to int8", convert, source, output, "bfloat16")
    (source / "config.json").touch()
    assert_refused("from other weights", convert, source, output, "int8")
    for other in (source.parent, source / "config.json"):
        assert_refused("is no conversion", convert, source, other)


def test_no_room(source: Path, output: Path, monkeypatch: Patch) -> None:
    full = shutil.disk_usage(source)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert_refused(r"has room for 0\.0", convert, source, output)


@pytest.fixture
def folder(converted: dict[str, Path], output: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(converted["int8"], output)


@pytest.mark.parametrize("what", ["missing", "truncated"])
def test_a_damaged_file_is_named(converted: dict[str, Path], folder: Path, what: str) -> None:
    file = max((folder / "orbax" / "layer_002").rglob("*"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    file.unlink() if what == "missing" else file.write_bytes(content[:-1])
    text = sentence(open_weights, folder)
    assert sentence(convert, converted["source"], folder, "int8") == text
    assert str(file) in text
    assert ("does not exist" if what == "missing" else f"{len(content)}") in text


def test_a_checkpoint_that_orbax_cannot_read(folder: Path) -> None:
    layer = folder / "orbax" / "layer_001"
    (description,) = layer.rglob("_METADATA")
    description.write_bytes(b"?" * description.stat().st_size)
    assert f"{layer} is damaged" in sentence(load_llama, folder)


def test_a_scale_that_is_not_finite(folder: Path) -> None:
    group, layer = Group("layer_001", 1), folder / "orbax" / "layer_001"
    parts = {
        name: jnp.full(spec.shape, jnp.nan if name == "up_scale" else 1, spec.dtype or jnp.float32)
        for name, spec in group.specs(open_weights(folder).config, int8=True).items()
    }
    shutil.rmtree(layer)
    write_group(folder, group, parts)
    dataclasses.replace(read_record(folder), files=stored_files(folder)).write(folder)
    assert f"The array up_scale in {layer} holds NaN" in sentence(load_llama, folder)


def test_a_config_of_another_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    text = sentence(open_weights, folder)
    assert f"The parameter gate in {folder / 'orbax'} is [3, 20, 48]" in text
    assert "asks for [3, 20, 24]" in text


@pytest.mark.parametrize("content", ["", "[]", '{"dtype": 1}'])
def test_a_damaged_record(folder: Path, content: str) -> None:
    (folder / "conversion.json").write_text(content)
    assert f"{folder / 'conversion.json'} is damaged" in sentence(open_weights, folder)


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
    for one in (llama, load):  # int8 for one type, uint8 for the other
        monkeypatch.setattr(one, "multiplies_unsigned", lambda: dtype == "bfloat16")
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
    "cut off": lambda data: data[:-1], "too long": lambda data: data + b"0",
    "empty": lambda data: b"",
    "half written": lambda data: data[:-5000] + bytes(4100) + data[-900:],
    "one bit": lambda data: data[:-300_000] + bytes([data[-300_000] ^ 1]) + data[-299_999:],
    "another header": lambda data: data[:100] + b"!" + data[101:],
}  # fmt: skip


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


def test_weights_that_are_not_finite_are_not_kept(where: Path, model: Llama) -> None:
    tensors = tensors_of(model)
    tensors["blk.1.ffn_up.weight"] = np.full_like(tensors["blk.1.ffn_up.weight"], np.inf)
    path = write(where.with_name("model.gguf"), tensors)
    with pytest.raises(FlyJaxError, match=r"blk\.1\.ffn_up\.weight in .* holds NaN or infinite"):
        unstacked(path, where)
    assert not list(where.glob("*"))


def test_a_pair_is_kept_where_the_flag_says(
    tiny_pair: Folders, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FLY_JAX_WEIGHTS_CACHE", str(tmp_path / "variable"))
    opened = open_pair(*tiny_pair)
    load_pair(opened)
    assert_refused("drafts of its own", load_pair, opened, tiny_pair[1])
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
