"""From logits to tokens: greedy, or sampled after temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.reductions import (
    AxisNames,
    finite_or_zero,
    vocab_argmax,
    vocab_max,
    vocab_sum,
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a distribution is made of logits; hashable, static under `jit`.

    Applied in this order: temperature, top-k, then top-p on what top-k left, renormalised.
    Tokens that tie with the last one kept are kept too.

    Attributes:
      temperature: divides the logits; above 0 (greedy decoding is no `Sampling` at all).
      top_k: keeps so many of the most probable tokens; 0 keeps all.
      top_p: keeps the fewest most probable tokens with at least this probability together.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise FlyJaxError(
                f"The sampling temperature is {self.temperature}; it must be above 0: "
                "give a positive number, or decode greedily."
            )
        if self.top_k < 0:
            raise FlyJaxError(
                f"top_k is {self.top_k}; it must not be negative: give 0 to keep every token."
            )
        if not 0 < self.top_p <= 1:
            raise FlyJaxError(
                f"top_p is {self.top_p}; it must be above 0 and at most 1: "
                "give 1 to keep every token."
            )


def processed_log_probs(
    logits: Float[Array, "*lead local"], sampling: Sampling, axis_names: AxisNames = ()
) -> Float32[Array, "*lead local"]:
    """Log-probabilities, in nats, of the distribution that is sampled from.

    No sort and no collective over the vocabulary: the last value kept is found exactly by
    bisection (`_last_kept`).

    Args:
      logits: raw logits; inside `jax.shard_map`, this device's shard of them.
      sampling: temperature, top-k and top-p.
      axis_names: mesh axes over which the last dimension is sharded.

    Returns:
      The logits' shape, -inf for a token that is not kept.
    """
    logits = logits.astype(jnp.float32)
    # Subtracting the maximum first keeps a small temperature from overflowing.
    largest = finite_or_zero(vocab_max(logits, axis_names))
    scaled = (logits - largest[..., None]) / sampling.temperature
    if sampling.top_k:
        one = jnp.ones_like(scaled)
        last = _last_kept(scaled, one, jnp.float32(sampling.top_k), axis_names)
        scaled = jnp.where(_ordered(scaled) >= last[..., None], scaled, -jnp.inf)
    mass = jnp.exp(scaled)
    if sampling.top_p < 1:
        limit = sampling.top_p * vocab_sum(mass, axis_names)
        last = _last_kept(scaled, mass, limit, axis_names)
        scaled = jnp.where(_ordered(scaled) >= last[..., None], scaled, -jnp.inf)
        mass = jnp.exp(scaled)
    return scaled - jnp.log(vocab_sum(mass, axis_names))[..., None]


def sample(
    logits: Float[Array, "*lead vocab"], sampling: Sampling | None, key: jax.Array | None = None
) -> Int32[Array, "*lead"]:
    """One token per position: the most probable one, or a draw from the processed distribution.

    Plain array code, so that under `jit` the compiler may keep the logits sharded over the
    vocabulary; the draw is the same on every mesh.

    Args:
      logits: raw logits of the whole vocabulary.
      sampling: what to draw from; None for the most probable token, the lowest id of equal ones.
      key: a PRNG key, needed with `sampling`.

    Raises:
      FlyJaxError: if `sampling` is given without a key.
    """
    if sampling is None:
        return vocab_argmax(logits)
    if key is None:
        raise FlyJaxError("Sampling was asked for without a PRNG key; pass key=jax.random.key(…).")
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return gumbel_argmax(processed_log_probs(logits, sampling), noise)


def gumbel_argmax(
    log_weights: Float[Array, "*lead local"],
    noise: Float[Array, "*lead local"],
    axis_names: AxisNames = (),
) -> Int32[Array, "*lead"]:
    """A draw with probability proportional to exp(log_weights), given standard Gumbel noise.

    The noise is an argument and not drawn here, because on a mesh it has to be drawn outside
    `jax.shard_map`, in its full shape: only then is it the same for every layout.
    """
    return vocab_argmax(log_weights + noise, axis_names)


def _ordered(values: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Integers in the same order as the floats; both zeros are the same one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _last_kept(
    values: Float32[Array, "*lead local"],
    weights: Float32[Array, "*lead local"],
    limit: Float32[Array, "*#lead"],
    axis_names: AxisNames,
) -> Int[Array, "*lead"]:
    """The least t, as an `_ordered` integer, such that all values above t weigh less than `limit`.

    Keeping every value of at least t is then top-k (weights 1, limit k) or top-p (weights
    exp(value), limit p of their sum). A float32 has 32 bits, so 32 halvings find t exactly; rounded
    sums of fewer non-negative terms are never larger, so the search cannot be misled.
    """
    ordered = _ordered(values)

    def halve(
        _: int, bounds: tuple[Int[Array, "*lead"], Int[Array, "*lead"]]
    ) -> tuple[Int[Array, "*lead"], Int[Array, "*lead"]]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = vocab_sum(jnp.where(ordered > middle[..., None], weights, 0), axis_names)
        enough = above < limit
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    shape = values.shape[:-1]
    low = jnp.broadcast_to(_ordered(jnp.float32(-jnp.inf)), shape)
    high = jnp.broadcast_to(_ordered(jnp.float32(jnp.inf)), shape)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[1]
