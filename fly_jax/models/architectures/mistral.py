"""Mistral: Llama whose layers may all have a sliding window (version 0.1 has; later ones do not).

GGUF files call it llama, and those of version 0.1 may not say that it has a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fly_jax.models.architectures.architecture import Architecture, Fields


def _read(hf: Mapping[str, Any], num_layers: int) -> Fields:
    window = hf.get("sliding_window", 4096)
    if window is None:
        return {}
    return {"sliding_window": int(window), "windowed_layers": tuple(range(num_layers))}


MISTRAL = Architecture(
    name="mistral",
    class_name="MistralForCausalLM",
    read=_read,
    written=lambda config: {"sliding_window": config.sliding_window},
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
