"""Rotary position embedding, with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fly_jax.models.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position for each pair of head features: float32 [head_size / 2]."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None:
        wavelengths = 2 * math.pi / frequencies
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = (scaling.original_context / wavelengths - low) / (high - low)
        blend = np.clip(kept, 0.0, 1.0)
        frequencies = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return frequencies.astype(np.float32)


def rotation(
    config: LlamaConfig, positions: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosines and sines of every position's angles, in float32."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


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
