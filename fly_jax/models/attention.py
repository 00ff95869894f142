"""Attention over the key/value cache and a pass's own tokens, and the rotary positions in it.

On a mesh every device attends to the part of the cache that it holds. The exchanges for that are
explicit, within `jax.shard_map`: left to the compiler, whole caches and matrices travel.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from fly_jax.models.architectures import LlamaConfig, YarnScaling
from fly_jax.models.cache import CACHE_AXES, NEW_AXES, KVCache, rows_here
from fly_jax.shapes import Index, RowInts
from fly_jax.sharding.rules import Layout, MeshAxes, axes_in


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position for each pair of head features: float32 [head_size / 2]."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None:
        if isinstance(scaling, YarnScaling):
            kept = _kept_of_yarn(scaling, config, len(frequencies))
        else:
            turns = scaling.original_context * frequencies / (2 * math.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            kept = (turns - low) / (high - low)
        # The share that is kept: 1 or more, wholly; 0 or less, stretched.
        blend = np.clip(kept, 0.0, 1.0)
        frequencies = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return frequencies.astype(np.float32)


def _kept_of_yarn(scaling: YarnScaling, config: LlamaConfig, number: int) -> np.ndarray:
    """The share that is kept, in equal steps from the pair of `fast_turns` to `slow_turns`'s."""

    def pair(turns: float) -> float:
        """The place of a pair that turns so often within the original context."""
        wavelength = scaling.original_context / (2 * math.pi * turns)
        return config.head_size * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = pair(scaling.fast_turns), pair(scaling.slow_turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_size - 1)
    steps = max(last - first, 1e-3)
    return 1 - (np.arange(number) - first) / steps


def rotation(config: LlamaConfig, positions: Int[Array, "*batch"]) -> tuple[Angles, Angles]:
    """Cosines and sines of every position's angles, in float32; with YaRN, times its factor."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    if isinstance(config.rope_scaling, YarnScaling):
        factor = config.rope_scaling.attention_factor
        return cosines * factor, sines * factor
    return cosines, sines


def rotate(x: Queries, cosines: Angles, sines: Angles) -> Queries:
    """Rotates the pair (i, i + head/2) of every head by its angle: Hugging Face's pairing."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None], sines[:, :, None]
    turned = first * cosines - second * sines, second * cosines + first * sines
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# Numbers of a vector register; products of other widths have a slow end.
_CPU_WIDTH = 16
# Positions that queries which attend by themselves read at a time, and how many these are at most.
_BLOCK, _QUERIES = 64, 32
# Up to so many numbers the compiler rounds `exp` and sums otherwise, and beyond them always alike.
_FEW_SCORES = 4096

Angles = Float[Array, "*batch half"]
Queries = Float[Array, "rows time heads head"]
Grouped = Float[Array, "rows time kv_heads group head"]  # by the key/value head that they share
New = Float[Array, "rows kv_heads time head"]
Ahead = Index | int
Windows = Index | Int[Array, " time"]
# A cache; the queries are those of its first rows, and of some of its heads.
Cached = Float[Array, "layers cached_rows cached_heads capacity head"]


class Part(NamedTuple):
    """A part of the positions that queries look at; `visible` says which of them each may."""

    keys: Float[Array, "rows kv_heads length head"]
    values: Float[Array, "rows kv_heads length head"]
    visible: Bool[Array, "rows time length"]


