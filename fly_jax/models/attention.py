"""Attention over the key/value cache, on one device or on a mesh.

On a mesh every device attends to the part of the cache that it holds. What has to travel for that
is said in words, within `jax.shard_map`: left to the compiler, whole caches and matrices travel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from fly_jax.models.cache import CACHE_AXES, write, write_part
from fly_jax.sharding.rules import Layout, MeshAxes, axes_in

# Queries, grouped by the key/value head that they share, and what a pass adds to the cache.
_QUERY_AXES = ("rows", None, "kv_heads", "q_heads", "head")
_NEW_AXES = ("rows", None, "kv_heads", "head")

Entries = Float[Array, "layers rows kv_heads capacity head"]
Queries = Float[Array, "rows time kv_heads group head"]


def attend_cached(
    query: Queries,
    key: Float[Array, "rows time kv_heads head"],
    value: Float[Array, "rows time kv_heads head"],
    keys: Entries,
    values: Entries,
    layer: Int[Array, ""],
    start: Int[Array, " rows"],
    layout: Layout | None,
) -> tuple[Queries, Entries, Entries]:
    """Writes a layer's new keys and values to the cache, and attends to all of each row.

    Where the cache's rows are split over more devices than the queries', queries are exchanged for
    their rows, and back afterwards: two all-to-alls. Where its positions are split, every device
    sees all queries of its heads, and the results are merged by their softmax sums: an all-gather
    and two reductions. Otherwise nothing travels.

    Args:
      query: rotated queries.
      key: rotated keys to add, at each row's `start` and on.
      value: values to add.
      keys: the cache's keys.
      values: the cache's values.
      layer: whose entries they are.
      start: valid positions of each row.
      layout: how all this lies on a mesh; None on one device.

    Returns:
      The mixed values, and the cache's keys and values, updated in place.
    """
    if layout is None:
        keys, values = write(keys, layer, key, start), write(values, layer, value, start)
        return _write_and_attend(query, key, value, keys, values, layer, start)
    query_spec = layout.spec(_QUERY_AXES, query.shape)
    new_spec = layout.spec(_NEW_AXES, key.shape)
    cache_spec = layout.spec(CACHE_AXES, keys.shape)
    groups, rows = axes_in(query_spec[3]), axes_in(query_spec[0])
    more_rows = tuple(name for name in axes_in(cache_spec[1]) if name not in rows)
    attend = functools.partial(
        _attend_shard,
        groups=tuple(name for name in groups if name in (*more_rows, *axes_in(cache_spec[3]))),
        more_rows=more_rows,
        lengths=axes_in(cache_spec[3]),
    )
    return jax.shard_map(
        attend,
        mesh=layout.mesh,
        in_specs=(
            query_spec, new_spec, new_spec, cache_spec, cache_spec, PartitionSpec(),
            PartitionSpec(query_spec[0]),
        ),
        out_specs=(query_spec, cache_spec, cache_spec),
        check_vma=False,  # it cannot see that a merged result is the same everywhere
    )(query, key, value, keys, values, layer, start)  # fmt: skip


def attention(
    query: Queries,
    key: Float[Array, "rows kv_heads length head"],
    value: Float[Array, "rows kv_heads length head"],
    visible: Bool[Array, "rows time length"],
) -> Queries:
    """Grouped-query attention with the softmax in float32."""
    scores = _scores(query, key, visible)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return _mix(weights, value, query.shape)


def _attend_shard(
    query: Queries,
    key: Float[Array, "rows time kv_heads head"],
    value: Float[Array, "rows time kv_heads head"],
    keys: Entries,
    values: Entries,
    layer: Int[Array, ""],
    start: Int[Array, " rows"],
    *,
    groups: MeshAxes,
    more_rows: MeshAxes,
    lengths: MeshAxes,
) -> tuple[Queries, Entries, Entries]:
    """One device's part.

    Args:
      query: the queries of its heads, for all rows of its activations.
      key: as `query`.
      value: as `query`.
      keys: its part of the cache.
      values: its part of the cache.
      layer: see `attend_cached`.
      start: of the rows of its activations.
      groups: the mesh axes that split the queries of a head, of those in `more_rows` or `lengths`.
      more_rows: those that split the cache's rows, but not those of the activations.
      lengths: those that split the cache's positions.
    """
    if more_rows:
        count = keys.shape[1]
        at = jax.lax.axis_index(more_rows) * count
        key, value, start = (
            jax.lax.dynamic_slice_in_dim(all_rows, at, count) for all_rows in (key, value, start)
        )
        if groups:
            query = jax.lax.all_to_all(query, more_rows, 0, 3, tiled=True)
        else:
            query = jax.lax.dynamic_slice_in_dim(query, at, count)
    if lengths:
        if groups:
            query = jax.lax.all_gather(query, lengths, axis=3, tiled=True)
        mixed, keys, values = _attend_part(
            query, key, value, keys, values, layer, start, lengths, scatter=bool(groups)
        )
        return mixed, keys, values
    mixed, keys, values = _write_and_attend(query, key, value, keys, values, layer, start)
    if more_rows and groups:
        mixed = jax.lax.all_to_all(mixed, more_rows, 3, 0, tiled=True)
    elif more_rows:
        mixed = jax.lax.all_gather(mixed, more_rows, axis=0, tiled=True)
    return mixed, keys, values


def _write_and_attend(
    query: Queries,
    key: Float[Array, "rows time kv_heads head"],
    value: Float[Array, "rows time kv_heads head"],
    keys: Entries,
    values: Entries,
    layer: Int[Array, ""],
    start: Int[Array, " rows"],
) -> tuple[Queries, Entries, Entries]:
    """`attend_cached` where every position of a row is here."""
    keys, values = write(keys, layer, key, start), write(values, layer, value, start)
    visible = _visible(start, query.shape[1], jnp.arange(keys.shape[3], dtype=jnp.int32))
    return attention(query, _of(keys, layer), _of(values, layer), visible), keys, values


def _attend_part(
    query: Queries,
    key: Float[Array, "rows time kv_heads head"],
    value: Float[Array, "rows time kv_heads head"],
    keys: Entries,
    values: Entries,
    layer: Int[Array, ""],
    start: Int[Array, " rows"],
    lengths: MeshAxes,
    *,
    scatter: bool,
) -> tuple[Queries, Entries, Entries]:
    """Attention where each device has some positions: softmax sums are merged over all of them.

    `scatter` leaves each device the queries that it came with.
    """
    first = jax.lax.axis_index(lengths) * keys.shape[3]
    keys = write_part(keys, layer, key, start - first)
    values = write_part(values, layer, value, start - first)
    positions = first + jnp.arange(keys.shape[3], dtype=jnp.int32)
    scores = _scores(query, _of(keys, layer), _visible(start, query.shape[1], positions))
    # A device may see no position of a row: the largest score of all devices is finite.
    largest = jax.lax.pmax(jnp.max(scores, axis=-1, keepdims=True), lengths)
    weights = jnp.exp(scores - largest)
    mass = jnp.sum(weights, axis=-1).transpose(0, 3, 1, 2)[..., None]
    mixed = _mix(weights.astype(values.dtype), _of(values, layer), query.shape)
    both = jnp.concatenate((mixed.astype(jnp.float32), mass), axis=-1)
    if scatter:
        both = jax.lax.psum_scatter(both, lengths, scatter_dimension=3, tiled=True)
    else:
        both = jax.lax.psum(both, lengths)
    return (both[..., :-1] / both[..., -1:]).astype(query.dtype), keys, values


def _visible(
    start: Int[Array, " rows"], time: int, positions: Int[Array, " length"]
) -> Bool[Array, "rows time length"]:
    steps = start[:, None] + jnp.arange(time, dtype=jnp.int32)
    return positions <= steps[:, :, None]


def _scores(
    query: Queries,
    key: Float[Array, "rows kv_heads length head"],
    visible: Bool[Array, "rows time length"],
) -> Float[Array, "rows kv_heads group time length"]:
    """Scores in float32, the hidden ones at its lowest value.

    The queries of a group are stacked as rows, so that this product and the next are plain batched
    ones.
    """
    rows, time, kv_heads, group, head = query.shape
    stacked = query.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * time, head)
    key = key.astype(query.dtype)
    scores = jnp.einsum("bkqh,bksh->bkqs", stacked * head**-0.5, key).astype(jnp.float32)
    scores = scores.reshape(rows, kv_heads, group, time, key.shape[2])
    return jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)


def _mix(
    weights: Float[Array, "rows kv_heads group time length"],
    value: Float[Array, "rows kv_heads length head"],
    shape: tuple[int, ...],
) -> Queries:
    rows, time, kv_heads, group, head = shape
    weights = weights.reshape(rows, kv_heads, group * time, value.shape[2])
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights, value)
    return mixed.reshape(rows, kv_heads, group, time, head).transpose(0, 3, 1, 2, 4)


def _of(entries: Entries, layer: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(entries, layer, keepdims=False)
