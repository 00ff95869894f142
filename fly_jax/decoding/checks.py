"""Whether values that were read from a file are what a config may hold."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from fly_jax.errors import FlyJaxError


def check_keys(values: Mapping[str, Any], known: set[str]) -> None:
    """Raises FlyJaxError for a key that is not known."""
    unknown = sorted(set(values) - known)
    if unknown:
        raise FlyJaxError(
            f"the key {unknown[0]!r} is unknown; the keys are {', '.join(sorted(known))}."
        )


def check_type(name: str, value: object, kind: Any) -> None:
    """Raises FlyJaxError for a value of another type; an int will do for a float."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    kinds = typing.get_args(kind) if is_union else (kind,)
    for one in kinds:
        if typing.get_origin(one) is Literal:
            if value in typing.get_args(one):
                return
        elif typing.get_origin(one) is tuple:
            if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
                return
        elif one is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return
        elif isinstance(value, one) and not (one is int and isinstance(value, bool)):
            return
    raise FlyJaxError(f"{name} is {value!r}; it must be {_described(kinds)}.")


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple[str, ...]: "a list of texts",
}


def _described(kinds: tuple[Any, ...]) -> str:
    words: list[str] = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            words += [f"'{choice}'" for choice in typing.get_args(kind)]
        elif kind is not types.NoneType:
            words.append(_WORDS[kind])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