def attend_cached(
    query: Queries, key: New, value: New, cache: KVCache, layer: Index,
    layout: Layout | None, window: Windows | None = None, ahead: Ahead = 0,
) -> Queries:  # fmt: skip
    """Attends to a layer's entries in the cache and to the pass's own tokens before each query.

    On a mesh each device has a contiguous block of query heads, and reads the key/value heads that
    these share. Where the cache's rows are split over more devices than the queries', queries are
    exchanged for their rows, and back afterwards: two all-to-alls. Where its positions are split,
    every device sees all queries of its heads, and the results are merged by their softmax sums:
    an all-gather and two reductions. Otherwise nothing travels.

    Args:
      query, key: rotated; the pass's tokens follow each row's `cache.length`.
      window: newest tokens that a query, or each one, sees, its own among them; None is all.
      ahead: tokens of the pass behind its own that a query sees.
    """
    here = _Heads(query.shape[2] // key.shape[1])
    if layout is None:
        return _attend(
            query, key, value, cache.keys, cache.values, layer, cache.length, window, ahead,
            heads=here, attended=cache.attended, joins=jax.default_backend() == "cpu",
        )  # fmt: skip
    split = query_axes(layout, query.shape[2], here.group)
    query_spec = PartitionSpec(layout.spec(("rows",), query.shape[:1])[0], None, split or None)
    cache_spec = layout.spec(CACHE_AXES, cache.keys.shape)
    new_spec = PartitionSpec(*layout.spec(NEW_AXES, (1, *key.shape))[1:])
    rows = axes_in(query_spec[0])
    more_rows = tuple(name for name in axes_in(cache_spec[1]) if name not in rows)
    lengths = axes_in(cache_spec[3])
    gathered = tuple(name for name in split if name in (*more_rows, *lengths))
    own = tuple(name for name in split if name not in gathered)
    attend = functools.partial(
        _attend_shard, heads=here._replace(split=own, kv_split=axes_in(cache_spec[2])),
        attended=cache.attended, gathers=bool(gathered), more_rows=more_rows, lengths=lengths,
    )  # fmt: skip
    whole, of_rows = PartitionSpec(), PartitionSpec(query_spec[0])
    specs = (query_spec, new_spec, new_spec, cache_spec, cache_spec, whole, of_rows, whole, whole)
    return jax.shard_map(
        attend, mesh=layout.mesh, in_specs=specs, out_specs=query_spec,
        check_vma=False,  # it cannot see that a merged result is the same everywhere
    )(query, key, value, cache.keys, cache.values, layer, cache.length, window, ahead)  # fmt: skip


def each_alone(of_one: Callable[..., Array], *arrays: Array) -> Array:
    """Applies a function to each row of the arrays, one row after another; stacks the results.

    Float sums, `exp` and fused products round as the compiler orders them, and it orders them by
    shape. Behind a barrier it cannot see the number of rows, so it makes one loop, with the same
    body for one row as for many: a row's bits do not depend on the number of rows beside it.
    """
    count = arrays[0].shape[0]
    # With one row it would see that the loop reads the whole arrays.
    padded = [jnp.pad(one, ((0, max(2 - count, 0)), *[(0, 0)] * (one.ndim - 1))) for one in arrays]

    def of(index: Array) -> Array:
        return of_one(*(jax.lax.dynamic_index_in_dim(one, index, keepdims=False) for one in padded))

    def step(index: Array, found: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(found, of(index), index, axis=0)

    result = jax.eval_shape(of, jnp.int32(0))
    found = jnp.zeros((padded[0].shape[0], *result.shape), result.dtype)
    bound = jax.lax.optimization_barrier(jnp.int32(count))
    return jax.lax.fori_loop(0, bound, step, found)[:count]


def attend_alone(
    query: Queries, key: New, value: New, cache: KVCache, layer: Index,
    window: Windows | None = None, ahead: Ahead = 0,
) -> Queries:  # fmt: skip
    """Attends as `attend_cached` on one device, by loops over rows, queries and blocks of keys.

    Keys lie at their positions, whether they are the cache's or the pass's own, and queries read
    those before them in blocks of one size. So a query's bits depend neither on the other tokens of
    the pass, nor on how many positions the pass attends to.
    """
    rows, time, _, head = query.shape
    kv_heads, capacity = cache.keys.shape[2:4]
    entries = cache.keys, cache.values
    if rest := -capacity % _BLOCK:
        fill = [(0, 0)] * 3 + [(0, rest), (0, 0)]
        entries = jax.tree.map(lambda one: jnp.pad(one, fill), entries)
    own_width = (-(-time // _BLOCK) + 1) * _BLOCK  # blocks in which the pass's own tokens may lie

    def of_row(query: Array, key: Array, value: Array, start: Array, row: Array) -> Array:
        # Rows whose results are not used may be longer than the cache.
        start = jnp.minimum(start, capacity)
        first_own = start // _BLOCK

        def placed(own: Array) -> Array:
            nothing = jnp.zeros((kv_heads, own_width, head), cache.keys.dtype)
            at = (0, start % _BLOCK, 0)
            return jax.lax.dynamic_update_slice(nothing, own.astype(nothing.dtype), at)

        own = placed(key), placed(value)

        def read(index: Array) -> list[Array]:
            """Reads a block of keys and one of values."""
            is_cached = index * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32) < start
            size = (1, 1, kv_heads, _BLOCK, head)
            return [
                jnp.where(
                    is_cached[:, None],
                    jax.lax.dynamic_slice(cached, (layer, row, 0, index * _BLOCK, 0), size)[0, 0],
                    jax.lax.dynamic_slice_in_dim(
                        new, jnp.maximum(index - first_own, 0) * _BLOCK, _BLOCK, axis=1
                    ),
                )
                for cached, new in zip(entries, own, strict=True)
            ]

        def of_queries(few: Array, step: Array) -> Array:
            last = start + jnp.minimum(step + ahead, time - 1)
            oldest = jnp.zeros_like(step)
            if window is not None:
                sizes = jnp.broadcast_to(window, (time,))[jnp.minimum(step, time - 1)]
                oldest = jnp.maximum(start + step + 1 - sizes, 0)
            return _attend_block_by_block(few, kv_heads, read, oldest, last)

        turns = -(-time // _QUERIES)
        # A product with one row, of a token alone whose heads share no keys, has other bits.
        more = max(-time % turns, 2 * kv_heads // query.shape[1] - time)
        padded = jnp.pad(query, ((0, more), (0, 0), (0, 0)))
        few = padded.reshape(turns, -1, *query.shape[1:])
        step = jnp.arange(len(padded), dtype=jnp.int32).reshape(turns, -1)
        return each_alone(of_queries, few, step).reshape(padded.shape)[:time]

    return each_alone(of_row, query, key, value, cache.length, jnp.arange(rows, dtype=jnp.int32))


def _attend_block_by_block(
    queries: Float[Array, "few heads head"], kv_heads: int,
    read: Callable[[Index], Sequence[Float[Array, "kv_heads block head"]]],
    oldest: Int[Array, " few"], last: Int[Array, " few"],
) -> Float[Array, "few heads head"]:  # fmt: skip
    """Attends with queries to some positions of each, the softmax merged block by block.

    A block of which a query sees nothing changes no bit of what others have given it.
    """
    few, _, head = queries.shape
    by_head = (queries * head**-0.5).reshape(few, kv_heads, -1, head).swapaxes(0, 1)
    grouped = by_head.reshape(kv_heads, -1, head)
    lowest = jnp.finfo(jnp.float32).min
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def of_block(index: Array, merged: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, mass, mixed = merged
        some_keys, some_values = read(index)
        at = index * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
        seen = (at >= oldest[:, None]) & (at <= last[:, None])
        scores = product("kgh,ksh->kgs", grouped, some_keys.astype(queries.dtype))
        scores = jnp.where(jnp.repeat(seen, by_head.shape[2], axis=0), scores, lowest)
        scores = jnp.pad(scores, fill)  # by rows of nothing, so that there are not few
        largest = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
        weights, kept = jnp.exp(scores - largest), jnp.exp(before - largest)
        mass = mass * kept + weights.sum(axis=-1, keepdims=True)
        sums = product("kgs,ksh->kgh", weights[:, :own].astype(some_values.dtype), some_values)
        return largest, mass, mixed * kept[:, :own] + sums

    own = grouped.shape[1]
    fill = ((0, 0), (0, max(_FEW_SCORES // (kv_heads * _BLOCK) + 1 - own, 0)), (0, 0))
    nothing = jnp.pad(jnp.zeros((*grouped.shape[:2], 1), jnp.float32), fill)
    begin = (nothing + lowest, nothing, jnp.zeros(grouped.shape, jnp.float32))
    first, end = oldest.min() // _BLOCK, last.max() // _BLOCK + 1
    _, mass, mixed = jax.lax.fori_loop(first, end, of_block, begin)
    found = (mixed / mass[:, :own]).reshape(by_head.shape).swapaxes(0, 1)
    return found.reshape(queries.shape).astype(queries.dtype)


def query_axes(layout: Layout, num_heads: int, group: int) -> MeshAxes:
    """The mesh axes that split query heads: a device's share whole key/value heads, or one.

    They are those of the heads' matrix, unless a device would then have parts of several groups:
    then they are fewer, and the compiler moves the queries.
    """
    axes = layout.axes_of("q_heads", num_heads)
    while axes:
        here = num_heads // layout.devices(axes)
        if here % group == 0 or group % here == 0:
            break
        axes = axes[:-1]
    return axes


def attention(query: Grouped, parts: Sequence[Part]) -> Grouped:
    """Attends, with grouped queries, to all parts together; scores and softmax are in float32."""
    return _normalised(_mixed(query, parts, ()), query.dtype).reshape(query.shape)


def _mixed(
    query: Grouped, parts: Sequence[Part], lengths: MeshAxes
) -> Float32[Array, "rows heads time head+1"]:
    """The values' sums weighted by exp(score), and behind them the sums of the weights.

    Scores are taken from the largest one, on all devices along `lengths`.
    """
    rows, time, kv_heads, group, head = query.shape
    scores = [_scores(query, part) for part in parts]
    largest = functools.reduce(jnp.maximum, (one.max(axis=-1, keepdims=True) for one in scores))
    if lengths:
        largest = jax.lax.pmax(largest, lengths)
    # Else XLA's compiler for GPUs, in JAX 0.11, fuses it into a product in bfloat16, and fails. To
    # a TPU the barrier is three more operations a layer.
    barrier = jax.lax.optimization_barrier
    largest = jax.lax.platform_dependent(largest, tpu=lambda one: one, default=barrier)
    weights = [jnp.exp(one - largest) for one in scores]
    product = functools.partial(jnp.einsum, "bkqs,bksh->bkqh", preferred_element_type=jnp.float32)
    pairs = zip(weights, parts, strict=True)
    products = (product(one.astype(part.values.dtype), part.values) for one, part in pairs)
    mixed = functools.reduce(operator.add, products)
    mass = functools.reduce(operator.add, (one.sum(axis=-1, keepdims=True) for one in weights))
    both = jnp.concatenate((mixed, mass), axis=-1)
    return both.reshape(rows, kv_heads * group, time, head + 1)


def _normalised(
    mixed: Float32[Array, "rows heads time sums"], dtype: jnp.dtype
) -> Float[Array, "rows time heads sums-1"]:
    return (mixed[..., :-1] / mixed[..., -1:]).astype(dtype).swapaxes(1, 2)


class _Heads(NamedTuple):
    """The heads of a device: mesh axes that split those of queries, and of keys and values."""

    group: int  # query heads that share a key/value head
    split: MeshAxes = ()
    kv_split: MeshAxes = ()


def _attend_shard(
    query: Queries, key: New, value: New, keys: Cached, values: Cached, layer: Index,
    start: RowInts, window: Windows | None, ahead: Ahead, *, heads: _Heads,
    attended: int | None, gathers: bool, more_rows: MeshAxes, lengths: MeshAxes,
) -> Queries:  # fmt: skip
    """Attends on one device: its heads, for all rows of its activations, in its part of the cache.

    Args:
      start: length of each row of its activations.
      heads: those that it has once queries have travelled.
      gathers: `more_rows` or `lengths` also split the query heads.
      more_rows: the mesh axes that split the cache's rows, but not those of the activations.
      lengths: those that split the cache's positions.
    """
    count = keys.shape[1]
    key, value, start = (rows_here(one, 0, count, more_rows) for one in (key, value, start))
    if more_rows and gathers:
        query = jax.lax.all_to_all(query, more_rows, 0, 2, tiled=True)
    elif more_rows:
        query = rows_here(query, 0, count, more_rows)
    elif gathers:
        query = jax.lax.all_gather(query, lengths, axis=2, tiled=True)
    mixed = _attend(
        query, key, value, keys, values, layer, start, window, ahead,
        heads=heads, attended=attended, lengths=lengths, scatters=gathers,
    )  # fmt: skip
    if more_rows and gathers:
        return jax.lax.all_to_all(mixed, more_rows, 2, 0, tiled=True)
    return jax.lax.all_gather(mixed, more_rows, axis=0, tiled=True) if more_rows else mixed


def _attend(
    query: Queries, key: New, value: New, keys: Cached, values: Cached, layer: Index,
    start: RowInts, window: Windows | None, ahead: Ahead, *, heads: _Heads, attended: int | None,
    lengths: MeshAxes = (), scatters: bool = False, joins: bool = False,
) -> Float[Array, "rows time some_heads head"]:  # fmt: skip
    """Attends as `attend_cached`, to what is on one device.

    `scatters` leaves it the heads it came with. `joins` puts the pass's own keys behind the cached
    ones: a CPU copies what it reads of the cache anyhow, and then has one product instead of two.
    """
    rows, time, num_heads, head = query.shape
    kv_heads, capacity = keys.shape[2:4]
    read = capacity if attended is None or lengths else min(attended, capacity)
    first_position = jax.lax.axis_index(lengths) * capacity if lengths else 0
    steps = np.arange(time, dtype=np.int32)  # what follows from it alone is a constant
    distance = steps[:, None] - steps
    sizes = None if window is None else jnp.broadcast_to(window, (time,))[:, None]
    own = jnp.asarray(distance >= -ahead)
    own = jnp.broadcast_to(own if sizes is None else own & (distance < sizes), (rows, time, time))
    if lengths:  # the pass's own tokens count once
        own &= jax.lax.axis_index(lengths) == 0
    # Contiguous query heads share contiguous key/value heads, a few of those that are here.
    first, needed = _shared_heads(heads, num_heads, kv_heads)
    if needed < key.shape[1]:
        key, value = (jax.lax.dynamic_slice_in_dim(one, first, needed, 1) for one in (key, value))
    parts = [Part(key, value, own)]
    if read:
        at = (layer, 0, first, 0, 0)
        size = (1, rows, needed, read, head)
        keys, values = (jax.lax.dynamic_slice(one, at, size)[0] for one in (keys, values))
        positions = first_position + jnp.arange(read, dtype=jnp.int32)
        visible = jnp.broadcast_to((positions < start[:, None])[:, None], (rows, time, read))
        if sizes is not None:
            asking = start[:, None] + steps
            visible &= asking[:, :, None] - positions < sizes
        parts.append(Part(keys, values, visible))
    if joins:
        parts = [Part(*(_joined(some) for some in zip(*parts, strict=True)))]
    grouped = query.reshape(rows, time, needed, num_heads // needed, head)
    mixed = _mixed(grouped, parts, lengths)
    if scatters and lengths:
        mixed = jax.lax.psum_scatter(mixed, lengths, scatter_dimension=1, tiled=True)
    elif lengths:
        mixed = jax.lax.psum(mixed, lengths)
    return _normalised(mixed, query.dtype)


def _joined(some: Sequence[Array]) -> Array:
    """Joins arrays along axis 2, and pads them with zeros, or False, to a width for CPUs."""
    width = sum(one.shape[2] for one in some)
    fill = [(0, 0)] * some[0].ndim
    fill[2] = (0, -width % _CPU_WIDTH)
    return jnp.pad(jnp.concatenate(some, axis=2), fill)


def _shared_heads(heads: _Heads, num_heads: int, kv_heads: int) -> tuple[int | Index, int]:
    """The first key/value head here that the query heads here share, and the number of them."""
    needed = max(num_heads // heads.group, 1)
    if needed == kv_heads:
        return 0, kv_heads
    first = jax.lax.axis_index(heads.split) * num_heads // heads.group
    if heads.kv_split:
        first -= jax.lax.axis_index(heads.kv_split) * kv_heads
    return first, needed


def _scores(query: Grouped, part: Part) -> Float32[Array, "rows kv_heads group*time length"]:
    """The scores in float32, the hidden ones at its lowest value; a group's queries are rows."""
    rows, time, kv_heads, group, head = query.shape
    stacked = query.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * time, head)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bkqh,bksh->bkqs", stacked * head**-0.5, part.keys.astype(query.dtype))
    length = part.keys.shape[2]
    apart = scores.reshape(rows, kv_heads, group, time, length)
    hidden = jnp.finfo(jnp.float32).min
    return jnp.where(part.visible[:, None, None], apart, hidden).reshape(scores.shape)
