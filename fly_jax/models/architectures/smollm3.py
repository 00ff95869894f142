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
        **written_windows(config),
    }


SMOLLM3 = Architecture(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    read=_read,
    written=_written,
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    gguf="smollm3",
    gguf_pairs=True,
)
