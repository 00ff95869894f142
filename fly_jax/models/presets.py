"""The published Llamas by name."""

from __future__ import annotations

import dataclasses

from fly_jax.errors import FlyJaxError
from fly_jax.models.config import LlamaConfig, RopeScaling

# Llama 2 paper, table 1, and the checkpoints' config.json.
_LLAMA_2_7B = LlamaConfig(
    vocab_size=32_000,
    embed_size=4096,
    ffw_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_size=128,
    max_context=4096,
)
_LLAMA_2_70B = dataclasses.replace(
    _LLAMA_2_7B, embed_size=8192, ffw_size=28_672, num_layers=80, num_heads=64, num_kv_heads=8
)

# "The Llama 3 Herd of Models", table 3. The ids are those of the instruct checkpoints:
# <|end_of_text|>, <|eom_id|> (3.1 and later) and <|eot_id|>.
_LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    embed_size=4096,
    ffw_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    max_context=8192,
    rope_theta=500_000.0,
    bos_token_id=128_000,
    eos_token_ids=(128_001, 128_009),
)
_LLAMA_3_70B = dataclasses.replace(
    _LLAMA_3_8B, embed_size=8192, ffw_size=28_672, num_layers=80, num_heads=64
)
_LLAMA_3_1_SCALING = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
)


def _llama_3_1(config: LlamaConfig) -> LlamaConfig:
    """The Llama of that shape with 3.1's context, rotary scaling and end-of-message id."""
    return dataclasses.replace(
        config,
        max_context=131_072,
        rope_scaling=_LLAMA_3_1_SCALING,
        eos_token_ids=(128_001, 128_008, 128_009),
    )


_LLAMA_3_1_8B = _llama_3_1(_LLAMA_3_8B)
_LLAMA_3_1_70B = _llama_3_1(_LLAMA_3_70B)
_LLAMA_3_2_3B = dataclasses.replace(
    _LLAMA_3_1_8B,
    embed_size=3072,
    ffw_size=8192,
    num_layers=28,
    num_heads=24,
    rope_scaling=dataclasses.replace(_LLAMA_3_1_SCALING, factor=32.0),
    tied_embeddings=True,
)

PRESETS: dict[str, LlamaConfig] = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-70b": _LLAMA_2_70B,
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": _LLAMA_3_70B,
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "llama-3.1-70b": _LLAMA_3_1_70B,
    "llama-3.1-405b": dataclasses.replace(
        _LLAMA_3_1_70B, embed_size=16_384, ffw_size=53_248, num_layers=126, num_heads=128
    ),
    "llama-3.2-1b": dataclasses.replace(
        _LLAMA_3_2_3B, embed_size=2048, num_layers=16, num_heads=32, head_size=64
    ),
    "llama-3.2-3b": _LLAMA_3_2_3B,
    "llama-3.3-70b": _LLAMA_3_1_70B,
}


def preset(name: str) -> LlamaConfig:
    """The configuration of a published Llama, such as `"llama-3.1-8b"`.

    Raises:
      FlyJaxError: the name is none of `PRESETS`.
    """
    if name not in PRESETS:
        raise FlyJaxError(
            f"There is no preset '{name}'; the presets are {', '.join(PRESETS)}: name one of them."
        )
    return PRESETS[name]
