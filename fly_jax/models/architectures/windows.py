"""Layers that see only the newest tokens, as Qwen and SmolLM3 write them down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fly_jax.models.architectures.architecture import Fields
from fly_jax.models.config import LlamaConfig

_WINDOWED, _FULL = "sliding_attention", "full_attention"


def read_windows(
    hf: Mapping[str, Any], num_layers: int, is_windowed: Callable[[int], bool]
) -> Fields:
    """The window and its layers.

    Args:
      hf: fields of a `config.json`.
      num_layers: of the model.
      is_windowed: whether a layer has the window where the file does not list the layers.
    """
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    if window is None:
        return {}
    kinds = hf.get("layer_types")
    layers = range(num_layers)
    windowed = (kinds[one] == _WINDOWED if kinds else is_windowed(one) for one in layers)
    found = tuple(one for one, has in zip(layers, windowed, strict=True) if has)
    return {"sliding_window": int(window), "windowed_layers": found} if found else {}


def read_upper_windows(hf: Mapping[str, Any], num_layers: int) -> Fields:
    """A Qwen's: where the file does not list the layers, those from `max_window_layers` on."""
    first = int(hf.get("max_window_layers", 28))
    return read_windows(hf, num_layers, lambda layer: layer >= first)


def written_windows(config: LlamaConfig) -> Fields:
    """The fields that `read_windows` reads."""
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": [
            _WINDOWED if layer in config.windowed_layers else _FULL
            for layer in range(config.num_layers)
        ],
    }
