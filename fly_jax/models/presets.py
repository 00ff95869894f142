"""Published models by name."""

from __future__ import annotations

import dataclasses
from typing import Any

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

# The checkpoints' config.json, with the ids of the instruct ones.
_SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152,
    embed_size=576,
    ffw_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    max_context=8192,
    rope_theta=100_000.0,
    tied_embeddings=True,
)
_SMOLLM3_3B = LlamaConfig(
    vocab_size=128_256,
    embed_size=2048,
    ffw_size=11_008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=4,
    head_size=128,
    max_context=65_536,
    rope_theta=5_000_000.0,
    norm_epsilon=1e-6,
    tied_embeddings=True,
    bos_token_id=128_000,
    eos_token_ids=(128_012,),
    architecture="smollm3",
    unrotated_layers=tuple(range(3, 36, 4)),
)
_MISTRAL_7B = LlamaConfig(
    vocab_size=32_768,
    embed_size=4096,
    ffw_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    max_context=32_768,
    rope_theta=1_000_000.0,
    architecture="mistral",
)
_QWEN_2_5_0_5B = LlamaConfig(
    vocab_size=151_936,
    embed_size=896,
    ffw_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_size=64,
    max_context=32_768,
    rope_theta=1_000_000.0,
    norm_epsilon=1e-6,
    tied_embeddings=True,
    bos_token_id=151_643,
    eos_token_ids=(151_645, 151_643),
    architecture="qwen2",
    attention_biases=True,
)
_QWEN_3_0_6B = dataclasses.replace(
    _QWEN_2_5_0_5B,
    embed_size=1024,
    ffw_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    max_context=40_960,
    architecture="qwen3",
    attention_biases=False,
    head_norms=True,
)


def _qwen_2_5(
    layers: int, embed: int, ffw: int, heads: int, kv_heads: int, vocab: int = 152_064
) -> LlamaConfig:
    """A Qwen 2.5; those with the smaller vocabulary have tied embeddings."""
    return dataclasses.replace(
        _QWEN_2_5_0_5B,
        vocab_size=vocab,
        num_layers=layers,
        embed_size=embed,
        ffw_size=ffw,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=128,
        tied_embeddings=vocab == _QWEN_2_5_0_5B.vocab_size,
    )


def _qwen_3(layers: int, embed: int, ffw: int, heads: int, *, tied: bool = False) -> LlamaConfig:
    return dataclasses.replace(
        _QWEN_3_0_6B,
        num_layers=layers,
        embed_size=embed,
        ffw_size=ffw,
        num_heads=heads,
        tied_embeddings=tied,
    )


def _distilled(config: LlamaConfig, **given: Any) -> LlamaConfig:
    """DeepSeek-R1-Distill-Qwen: a Qwen 2.5 of that shape with DeepSeek's begin and end."""
    return dataclasses.replace(
        config,
        max_context=131_072,
        tied_embeddings=False,
        bos_token_id=151_646,
        eos_token_ids=(151_643,),
        **given,
    )


PRESETS: dict[str, LlamaConfig] = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-2-13b": dataclasses.replace(
        _LLAMA_2_7B, embed_size=5120, ffw_size=13_824, num_layers=40, num_heads=40, num_kv_heads=40
    ),
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
    "smollm2-135m": _SMOLLM2_135M,
    "smollm2-360m": dataclasses.replace(
        _SMOLLM2_135M, embed_size=960, ffw_size=2560, num_layers=32, num_heads=15, num_kv_heads=5
    ),
    "smollm2-1.7b": dataclasses.replace(
        _SMOLLM2_135M,
        embed_size=2048,
        ffw_size=8192,
        num_layers=24,
        num_heads=32,
        num_kv_heads=32,
        rope_theta=130_000.0,
    ),
    "smollm3-3b": _SMOLLM3_3B,
    "mistral-7b": _MISTRAL_7B,
    "mistral-nemo-12b": dataclasses.replace(
        _MISTRAL_7B, vocab_size=131_072, embed_size=5120, num_layers=40, max_context=128_000
    ),
    "mistral-small-24b": dataclasses.replace(
        _MISTRAL_7B,
        vocab_size=131_072,
        embed_size=5120,
        ffw_size=32_768,
        num_layers=40,
        rope_theta=100_000_000.0,
    ),
    "mistral-large": dataclasses.replace(
        _MISTRAL_7B,
        embed_size=12_288,
        ffw_size=28_672,
        num_layers=88,
        num_heads=96,
        max_context=131_072,
    ),
    "qwen-2.5-0.5b": _QWEN_2_5_0_5B,
    "qwen-2.5-1.5b": _qwen_2_5(28, 1536, 8960, 12, 2, vocab=151_936),
    "qwen-2.5-3b": _qwen_2_5(36, 2048, 11_008, 16, 2, vocab=151_936),
    "qwen-2.5-7b": _qwen_2_5(28, 3584, 18_944, 28, 4),
    "qwen-2.5-14b": _qwen_2_5(48, 5120, 13_824, 40, 8),
    "qwen-2.5-32b": _qwen_2_5(64, 5120, 27_648, 40, 8),
    "qwen-2.5-72b": _qwen_2_5(80, 8192, 29_568, 64, 8),
    "qwen-3-0.6b": _QWEN_3_0_6B,
    "qwen-3-1.7b": _qwen_3(28, 2048, 6144, 16, tied=True),
    "qwen-3-4b": _qwen_3(36, 2560, 9728, 32, tied=True),
    "qwen-3-8b": _qwen_3(36, 4096, 12_288, 32),
    "qwen-3-14b": _qwen_3(40, 5120, 17_408, 40),
    "qwen-3-32b": _qwen_3(64, 5120, 25_600, 64),
    "deepseek-r1-distill-qwen-1.5b": _distilled(
        _qwen_2_5(28, 1536, 8960, 12, 2, vocab=151_936), rope_theta=10_000.0
    ),
    "deepseek-r1-distill-qwen-7b": _distilled(
        _qwen_2_5(28, 3584, 18_944, 28, 4), rope_theta=10_000.0
    ),
    "deepseek-r1-distill-qwen-14b": _distilled(
        _qwen_2_5(48, 5120, 13_824, 40, 8), norm_epsilon=1e-5
    ),
    "deepseek-r1-distill-qwen-32b": _distilled(
        _qwen_2_5(64, 5120, 27_648, 40, 8), norm_epsilon=1e-5
    ),
    "deepseek-r1-distill-llama-8b": dataclasses.replace(_LLAMA_3_1_8B, eos_token_ids=(128_001,)),
    "deepseek-r1-distill-llama-70b": dataclasses.replace(_LLAMA_3_1_70B, eos_token_ids=(128_001,)),
}


def preset(name: str) -> LlamaConfig:
    """The configuration of a published model, such as `"llama-3.1-8b"`.

    Raises:
      FlyJaxError: the name is none of `PRESETS`.
    """
    if name not in PRESETS:
        raise FlyJaxError(
            f"There is no preset '{name}'; the presets are {', '.join(PRESETS)}: name one of them."
        )
    return PRESETS[name]
