"""What tpu-inference 0.32.0 passes over in the files of an EAGLE-3 head.

Its loader knows the head's layer as "midlayer" alone, and speculators writes "layers.0". And its
Llama gives the features of three layers of its own choice, whichever ones `config.json` names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fly_jax.integrations.vllm_tpu.hooks import hook


@contextlib.contextmanager
def head_as_written(fields: object) -> Iterator[None]:
    """Within it the engine loads a layer of either name, and reads the layers that are named.

    Args:
      fields: a head's `config.json`, as vLLM has it, or that of any other draft, or None.
    """
    llama: Any = hook("models.jax.llama3:LlamaModel")
    loader: Any = hook("models.jax.llama_eagle3:EagleLlama3WeightLoader")
    choose, load = llama.get_eagle3_aux_hidden_state_layers, loader.load_weights
    # As in vLLM on GPUs: the layers whose inputs are features.
    named = getattr(fields, "eagle_aux_hidden_state_layer_ids", None)

    def load_either(self: Any, model: Any, mappings: dict[str, str]) -> None:
        other = {
            name.replace("midlayer", "layers.*"): place.replace("layers.0", "layers.*")
            for name, place in mappings.items()
        }
        load(self, model, mappings | other)

    loader.load_weights = load_either
    if named:
        llama.get_eagle3_aux_hidden_state_layers = lambda _: tuple(named)
    try:
        yield
    finally:
        llama.get_eagle3_aux_hidden_state_layers, loader.load_weights = choose, load
