"""Reductions over a vocabulary of which each device may hold only a shard.

Every function reduces the last dimension. `axis_names` are the mesh axes over which it is sharded,
in order, inside `jax.shard_map`; with `()` it is whole. Only results travel between devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num, Shaped

from fly_jax.sharding.rules import Layout, axes_in

AxisNames = tuple[str, ...]
Local = Float[Array, "*lead local"]
Found = Float[Array, "*lead"]
Top = tuple[Float[Array, "*lead count"], Int[Array, "*lead count"]]

# Beyond so many largest values, finding them one after the other costs a TPU more than a sort.
_MOST_PASSES = 8


def token_ids(local_size: int, axis_names: AxisNames = ()) -> Int[Array, " local"]:
    """The ids of the tokens that this shard holds."""
    first = jax.lax.axis_index(axis_names) * local_size if axis_names else 0
    return first + jnp.arange(local_size, dtype=jnp.int32)


def vocab_sum(values: Num[Array, "*lead local"], axis_names: AxisNames = ()) -> Num[Array, "*lead"]:
    """Sum over the whole vocabulary."""
    local = jnp.sum(values, axis=-1)
    return jax.lax.psum(local, axis_names) if axis_names else local


def vocab_max(values: Local, axis_names: AxisNames = ()) -> Found:
    """The largest value in the whole vocabulary."""
    local = jnp.max(values, axis=-1)
    return jax.lax.pmax(local, axis_names) if axis_names else local


def vocab_argmax(values: Local, axis_names: AxisNames = ()) -> Int[Array, "*lead"]:
    """Token of the largest value; of equal ones the lowest id, as `jnp.argmax` has it."""
    # On a CPU `jnp.argmax` takes four to seven times as long as these two passes.
    is_best = ~(values < vocab_max(values, axis_names)[..., None])
    ids = token_ids(values.shape[-1], axis_names)
    here = jnp.min(jnp.where(is_best, ids, jnp.iinfo(jnp.int32).max), axis=-1)
    return jax.lax.pmin(here, axis_names) if axis_names else here


def vocab_top(values: Local, count: int, axis_names: AxisNames = ()) -> Top:
    """The `count` largest values (or all), descending, and their tokens, of equals the lowest."""
    best, tokens = _largest(values, min(count, values.shape[-1]))
    if not axis_names:
        return best, tokens
    tokens += token_ids(values.shape[-1], axis_names)[0]
    gathered = functools.partial(
        jax.lax.all_gather, axis_name=axis_names, axis=best.ndim - 1, tiled=True
    )
    everywhere = gathered(best)
    best, at = jax.lax.top_k(everywhere, min(count, everywhere.shape[-1]))
    return best, jnp.take_along_axis(gathered(tokens), at, axis=-1, mode="promise_in_bounds")


def _largest(values: Local, count: int) -> Top:
    """The largest values of a shard, and where they are in it."""

    def picked(values: Local) -> Top:
        best, at = jax.lax.top_k(values, count)
        return best, at

    if count > _MOST_PASSES:
        return picked(values)
    # A TPU sorts the vocabulary to pick, and a CPU takes ten times as long for passes over it.
    by_passes = functools.partial(one_by_one, count=count)
    return cast(Top, jax.lax.platform_dependent(values, tpu=by_passes, default=picked))


def one_by_one(values: Local, count: int) -> Top:
    """The largest values, in descending order, by a pass over all of them for each."""
    found, where = [], []
    for _ in range(count):
        found.append(jnp.max(values, axis=-1))
        where.append(jnp.argmax(values, axis=-1).astype(jnp.int32))
        is_it = token_ids(values.shape[-1]) == where[-1][..., None]
        values = jnp.where(is_it, -jnp.inf, values)
    return jnp.stack(found, axis=-1), jnp.stack(where, axis=-1)


def vocab_pick(
    values: Local, tokens: Int[Array, "*lead"], missing: float, axis_names: AxisNames = ()
) -> Found:
    """The value of one token per position; `missing`, a lower bound, for an id out of range."""
    local_size = values.shape[-1]
    index = tokens - token_ids(local_size, axis_names)[0]
    is_here = (index >= 0) & (index < local_size)
    at = jnp.where(is_here, index, 0)[..., None]
    picked = jnp.take_along_axis(values, at, axis=-1, mode="promise_in_bounds")[..., 0]
    picked = jnp.where(is_here, picked, missing)
    return jax.lax.pmax(picked, axis_names) if axis_names else picked


def finite_or_zero(values: Shaped[Array, "*lead"]) -> Shaped[Array, "*lead"]:
    """Zeros for infinities, so that subtracting a maximum of -inf makes no NaN."""
    return jnp.where(jnp.isfinite(values), values, 0)


def vocab_split(layout: Layout, shape: Sequence[int]) -> tuple[PartitionSpec, AxisNames]:
    """The partition of an array (rows first, vocabulary last), and the axes of the vocabulary."""
    lead = ("rows", *(None,) * len(shape))[: len(shape) - 1]
    spec = layout.spec((*lead, "vocab"), shape)
    entries = (*spec, *(None,) * len(shape))[: len(shape)]
    return PartitionSpec(*entries), axes_in(entries[-1])
