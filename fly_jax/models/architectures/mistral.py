"""Mistral: Llama whose layers may all have a sliding window (version 0.1 has; later ones do not).

GGUF files call it llama.
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
)
