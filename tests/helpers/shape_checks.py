"""The shapes that annotations name, checked in every call; the types beside them are mypy's."""

import types
import typing
from collections.abc import Callable
from typing import Any, Union

import jaxtyping
from beartype import beartype


def install() -> None:
    """Checks what is imported of fly_jax from now on; functions that name no shape stay as fast."""
    decorator = jaxtyping.jaxtyped  # which the hook puts on every function

    def selective(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        def decorate(one: Any) -> Any:
            return decorator(one, typechecker=typechecker) if _names_shapes(one) else one

        return decorate

    jaxtyping.jaxtyped = selective
    jaxtyping.install_import_hook("fly_jax", "shape_checks.checked")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A type checker that looks at arrays alone."""
    hints = {name: _of_any_array(hint) for name, hint in function.__annotations__.items()}
    function.__annotations__ = {name: hint for name, hint in hints.items() if hint is not Any}
    return beartype(function) if function.__annotations__ else function


def _names_shapes(one: Any) -> bool:
    """Whether a function or a method does; no class: JAX rebuilds dataclasses around others."""
    function = getattr(one, "fget", None) or getattr(one, "__func__", one)
    if not isinstance(function, types.FunctionType):
        return False
    meant = (_meant(hint, function) for hint in function.__annotations__.values())
    return any(_of_any_array(hint) is not Any for hint in meant)


def _meant(hint: Any, function: types.FunctionType) -> Any:
    try:
        return eval(hint, function.__globals__) if isinstance(hint, str) else hint
    except NameError:  # what only type checkers import, or what is defined later
        return Any


def _of_any_array(hint: Any) -> Any:
    """The annotation with NumPy's arrays for JAX's too, or Any where it names no shape."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint.dtype[Any, hint.dim_str]
    arguments = typing.get_args(hint)
    changed = tuple(_of_any_array(one) for one in arguments)
    if all(one is Any for one in changed):
        return Any
    kept = tuple(old if new is Any else new for old, new in zip(arguments, changed, strict=True))
    origin = typing.get_origin(hint)
    return Union[kept] if origin in (Union, types.UnionType) else origin[kept]  # noqa: UP007
