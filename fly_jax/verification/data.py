"""Numbers are data, structure is static: what rules and sampling are as arguments of `jit`.

A number is a Python number, a scalar array, or an array with one number for each row. Another
number, of the same form, is never another program.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import MOST_FLOAT, MOST_INT, parameters_of

Number: TypeAlias = float | np.ndarray | Float[Array, ""] | Float[Array, " rows"]
Count: TypeAlias = int | np.ndarray | Int[Array, ""] | Int[Array, " rows"]
Switch: TypeAlias = bool | np.ndarray | Bool[Array, ""] | Bool[Array, " rows"]

# Metadata of a dataclass field that is structure.
STATIC = {"static": True}

_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def data_tree(declaring: _Class) -> _Class:
    """Registers a frozen dataclass with JAX as a tree, making one of any other class: a decorator.

    Fields with `STATIC` metadata, or declared as `parameter(..., static=True)`, are structure and
    must be hashable. All others are data; None in place of a number is structure too. Rebuilding an
    instance around tracers runs no checks.
    """
    if "__dataclass_fields__" not in vars(declaring):
        declaring = cast(_Class, dataclasses.dataclass(frozen=True)(declaring))
    fields = dataclasses.fields(declaring)
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    data = tuple(field.name for field in fields if field.name not in static)
    floats = {one.field for one in parameters_of(declaring) if one.kind is float}

    def value(tree: Any, name: str) -> Any:
        found = getattr(tree, name)
        # 1 for 1.0 would otherwise be another type, and so another program.
        return float(found) if type(found) is int and name in floats else found

    def flatten(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [value(tree, name) for name in data], tuple(getattr(tree, name) for name in static)

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, structure = flatten(tree)
        return list(zip(map(jax.tree_util.GetAttrKey, data), leaves, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], leaves: Any) -> Any:
        tree: Any = object.__new__(declaring)
        for name, found in zip((*data, *static), (*leaves, *structure), strict=True):
            object.__setattr__(tree, name, found)
        return tree

    jax.tree_util.register_pytree_with_keys(declaring, flatten_with_keys, unflatten, flatten)
    return declaring


def narrowed(numbers: Any) -> np.ndarray:
    """Numbers as int32, float32 or bool; FlyJaxError for one that these do not hold."""
    array = np.asarray(numbers)
    if array.dtype == bool:
        return array
    narrow = np.float32 if array.dtype.kind == "f" else np.int32
    fits = array.dtype.kind in "iuf"
    if fits and array.size:
        most = MOST_FLOAT if narrow is np.float32 else MOST_INT
        large = np.abs(array[np.isfinite(array)].astype(np.float64))
        fits = bool(large.max(initial=0) <= most)
    if not fits:
        raise FlyJaxError(
            f"A rule or a sampling has the numbers {str(array)[:80]}; they must be whole numbers "
            f"of at most {MOST_INT}, or others of at most {MOST_FLOAT:g}: correct them."
        )
    return array.astype(narrow)


def column(number: Any) -> Any:
    """A number in a shape that broadcasts against [rows, positions]."""
    return number[:, None] if np.ndim(number) == 1 else number


def taken(
    values: Shaped[Array, "rows number ..."], at: Int[Array, "rows ..."]
) -> Shaped[Array, "rows ..."]:
    """Picks what each row has at some of its own places; one beyond its ends reads the nearest.

    `jnp.take_along_axis` would be four times as many operations of a program: it counts negative
    places from the end, and has a value for those that are not there.
    """
    of_each = jax.vmap(lambda row, at: row.at[at].get(mode="clip", wrap_negative_indices=False))
    return of_each(values, at)


def log(number: Any) -> Any:
    """The natural logarithm, -inf of 0; on the host for what is on the host."""
    if isinstance(number, int | float):
        return math.log(number) if number > 0 else -math.inf
    return jnp.log(number)
