"""What `convert` writes loads under any mesh, and a killed conversion goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden import assert_same, layout_on
from launch_types import Patch
from refusals import assert_refused, sentence
from safetensors.numpy import load_file, save_file
from test_checkpoint import saved, split_with_index, tiny

from fly_jax.models.architectures import Group
from fly_jax.models.checkpoints.converted import read_record, stored_files, write_group
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.write import carry_tokenizer, convert


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "output"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in three files, with a tokenizer."""
    folder = tmp_path / "source"
    saved(folder, tiny(tied=False))
    split_with_index(folder, 3)
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


@pytest.mark.parametrize("mesh", [None, "2x4", "8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_loads_under_any_mesh(converted: dict[str, Path], dtype: str, mesh: str | None) -> None:
    layout = layout_on(mesh)
    original = load_llama(converted["source"], layout=layout, int8=dtype == "int8")
    loaded = load_llama(converted[dtype], layout=layout)
    assert_same(loaded, original)
    for name, values in original.parameters().items():
        assert loaded.parameters()[name].sharding.is_equivalent_to(values.sharding, values.ndim)


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
    assert len(list((output / "orbax").iterdir())) == 3 + 3
    assert_same(load_llama(output), load_llama(source, int8=True))


def test_another_conversion_is_not_mixed_in(source: Path, output: Path) -> None:
    convert(source, output, "int8")
    assert_refused("holds a conversion to int8", convert, source, output, "bfloat16")
    (source / "config.json").touch()
    assert_refused("from other weights", convert, source, output, "int8")
    for other in (source.parent, source / "config.json"):
        assert_refused("is no conversion", convert, source, other)


def test_weights_that_are_not_finite_are_not_converted(source: Path, output: Path) -> None:
    file = sorted(source.glob("*.safetensors"))[1]
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "proj" in name)
    tensors[name][3, 2] = np.nan
    save_file(tensors, file)
    text = sentence(convert, source, output, "int8")
    assert name in text
    assert str(file) in text


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
