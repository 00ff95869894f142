"""Checkpoints that have more than their family, or claim more than they hold, are refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write
from golden import GOLDEN
from safetensors.numpy import load_file, save_file

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import config_of
from fly_jax.models.checkpoints.gguf_file import open_gguf
from fly_jax.models.checkpoints.load import open_weights

FIELDS = json.loads((GOLDEN / "llama2" / "config.json").read_text())
LLAMA3 = json.loads((GOLDEN / "llama31" / "config.json").read_text())["rope_parameters"]
OLD = {name: value for name, value in FIELDS.items() if name != "rope_parameters"}

ROPES: dict[str, dict[str, Any]] = {
    "factor=4": {**OLD, "rope_scaling": {"factor": 4.0}},
    "full_attention": {**OLD, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "rope_scaling": {**FIELDS, "rope_parameters": LLAMA3, "rope_scaling": {"type": "linear",
                     "factor": 2.0}},
    "partial_rotary_factor=0.5": {**FIELDS, "partial_rotary_factor": 0.5},
    "short_factor": {**OLD, "rope_scaling": {**LLAMA3, "short_factor": [1.0]}},
}  # fmt: skip


@pytest.mark.parametrize("named", ROPES)
def test_rotary_fields_that_are_not_understood(named: str) -> None:
    with pytest.raises(FlyJaxError, match=f"{named}.*does not understand.*give such"):
        config_of(ROPES[named])


def test_rotary_fields_without_effect() -> None:
    plain = config_of(FIELDS)
    whole = {**FIELDS["rope_parameters"], "partial_rotary_factor": 1.0}
    assert config_of({**FIELDS, "rope_parameters": whole}) == plain
    assert config_of({**FIELDS, "rope_scaling": None, "partial_rotary_factor": 1}) == plain


@pytest.fixture
def with_tensor(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a folder with one more tensor of its first layer."""

    def made(name: str, value: np.ndarray) -> Path:
        folder = shutil.copytree(GOLDEN / "llama2", tmp_path / "copy", dirs_exist_ok=True)
        stored = load_file(folder / "model.safetensors")
        save_file({**stored, f"model.layers.0.{name}": value}, folder / "model.safetensors")
        return folder

    return made


@pytest.mark.parametrize("name", ["self_attn.o_proj.bias", "self_attn.q_norm.weight"])
def test_tensors_beyond_the_family(name: str, with_tensor: Callable[..., Path]) -> None:
    with pytest.raises(FlyJaxError, match=rf"{name}, which models of type 'llama' do not have"):
        open_weights(with_tensor(name, np.ones(8, np.float32)))


def test_tensors_without_effect(with_tensor: Callable[..., Path]) -> None:
    """Rotary tables of old checkpoints, and the biases of zero that GPTQ's tools write."""
    open_weights(with_tensor("self_attn.rotary_emb.inv_freq", np.ones(4, np.float32)))
    open_weights(with_tensor("self_attn.o_proj.bias", np.zeros(8, np.float16)))


def test_a_layer_beyond_the_configuration(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama2", tmp_path / "copy")
    fields = {**FIELDS, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(FlyJaxError, match=r"model\.layers\.1\..*do not have"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("layers", "message"), [(9_000, "num_layers=9000; there"), (400_000, "400000")]
)
def test_more_layers_than_tensors(layers: int, message: str, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama2", tmp_path / "copy")
    (folder / "config.json").write_text(json.dumps({**FIELDS, "num_hidden_layers": layers}))
    with pytest.raises(FlyJaxError, match=message):
        open_weights(folder)


def _header(num_tensors: int, num_values: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + rest


KEY = struct.pack("<Q", 1) + b"a"
CLAIMS = {
    "a list of numbers": _header(0, 1, KEY + struct.pack("<IIQ", 9, 4, 4_000_000) + bytes(70)),
    "a list of texts": _header(0, 1, KEY + struct.pack("<IIQ", 9, 8, 4_000_000) + bytes(70)),
    "a list of lists": _header(0, 1, KEY + struct.pack("<IIQ", 9, 9, 4_000_000) + bytes(70)),
    "a text": _header(0, 1, KEY + struct.pack("<IQ", 8, 2**63) + bytes(70)),
    "a key": _header(0, 1, struct.pack("<Q", 2**64 - 1) + bytes(70)),
    "values": _header(0, 2**62, bytes(70)),
    "tensors": _header(2**62, 0, bytes(70)),
    "sizes of a tensor": _header(1, 0, KEY + struct.pack("<I", 2**31) + bytes(70)),
    "nothing": _header(0, 0)[:12],
}


@pytest.mark.parametrize("case", CLAIMS)
def test_a_gguf_file_claims_more_than_it_holds(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the library is asked, which would make what is claimed."""
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: pytest.fail("it was asked"))
    path = tmp_path / "model.gguf"
    path.write_bytes(CLAIMS[case])
    with pytest.raises(FlyJaxError, match="cut off or damaged"):
        open_gguf(path)


def test_a_factor_without_a_type_is_linear_in_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, {}, tokenizer=lambda writer: writer.add_float32("llama.rope.scaling.factor", 4.0))
    with pytest.raises(FlyJaxError, match="rotary scaling 'linear'"):
        open_weights(path)
