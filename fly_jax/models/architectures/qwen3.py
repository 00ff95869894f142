"""Qwen 3 without experts: Llama with norms on each head's queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fly_jax.models.architectures.architecture import Architecture, Fields
from fly_jax.models.architectures.windows import read_windows, written_windows


def _read(hf: Mapping[str, Any], num_layers: int) -> Fields:
    first = int(hf.get("max_window_layers", 28))
    windows = read_windows(hf, num_layers, lambda layer: layer >= first)
    return {"head_norms": True, **windows}


QWEN3 = Architecture(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    read=_read,
    written=lambda config: {"attention_bias": False, **written_windows(config)},
    defaults={"head_dim": 128, "max_position_embeddings": 32_768},
    refused=("attention_bias",),
    gguf="qwen3",
)
