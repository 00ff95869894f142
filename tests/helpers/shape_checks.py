"""The shapes that annotations name, checked in every call; the types beside them are mypy's."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Union

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A type checker for `jaxtyping.install_import_hook` that looks at arrays alone."""
    hints = {name: _of_any_array(hint) for name, hint in function.__annotations__.items()}
    shapes = {name: hint for name, hint in hints.items() if hint is not Any}
    # JAX rebuilds dataclasses around whatever stands for their arrays: axes, shardings, objects.
    if not shapes or function.__name__ == "__init__":
        return function
    function.__annotations__ = shapes
    return beartype(function)


def _of_any_array(hint: Any) -> Any:
    """The annotation with NumPy's arrays for JAX's too, or Any where it names no shape."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return hint.dtype[Any, hint.dim_str]
    arguments = typing.get_args(hint)
    changed = tuple(_of_any_array(one) for one in arguments)
    if all(one is Any for one in changed):
        return Any
    kept = tuple(old if new is Any else new for old, new in zip(arguments, changed, strict=True))
    origin = typing.get_origin(hint)
    return Union[kept] if origin in (Union, types.UnionType) else origin[kept]  # noqa: UP007
