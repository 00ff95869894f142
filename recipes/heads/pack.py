r"""Packs a head that was trained here: int8, and no copy of its target's embedding.

    python recipes/heads/pack.py --head runs/curve/eagle3_2_0 --output drafters/mine \
        --verifier Qwen/Qwen2.5-Coder-1.5B-Instruct

Each output of a matrix has a scale, as `compressed-tensors` writes it, so a head in int8 decodes as
it would from the whole file.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp  # knows bfloat16, which files have
import numpy as np
from absl import app, flags
from safetensors.numpy import load_file, save_file

_HEAD = flags.DEFINE_string("head", None, "folder of the head", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "folder to write", required=True)
_VERIFIER = flags.DEFINE_string("verifier", None, "hub id of its target", required=True)

_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def main(_: list[str]) -> None:
    """Writes the folder."""
    head, output = Path(_HEAD.value), Path(_OUTPUT.value)
    packed: dict[str, np.ndarray] = {}
    for name, tensor in load_file(head / "model.safetensors").items():
        if name == "embed_tokens.weight":
            continue
        if tensor.ndim < 2:
            packed[name] = tensor
            continue
        wide = tensor.astype(jnp.float32)
        scale = np.maximum(np.abs(wide).max(axis=1, keepdims=True), 1e-12) / 127
        packed[name] = np.clip(np.rint(wide / scale), -127, 127).astype(np.int8)
        packed[f"{name}_scale"] = scale
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    config["speculators_config"]["verifier"]["name_or_path"] = _VERIFIER.value
    group = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": [],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    save_file(packed, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
