"""Rotary position embedding, with the frequency scaling of Llama 3.1 and of YaRN."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fly_jax.models.config import LlamaConfig, RopeScaling, YarnScaling


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position for each pair of head features: float32 [head_size / 2]."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None:
        if isinstance(scaling, YarnScaling):
            kept = _kept_of_yarn(scaling, config, len(frequencies))
        else:
            kept = _kept_of_llama(scaling, frequencies)
        blend = np.clip(kept, 0.0, 1.0)
        frequencies = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return frequencies.astype(np.float32)


def _kept_of_llama(scaling: RopeScaling, frequencies: np.ndarray) -> np.ndarray:
    """How far each frequency is kept: from 1, wholly, to 0, stretched; beyond them is the same."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return (turns - low) / (high - low)


def _kept_of_yarn(scaling: YarnScaling, config: LlamaConfig, number: int) -> np.ndarray:
    """The same, in equal steps from the pair of so many turns to that of so few."""

    def pair(turns: float) -> float:
        """Where a pair would stand that turns so often within the original context."""
        wavelength = scaling.original_context / (2 * math.pi * turns)
        return config.head_size * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = pair(scaling.fast_turns), pair(scaling.slow_turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_size - 1)
    steps = max(last - first, 1e-3)
    return 1 - (np.arange(number) - first) / steps


def rotation(
    config: LlamaConfig, positions: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosines and sines of every position's angles, in float32; with YaRN, times its factor."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    if isinstance(config.rope_scaling, YarnScaling):
        factor = config.rope_scaling.attention_factor
        return cosines * factor, sines * factor
    return cosines, sines


def rotate(
    x: Float[Array, "batch time heads head"],
    cosines: Float[Array, "batch time half"],
    sines: Float[Array, "batch time half"],
) -> Float[Array, "batch time heads head"]:
    """Turns the pair (i, i + head/2) of every head by its angle: Hugging Face's pairing."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    turned = jnp.concatenate(
        (first * cosines - second * sines, second * cosines + first * sines), axis=-1
    )
    return turned.astype(x.dtype)
