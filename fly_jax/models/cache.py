"""The key/value cache: one length per row, so that rows may advance by different amounts.

A model's pass only reads it. What the pass adds is returned as `NewEntries` and written after it:
so a branch with a pass returns no cache, and the compiler has no reason to copy one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.head_config import Eagle3
from fly_jax.shapes import RowInts
from fly_jax.sharding.rules import Layout, MeshAxes, axes_in

CACHE_AXES = ("layers", "cache_batch", "kv_heads", "cache_length", "head")
NEW_AXES = ("layers", "rows", "kv_heads", None, "head")

Entries = Float[Array, "layers rows kv_heads capacity head"]
_New = Float[Array, "layers rows kv_heads time head"]
# Entries of perhaps more rows than a device has in its cache.
_Given = Float[Array, "layers given_rows kv_heads time head"]
_Starts = Int[Array, " given_rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewEntries:
    """Keys and values that a pass adds: of every layer, row and token that it was fed."""

    keys: _New
    values: _New

    def padded(self, time: int) -> NewEntries:
        """A copy with zeros for further tokens, so that branches of all widths return one shape."""
        pad = ((0, 0), (0, 0), (0, 0), (0, time - self.keys.shape[3]), (0, 0))
        return NewEntries(jnp.pad(self.keys, pad), jnp.pad(self.values, pad))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer and row.

    Entries at or beyond a row's length are stale: they are masked and later overwritten, so
    rolling back is setting a smaller length.
    """

    keys: Entries
    values: Entries
    length: RowInts  # valid positions of each row
    # Attention reads so many positions, at least the length of every row whose results are wanted;
    # it reads the whole capacity where this is None, or a mesh splits the positions.
    attended: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Positions that fit into a row."""
        return self.keys.shape[3]

    def with_length(self, length: RowInts) -> KVCache:
        """A cache of the same entries, valid up to `length`: it advances or rolls back uncopied."""
        return dataclasses.replace(self, length=length)

    def attending(self, positions: int | None) -> KVCache:
        """A cache of the same entries, of which attention reads `positions`."""
        return dataclasses.replace(self, attended=positions)

    def written(self, new: NewEntries, layout: Layout | None) -> KVCache:
        """A cache with what a pass adds, at and after each row's length; the length stays.

        The caller keeps length + time within the capacity: XLA would shift what overruns it.
        """
        write: Callable[[Entries, Array, Array], Entries] = _write
        if layout is not None:
            cache_spec = layout.spec(CACHE_AXES, self.keys.shape)
            new_spec = layout.spec(NEW_AXES, new.keys.shape)
            rows, lengths = axes_in(new_spec[1]), axes_in(cache_spec[3])
            more_rows = tuple(name for name in axes_in(cache_spec[1]) if name not in rows)
            write = jax.shard_map(
                functools.partial(_write_shard, more_rows=more_rows, lengths=lengths),
                mesh=layout.mesh, in_specs=(cache_spec, new_spec, PartitionSpec(new_spec[1])),
                out_specs=cache_spec, check_vma=False,
            )  # fmt: skip
        keys = write(self.keys, new.keys, self.length)
        values = write(self.values, new.values, self.length)
        return dataclasses.replace(self, keys=keys, values=values)


def cache_shape(config: LlamaConfig, rows: int, capacity: int) -> tuple[int, ...]:
    """Shape of the keys, and of the values, for so many rows of `capacity` positions."""
    return (config.num_layers, rows, config.num_kv_heads, capacity, config.head_size)


def held_caches(config: LlamaConfig) -> list[LlamaConfig]:
    """The sizes of its caches: of an EAGLE-3 head also of the features, a half of each as keys."""
    if not isinstance(config.head, Eagle3):
        return [config]
    half = config.embed_size // 2
    heads = math.gcd(half, config.num_kv_heads)  # so that a mesh splits them alike
    return [config, dataclasses.replace(config, num_kv_heads=heads, head_size=half // heads)]


def empty_cache(
    config: LlamaConfig, rows: int, capacity: int, dtype: jnp.dtype, layout: Layout | None = None
) -> KVCache:
    """A cache of zeros in which every row has length 0; on a mesh, call it within `jit`."""
    shape = cache_shape(config, rows, capacity)
    # Two arrays, so that a caller may donate both.
    keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    if layout is not None:
        keys, values = layout.constrain(keys, CACHE_AXES), layout.constrain(values, CACHE_AXES)
    return KVCache(keys, values, jnp.zeros((rows,), jnp.int32))


def rows_here(values: Array, axis: int, count: int, more_rows: MeshAxes) -> Array:
    """The `count` rows of a device, within `jax.shard_map`, where only caches' axes split them."""
    if not more_rows:
        return values
    first = jax.lax.axis_index(more_rows) * count
    return jax.lax.dynamic_slice_in_dim(values, first, count, axis)


def _write_shard(
    entries: Entries, new: _Given, start: _Starts, *, more_rows: MeshAxes, lengths: MeshAxes
) -> Entries:
    count = entries.shape[1]
    new, start = rows_here(new, 1, count, more_rows), rows_here(start, 0, count, more_rows)
    if not lengths:
        return _write(entries, new, start)
    return _write_part(entries, new, start - jax.lax.axis_index(lengths) * entries.shape[3])


def _write(entries: Entries, new: _Given, start: _Starts) -> Entries:
    new, capacity = new.astype(entries.dtype), entries.shape[3]
    start = jnp.where(start < 0, start + capacity, start)
    rows, time = new.shape[1], new.shape[3]
    if rows > 1 and jax.default_backend() not in ("cpu", "tpu"):  # where each row is a kernel
        positions, moved = start[:, None] + jnp.arange(time), new.transpose(1, 3, 0, 2, 4)
        places = entries.at[:, jnp.arange(rows)[:, None], :, positions]
        return places.set(moved, mode="drop", unique_indices=True)
    for row in range(rows):  # in few operations, since a program has as many of each
        one = jax.lax.slice_in_dim(new, row, row + 1, axis=1)
        at = (0, row, 0, jax.lax.index_in_dim(start, row, keepdims=False), 0)
        entries = jax.lax.dynamic_update_slice(entries, one, at, allow_negative_indices=False)
    return entries


def _write_part(entries: Entries, new: _New, start: RowInts) -> Entries:
    """Writes as `_write` to a part of a row's positions; `start` counts from it, maybe negative."""
    new = new.astype(entries.dtype)
    layers, rows, kv_heads, capacity, head = entries.shape
    time = new.shape[3]
    width = min(time, capacity)
    zero = jnp.zeros((), jnp.int32)
    for row in range(rows):
        first = jnp.clip(start[row], 0, capacity - width)
        at = (zero, jnp.int32(row), zero, first, zero)
        old = jax.lax.dynamic_slice(entries, at, (layers, 1, kv_heads, width, head))
        source = first + jnp.arange(width, dtype=jnp.int32) - start[row]
        is_new = (source >= 0) & (source < time)
        here = new[:, row][:, :, jnp.clip(source, 0, time - 1)][:, None]
        merged = jnp.where(is_new[:, None], here, old)
        entries = jax.lax.dynamic_update_slice(entries, merged, at)
    return entries
