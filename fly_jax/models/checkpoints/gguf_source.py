"""Weights of a GGUF file: which tensor is which parameter, dequantised matrix by matrix."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.gguf_file import GgufFile
from fly_jax.models.checkpoints.hugging_face import is_transposed, row_sharding, tensor_shape
from fly_jax.models.checkpoints.source import Group, groups
from fly_jax.models.config import LlamaConfig, RopeScaling
from fly_jax.models.llama import ParameterSpec
from fly_jax.models.rope import inverse_frequencies
from fly_jax.sharding.rules import Layout

_OUTER = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "unembedding": "output",
}
_LAYER = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later state their frequency scaling as factors; these made all that are known.
_LOW, _HIGH, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192


class GgufSource:
    """A GGUF file of a Llama; each process reads only the rows that its devices take."""

    int8 = False

    def __init__(self, file: GgufFile) -> None:
        """Checks the file without reading a weight.

        Raises:
          FlyJaxError: another architecture, a key or a tensor is missing, or a tensor has a shape
            that the metadata does not ask for.
        """
        self._file = file
        self.config = config_of(file)
        for group in groups(self.config):
            for name, spec in group.specs(self.config).items():
                tensor, shape = _tensor_name(group, name), tensor_shape(name, spec)
                if tensor not in file.tensors:
                    raise FlyJaxError(
                        f"{file.path} lacks the tensor {tensor}; its metadata asks for it: "
                        "download the file again, or convert the model anew."
                    )
                if file.shape(tensor) != shape:
                    raise FlyJaxError(
                        f"The tensor {tensor} in {file.path} has shape "
                        f"{list(file.shape(tensor))}; the metadata asks for {list(shape)}: "
                        "download the file again, or convert the model anew."
                    )

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """The group's tensors [out, in] in float32, split by rows."""
        found: dict[str, Array] = {}
        for name, spec in group.specs(self.config).items():
            tensor = _tensor_name(group, name)
            shape = self._file.shape(tensor)
            found[name] = jax.make_array_from_callback(
                shape,
                row_sharding(layout, spec, shape[0]),
                functools.partial(_part, self._file, tensor),
            )
        return found

    def arranged(self, name: str, stored: Array, spec: ParameterSpec) -> Array:
        """The tensor as [in, out], with heads as an axis of their own.

        GGUF keeps the two halves of a head's rotary pairs side by side, and Hugging Face one after
        the other.
        """
        if name in ("query", "key"):
            pairs = stored.reshape(-1, self.config.head_size // 2, 2, stored.shape[1])
            stored = pairs.swapaxes(1, 2).reshape(stored.shape)
        return (stored.T if is_transposed(name) else stored).reshape(spec.shape)

    def describe(self, group: Group, name: str) -> str:
        """The tensor and its file."""
        return f"The tensor {_tensor_name(group, name)} in {self._file.path}"


def config_of(file: GgufFile) -> LlamaConfig:
    """The configuration that the metadata describe.

    Raises:
      FlyJaxError: another architecture, a key is missing or of the wrong kind, or something that
        Llama does not have, such as biases.
    """
    try:
        return _config(file)
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        if isinstance(error, FlyJaxError):
            raise
        raise FlyJaxError(
            f"{file.path} has metadata of the wrong kind ({error}); download the file again, or "
            "convert the model anew."
        ) from error


def _config(file: GgufFile) -> LlamaConfig:
    if int(file.value("split.count", 1)) > 1:
        raise FlyJaxError(
            f"{file.path} is one of {file.value('split.count')} files of a model; fly_jax reads "
            "models in one file: merge them with llama-gguf-split."
        )
    architecture = file.needed("general.architecture")
    if architecture != "llama" or file.value("llama.expert_count", 0):
        kind = architecture if architecture != "llama" else "llama with experts"
        raise FlyJaxError(
            f"{file.path} holds a model of architecture '{kind}'; fly_jax runs Llama models: give "
            "the file of one."
        )

    def size(key: str) -> Any:
        return file.needed(f"llama.{key}")

    scaling = file.value("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise FlyJaxError(
            f"{file.path} asks for rotary scaling '{scaling}'; fly_jax knows none, and the factors "
            "of Llama 3.1: give a file with one of these."
        )
    heads, width = size("attention.head_count"), size("embedding_length")
    head_size = file.value("llama.attention.key_length", width // heads)
    rotated = file.value("llama.rope.dimension_count", head_size)
    biased = next((name for name in file.tensors if name.endswith(".bias")), None)
    if rotated != head_size or biased or file.value("llama.rope.scale_linear", 1.0) != 1.0:
        odd = f"the tensor {biased}" if biased else "a rotary embedding of its own"
        raise FlyJaxError(
            f"{file.path} has {odd}, which Llama has not; give the file of an original Llama."
        )
    names = file.value("tokenizer.ggml.tokens", ())
    config = LlamaConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": file.value("llama.vocab_size", len(names)),
            "hidden_size": width,
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": file.value("llama.attention.head_count_kv", heads),
            "head_dim": head_size,
            "max_position_embeddings": size("context_length"),
            "rope_theta": file.value("llama.rope.freq_base", 10_000.0),
            # The file has float32, and people wrote 1e-05.
            "rms_norm_eps": float(f"{size('attention.layer_norm_rms_epsilon'):.6g}"),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _ends(file),
        },
        str(file.path),
    )
    if _ROPE_FACTORS not in file.tensors:
        return config
    factors = file.rows(_ROPE_FACTORS, slice(None))
    made = RopeScaling(
        factor=float(factors.max()),
        low_frequency_factor=_LOW,
        high_frequency_factor=_HIGH,
        original_context=_ORIGINAL_CONTEXT,
    )
    scaled = dataclasses.replace(config, rope_scaling=made)
    plain = inverse_frequencies(config)
    if factors.shape != plain.shape or not np.allclose(
        inverse_frequencies(scaled), plain / factors, rtol=1e-3
    ):
        raise FlyJaxError(
            f"The tensor {_ROPE_FACTORS} in {file.path} has other factors than Llama 3.1 and 3.2; "
            "fly_jax knows these alone: give the safetensors checkpoint of the model."
        )
    return scaled


def _ends(file: GgufFile) -> list[int]:
    """Every token that ends a text: of a text, of a turn, of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.value(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def _tensor_name(group: Group, name: str) -> str:
    if group.layer is None:
        return f"{_OUTER[name]}.weight"
    return f"blk.{group.layer}.{_LAYER[name]}.weight"


def _part(file: GgufFile, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
    """What one device takes of a tensor."""
    return file.rows(tensor, index[0])[(slice(None), *index[1:])]
