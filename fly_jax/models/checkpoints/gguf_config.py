"""The configuration that a GGUF file's metadata describe."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.gguf_file import GgufFile
from fly_jax.models.config import GGUF_ARCHITECTURES, LlamaConfig, RopeScaling, config_of
from fly_jax.models.rope import inverse_frequencies

_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later state their frequency scaling as factors; these made all that are known.
_LOW, _HIGH, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
_CONTROL = 3  # the type of a control token
_END_NAMES = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")


def gguf_config(file: GgufFile) -> LlamaConfig:
    """The configuration that the metadata describe.

    Raises:
      FlyJaxError: a family that is not known, a key is missing or of the wrong kind, or something
        that the family does not have.
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
    family = str(file.needed("general.architecture"))
    if family not in GGUF_ARCHITECTURES or file.value(f"{family}.expert_count", 0):
        kind = f"{family} with experts" if family in GGUF_ARCHITECTURES else family
        raise FlyJaxError(
            f"{file.path} holds a model of architecture '{kind}'; fly_jax runs "
            f"{', '.join(GGUF_ARCHITECTURES)}: give the file of one."
        )

    def size(key: str) -> Any:
        return file.needed(f"{family}.{key}")

    def optional(key: str, default: object) -> Any:
        return file.value(f"{family}.{key}", default)

    scaling = optional("rope.scaling.type", "none")
    if scaling != "none":
        raise FlyJaxError(
            f"{file.path} asks for rotary scaling '{scaling}'; fly_jax knows none, and the factors "
            "of Llama 3.1: give a file with one of these."
        )
    heads, width = size("attention.head_count"), size("embedding_length")
    head_size = optional("attention.key_length", width // heads)
    rotated = optional("rope.dimension_count", head_size)
    if rotated != head_size or optional("rope.scale_linear", 1.0) != 1.0:
        raise FlyJaxError(
            f"{file.path} has a rotary embedding of its own, which the original models of this "
            "architecture do not have; give the file of one."
        )
    # llama.cpp has no name for Mistral.
    window = optional("attention.sliding_window", 0) or None
    model_type = GGUF_ARCHITECTURES[family].name
    if window is not None and model_type == "llama":
        model_type = "mistral"
    names = file.value("tokenizer.ggml.tokens", ())
    config = config_of(
        {
            "model_type": model_type,
            "sliding_window": window,
            "vocab_size": optional("vocab_size", len(names)),
            "hidden_size": width,
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": optional("attention.head_count_kv", heads),
            "head_dim": head_size,
            "max_position_embeddings": size("context_length"),
            "rope_theta": optional("rope.freq_base", 10_000.0),
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
    """Every token that ends a text: of a text, of a turn, of a message.

    Files name one of each kind, and a Qwen has two; llama.cpp, too, knows them by their text.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.value(f"tokenizer.ggml.{key}") for key in keys]
    names = file.value("tokenizer.ggml.tokens", ())
    kinds = file.value("tokenizer.ggml.token_type", ())
    found += [
        index
        for index, (name, kind) in enumerate(zip(names, kinds, strict=False))
        if kind == _CONTROL and name in _END_NAMES
    ]
    return list(dict.fromkeys(int(token) for token in found if token is not None))
