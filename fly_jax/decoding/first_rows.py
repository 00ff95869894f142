"""The first rows of a state, decoded without the others.

A round takes as long as it has rows, used or not. So where only some are used they are the first
ones, and the round is made for these. A cache stays whole: a pass reads and writes the rows that it
is fed, and a copy of some would cost more than it saves.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from fly_jax.decoding.state import DecodeState, RuleInputs, map_caches
from fly_jax.models.cache import KVCache

# A state of this many rows is decoded by this many, or that part of it.
_GROWTH = 4


def row_steps(rows: int) -> tuple[int, ...]:
    """How many rows a round may be made for, in ascending order; the last is all.

    Each is about four times the one before it, so that few programs are compiled.
    """
    steps = [rows]
    while steps[0] >= _GROWTH:
        steps.insert(0, steps[0] // _GROWTH)
    return tuple(steps)


def row_axis(few: Array | jax.ShapeDtypeStruct, many: Array) -> int | None:
    """The axis in which an array of some rows differs from that of more.

    None where it has no rows, or there are no more.
    """
    differing = (axis for axis in range(few.ndim) if few.shape[axis] != many.shape[axis])
    return next(differing, None)


def taken(whole: DecodeState, few: DecodeState) -> DecodeState:
    """The first rows of a state, with whole caches: as many as `few` has, by its shapes."""

    def rows(shape: Any, one: Any) -> Any:
        if isinstance(one, KVCache):
            return one.with_length(one.length[: len(shape.length)])
        axis = row_axis(shape, one)
        return one if axis is None else jax.lax.slice_in_dim(one, 0, shape.shape[axis], axis=axis)

    return map_caches(rows, few, whole)


def put_back(whole: DecodeState, part: DecodeState) -> DecodeState:
    """A state with its first rows as they have become since they were `taken`."""

    def rows(mine: Any, one: Any) -> Any:
        if isinstance(one, KVCache):
            return mine.with_length(one.length.at[: len(mine.length)].set(mine.length))
        axis = row_axis(mine, one)
        return mine if axis is None else jax.lax.dynamic_update_slice_in_dim(one, mine, 0, axis)

    return map_caches(rows, part, whole)


def inputs_of(inputs: RuleInputs, rows: int) -> RuleInputs:
    """The numbers of the first rows; what all share stays as it is."""
    whole = (inputs.rule, inputs.sampling, inputs.ends, inputs.seated)
    rule, sampling, ends, seated = jax.tree.map(
        lambda leaf: leaf[:rows] if leaf.ndim else leaf, whole
    )
    protected = inputs.protected[:rows] if inputs.protected.ndim == 2 else inputs.protected
    return RuleInputs(rule, sampling, protected, inputs.memory, ends, seated)
