"""The key/value cache: one length per row, so that rows may advance by different amounts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fly_jax.models.config import LlamaConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer and row.

    Entries at or beyond a row's length are stale: they are masked and later overwritten, so
    rolling back is setting a smaller length.

    Attributes:
      keys: [layers, rows, kv_heads, capacity, head].
      values: the same shape.
      length: [rows], valid positions of each row.
    """

    keys: Float[Array, "layers rows kv_heads capacity head"]
    values: Float[Array, "layers rows kv_heads capacity head"]
    length: Int[Array, " rows"]

    @property
    def capacity(self) -> int:
        """Positions that fit into a row."""
        return self.keys.shape[3]

    def with_length(self, length: Int[Array, " rows"]) -> KVCache:
        """The same entries, valid up to `length`: advances or rolls back without a copy."""
        return dataclasses.replace(self, length=length)


CACHE_AXES = ("layers", "cache_batch", "kv_heads", "cache_length", "head")


def cache_shape(config: LlamaConfig, rows: int, capacity: int) -> tuple[int, ...]:
    """Shape of the keys, and of the values, for so many rows of `capacity` positions."""
    return (config.num_layers, rows, config.num_kv_heads, capacity, config.head_size)


def empty_cache(config: LlamaConfig, rows: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """A cache of zeros in which every row has length 0."""
    shape = cache_shape(config, rows, capacity)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((rows,), jnp.int32))


def write(
    entries: Float[Array, "layers rows kv_heads capacity head"],
    layer: Int[Array, ""],
    new: Float[Array, "rows time kv_heads head"],
    start: Int[Array, " rows"],
) -> Float[Array, "layers rows kv_heads capacity head"]:
    """Writes each row's new entries at its own start; the rest stays as it is, in place.

    The caller keeps `start + time <= capacity`: XLA would shift a write that runs over the end.
    """
    new = new.swapaxes(1, 2).astype(entries.dtype)
    zero = jnp.zeros((), jnp.int32)
    for row in range(new.shape[0]):
        at = (layer, jnp.int32(row), zero, start[row], zero)
        entries = jax.lax.dynamic_update_slice(entries, new[row][None, None], at)
    return entries


def write_part(
    entries: Float[Array, "layers rows kv_heads capacity head"],
    layer: Int[Array, ""],
    new: Float[Array, "rows time kv_heads head"],
    start: Int[Array, " rows"],
) -> Float[Array, "layers rows kv_heads capacity head"]:
    """`write` where these are some of a row's positions: what belongs to others is left out.

    Args:
      entries: the positions that are here.
      layer: whose entries they are.
      new: what to write, much of which may belong elsewhere.
      start: where the first of it goes, counted from the first position here; may be negative.
    """
    new = new.swapaxes(1, 2).astype(entries.dtype)
    _, rows, kv_heads, capacity, head = entries.shape
    time = new.shape[2]
    width = min(time, capacity)
    zero = jnp.zeros((), jnp.int32)
    for row in range(rows):
        first = jnp.clip(start[row], 0, capacity - width)
        at = (layer, jnp.int32(row), zero, first, zero)
        old = jax.lax.dynamic_slice(entries, at, (1, 1, kv_heads, width, head))
        source = first + jnp.arange(width, dtype=jnp.int32) - start[row]
        is_new = (source >= 0) & (source < time)
        here = new[row][:, jnp.clip(source, 0, time - 1)][None, None]
        merged = jnp.where(is_new[:, None], here, old)
        entries = jax.lax.dynamic_update_slice(entries, merged, at)
    return entries
