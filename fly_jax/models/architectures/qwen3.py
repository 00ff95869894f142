"""Qwen 3 without experts: Llama with norms on each head's queries and keys."""

from __future__ import annotations

from fly_jax.models.architectures.architecture import Architecture
from fly_jax.models.architectures.windows import read_upper_windows, written_windows

QWEN3 = Architecture(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    read=lambda hf, num_layers: {"head_norms": True, **read_upper_windows(hf, num_layers)},
    written=lambda config: {"attention_bias": False, **written_windows(config)},
    defaults={"head_dim": 128, "max_position_embeddings": 32_768},
    refused=("attention_bias",),
    gguf="qwen3",
)
