"""Llama 2 and 3, SmolLM 1 and 2, DeepSeek-R1-Distill-Llama."""

from __future__ import annotations

from fly_jax.models.architectures.architecture import Architecture

LLAMA = Architecture(
    name="llama",
    class_name="LlamaForCausalLM",
    written=lambda _: {"attention_bias": False, "mlp_bias": False},
    refused=("attention_bias", "mlp_bias"),
    gguf="llama",
    gguf_pairs=True,
)
