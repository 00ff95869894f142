"""Qwen 2 and 2.5, DeepSeek-R1-Distill-Qwen: Llama with biases on queries, keys and values."""

from __future__ import annotations

from fly_jax.models.architectures.architecture import Architecture
from fly_jax.models.architectures.windows import read_upper_windows, written_windows

QWEN2 = Architecture(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    read=lambda hf, num_layers: {"attention_biases": True, **read_upper_windows(hf, num_layers)},
    written=written_windows,
    defaults={"max_position_embeddings": 32_768},
    gguf="qwen2",
)
