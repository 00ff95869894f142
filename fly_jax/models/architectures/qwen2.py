"""Qwen 2 and 2.5, DeepSeek-R1-Distill-Qwen: Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fly_jax.models.architectures.architecture import Architecture, Fields
from fly_jax.models.architectures.windows import read_windows, written_windows


def _read(hf: Mapping[str, Any], num_layers: int) -> Fields:
    first = int(hf.get("max_window_layers", 28))
    windows = read_windows(hf, num_layers, lambda layer: layer >= first)
    return {"attention_biases": True, **windows}


QWEN2 = Architecture(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    read=_read,
    written=written_windows,
    defaults={"max_position_embeddings": 32_768},
    gguf="qwen2",
)
