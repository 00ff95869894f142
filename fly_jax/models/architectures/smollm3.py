"""SmolLM3: Llama in which some layers, by default every fourth, know nothing of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fly_jax.models.architectures.architecture import Architecture, Fields
from fly_jax.models.architectures.windows import read_windows, written_windows
from fly_jax.models.config import LlamaConfig


def _read(hf: Mapping[str, Any], num_layers: int) -> Fields:
    layers = range(num_layers)
    interval = int(hf.get("no_rope_layer_interval", 4))
    rotated = hf.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
    unrotated = tuple(layer for layer in layers if not rotated[layer])
    return {
        "unrotated_layers": unrotated,
        **read_windows(hf, num_layers, lambda layer: layer in unrotated),
    }


def _written(config: LlamaConfig) -> Fields:
    layers = range(config.num_layers)
    return {
        "no_rope_layers": [int(layer not in config.unrotated_layers) for layer in layers],
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": None,  # transformers' default is a token that a small vocabulary lacks
        **written_windows(config),
    }


SMOLLM3 = Architecture(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    read=_read,
    written=_written,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    refused=("attention_bias", "mlp_bias"),
    gguf="smollm3",
    gguf_pairs=True,
)
