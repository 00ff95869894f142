"""Checkpoints in Hugging Face layout come back as they were saved, split as the layout says."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf_files import tensors_of, write
from golden import assert_same, layout_on
from launch_types import Patch
from safetensors.numpy import load_file, save_file
from tiny_pair import write_pair

from fly_jax.models.architectures import Group, LlamaConfig, parameter_specs
from fly_jax.models.checkpoints.gguf_source import GgufSource
from fly_jax.models.checkpoints.hugging_face import HuggingFaceSource
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.source import identity
from fly_jax.models.checkpoints.write import save_hf
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


def split_with_index(folder: Path, num_files: int) -> None:
    """Turns `model.safetensors` into several files and their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        part = {name: tensors[name] for name in sorted(tensors)[number::num_files]}
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
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
    split_with_index(tmp_path, 3)
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


def test_heads_that_do_not_divide_load_replicated(tmp_path: Path) -> None:
    sizes = {"vocab_size": 27, "ffw_size": 9, "num_heads": 3, "num_kv_heads": 1}
    model = saved(tmp_path, dataclasses.replace(tiny(tied=False), **sizes))
    layout = layout_on("2x4")
    loaded = load_llama(tmp_path, layout=layout, dtype=jnp.bfloat16)
    assert_same(loaded, model, jnp.bfloat16)
    assert all(value.is_fully_replicated for value in loaded.parameters().values())
    fallbacks = layout.fallbacks(parameter_specs(model.config))
    assert sum(line.partition(": ")[0].count(",") + 1 for line in fallbacks) == 9


@pytest.mark.parametrize("stored", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_reads_each_stored_type(tmp_path: Path, stored: type) -> None:
    saved(tmp_path, tiny(tied=False))
    tensors = load_file(tmp_path / "model.safetensors")
    changed = {name: values.astype(stored) for name, values in tensors.items()}
    save_file(changed, tmp_path / "model.safetensors")
    found = load_llama(tmp_path).parameters()["unembedding"]
    np.testing.assert_array_equal(found, changed["lm_head.weight"].astype(np.float32).T)


def test_files_hold_the_tensors_of_transformers(tmp_path: Path) -> None:
    """Matrices [out, in], query heads one after the other."""
    parameters = saved(tmp_path, tiny(tied=False)).parameters()
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 9 * 3
    query = tensors["model.layers.2.self_attn.q_proj.weight"][6 * 5 : 6 * 6]
    output = tensors["model.layers.1.self_attn.o_proj.weight"][:, 6 * 5 : 6 * 6]
    for found, expected in (
        (query, parameters["query"][2, :, 5].T),
        (output, parameters["output"][1, 5].T),
        (tensors["model.layers.0.mlp.down_proj.weight"], parameters["down"][0].T),
        (tensors["lm_head.weight"], parameters["unembedding"].T),
        (tensors["model.embed_tokens.weight"], parameters["embedding"]),
    ):
        np.testing.assert_array_equal(found, expected)


def test_files_are_for_those_whom_the_umask_lets_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved(tmp_path, tiny(tied=False))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o640}


def test_tensors_that_are_not_parameters_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints store the rotary frequencies, tied ones sometimes an unembedding."""
    model = saved(tmp_path, tiny(tied=True))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.full(3, np.nan, np.float64)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(load_llama(tmp_path, dtype=jnp.bfloat16), model, jnp.bfloat16)


@pytest.mark.parametrize(
    ("source", "int8"), [(HuggingFaceSource, False), (HuggingFaceSource, True), (GgufSource, False)]
)
def test_no_more_than_a_layer_is_held_beside_the_model(
    tmp_path: Path, monkeypatch: Patch, source: type[HuggingFaceSource | GgufSource], int8: bool
) -> None:
    """benchmarks/load_memory.py measures the same in bytes of the process."""
    # Rows of 32 numbers, and ends of texts, are what GGUF files have.
    sizes = {"num_layers": 12, "embed_size": 32, "ffw_size": 64, "head_size": 8}
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
    gc.collect()
    gc.freeze()  # what other tests have left need not be looked through each time
    before = held_bytes()
    model = load_llama(path, int8=int8)
    gc.unfreeze()
    assert len(held) == 2 + 12
    whole = sum(array.nbytes for array in model.parameters().values())
    layer = 4 * sum(math.prod(spec.shape) for spec in Group("", 0).specs(config).values())
    assert max(held) <= whole + layer


def test_copies_are_the_same_and_anything_else_is_not(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
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
