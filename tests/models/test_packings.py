"""Quantised checkpoints, FP8 and of integers, give the logits of what they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden import layout_on
from safetensors.numpy import load_file, save_file
from test_golden import uncached

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.write import convert

QUANTISED = Path(__file__).parents[1] / "fixtures" / "quantised"
KINDS = sorted(path.name for path in QUANTISED.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_golden_logits(kind: str) -> None:
    """Those of transformers with the matrices as the format's own code widens them."""
    stored = np.load(QUANTISED / kind / "golden.npz")
    found = uncached(load_llama(QUANTISED / kind, dtype=jnp.float32), stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], atol=1e-4)


def test_a_mesh_and_a_conversion_give_the_same_parameters(tmp_path: Path) -> None:
    alone = load_llama(QUANTISED / "awq", dtype=jnp.float32).parameters()
    split = load_llama(QUANTISED / "awq", dtype=jnp.float32, layout=layout_on("2x2")).parameters()
    convert(QUANTISED / "awq", tmp_path / "converted", "float32")
    again = load_llama(tmp_path / "converted", dtype=jnp.float32).parameters()
    for name, parameter in alone.items():
        np.testing.assert_array_equal(parameter, split[name])
        np.testing.assert_array_equal(parameter, again[name])
    assert "quantization_config" not in json.loads((tmp_path / "converted/config.json").read_text())


def test_requantised_to_int8() -> None:
    wide = load_llama(QUANTISED / "gptq", dtype=jnp.float32).parameters()
    rounded = load_llama(QUANTISED / "gptq", dtype=jnp.float32, int8=True).parameters()
    assert rounded["gate"].dtype == jnp.int8
    found = rounded["gate"] * rounded["gate_scale"][:, None]
    step = np.abs(wide["gate"]).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(found - wide["gate"]) <= 0.51 * step)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a kind with another `quantization_config` or other tensors."""

    def made(kind: str, said: object = None, **tensors: np.ndarray | None) -> Path:
        folder = shutil.copytree(QUANTISED / kind, tmp_path / "copy")
        fields = json.loads((folder / "config.json").read_text())
        if said is not None:
            (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": said}))
        stored = load_file(folder / "model.safetensors")
        for ending, value in tensors.items():
            name = f"model.layers.0.mlp.up_proj.{ending}"
            stored.pop(name)
            stored |= {} if value is None else {name: value}
        save_file(stored, folder / "model.safetensors")
        return folder

    return made


OTHER_WAYS: dict[str, object] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "gemv": {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"},
    "3": {"quant_method": "gptq", "bits": 3, "group_size": 16},
    "nvfp4-pack-quantized": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "tensor_group"}}},
    },
}  # fmt: skip


@pytest.mark.parametrize("named", OTHER_WAYS)
def test_other_ways_are_named_before_any_tensor(named: str, copy_of: Callable[..., Path]) -> None:
    with pytest.raises(FlyJaxError, match=rf"quantised in a way.*{named}.*give such"):
        open_weights(copy_of("awq", OTHER_WAYS[named]))


WRONG: dict[str, tuple[str, object]] = {
    "quant_method": ("in a way that fly_jax does not read", {"bits": 4}),
    "group_size": ("is not described as expected", {"quant_method": "awq", "bits": 4}),
    "zero group": (
        "a size of 0", {"quant_method": "awq", "bits": 4, "group_size": 0}
    ),
    "not a multiple": (
        "in groups of 48", {"quant_method": "awq", "bits": 4, "group_size": 48}
    ),
    "another group": (
        r"qzeros.* has shape \[2, 8\].* asks for \[4, 8\]",
        {"quant_method": "awq", "bits": 4, "group_size": 8},
    ),
    "a text": ("is not described as expected", "awq"),
    "another format": ("lacks the tensor .*q_proj.weight_packed", {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "strategy": "group", "group_size": 16}}},
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_descriptions(case: str, copy_of: Callable[..., Path]) -> None:
    message, said = WRONG[case]
    with pytest.raises(FlyJaxError, match=message):
        open_weights(copy_of("awq", said))


def test_parts_that_are_missing_or_damaged(copy_of: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FlyJaxError, match=r"lacks the tensor .*up_proj\.g_idx"):
        open_weights(copy_of("gptq", g_idx=None))
    shutil.rmtree(tmp_path / "copy")
    folder = copy_of("gptq", g_idx=np.full(32, 7, np.int32))
    with pytest.raises(FlyJaxError, match=r"up_proj.* holds NaN or infinite"):
        load_llama(folder)
