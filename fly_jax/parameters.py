"""Parameters, declared once by `parameter`; flags, TOML keys and checks derive from that."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fly_jax.errors import FlyJaxError

_KEY = "parameter"
# A count of tokens, of rounds or of windows: beyond any context, and sums of it are no overflow.
MOST_TOKENS = 2**20
ParameterValue = int | float | bool | str | tuple[str, ...]
MOST_INT, MOST_FLOAT = 2**31 - 1, 3.4e38  # of the types that devices compute with
_NOUNS: dict[type, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text",
    tuple: "a list of texts",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A declared parameter."""

    name: str  # of the flag and the TOML key
    field: str  # of the class that declares it
    kind: type  # int, float, bool, str, or tuple for any number of texts
    default: Any
    help: str  # one line, without a full stop
    low: float | None = None  # smallest and largest value
    high: float | None = None
    above: float | None = None  # bounds that the value must not reach
    below: float | None = None
    choices: tuple[str, ...] = ()  # the words allowed; empty for any
    word: str = ""  # allowed in place of a number
    flag: bool = True  # the command line has it; a TOML file always does

    def check(self, value: object) -> None:
        """Raises FlyJaxError for an instance's value; arrays, tracers and None pass."""
        if self.choices or isinstance(value, bool | int | float | str | np.generic):
            self.check_given(value.item() if isinstance(value, np.generic) else value)

    def check_given(self, value: object) -> None:
        """Raises FlyJaxError for a value that is not allowed; None is allowed as a default only."""
        if not self._allows(value):
            raise FlyJaxError(f"{self.name} is {value!r}; it must be {self.described}.")

    def _allows(self, value: Any) -> bool:
        if value is None:
            return self.default is None
        if self.choices:
            return value in self.choices
        if self.kind is tuple:
            return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
        if self.kind in (bool, str) or isinstance(value, str):
            return isinstance(value, self.kind) or (self.word != "" and value == self.word)
        is_number = isinstance(value, int if self.kind is int else int | float)
        return (
            is_number
            and not isinstance(value, bool)
            and (self.kind is int or abs(value) <= MOST_FLOAT)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def described(self) -> str:
        """A description of the values allowed, in words that follow "it must be"."""
        if self.choices:
            return " or ".join(f"'{choice}'" for choice in self.choices)
        bounds = [
            f"{word} {bound if isinstance(bound, int) else format(bound, 'g')}"
            for word, bound in (
                ("above", self.above), ("of at least", self.low),
                ("below", self.below), ("of at most", self.high),
            )
            if bound is not None
        ]  # fmt: skip
        described = " ".join([_NOUNS[self.kind], " and ".join(bounds)]).rstrip()
        return f"{described}, or '{self.word}'" if self.word else described


def parameter(
    default: Any, help: str, *, name: str | None = None, kind: type | None = None,
    low: float | None = None, high: float | None = None, above: float | None = None,
    below: float | None = None, choices: Sequence[str] = (), word: str = "", flag: bool = True,
    static: bool = False,
) -> Any:  # fmt: skip
    """Declares a dataclass field that is a parameter.

    Args:
      default: the value if none is given.
      help: one line, without a full stop.
      name: of the flag and the TOML key; the field's own if not given.
      kind: of the values; that of the default if not given, and a text where that is None.
      low, high, above, below, choices, word, flag: as in `Parameter`.
      static: part of a rule's structure: another value is another program. Numbers are data.
    """
    kind = kind or (str if default is None else type(default))
    declared = Parameter(
        name or "", "", kind, default, help,
        low, high, above, below, tuple(choices), word, flag,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={_KEY: declared, "static": static})


def parameters_of(declaring: type) -> tuple[Parameter, ...]:
    """The parameters that a class declares, in its order."""
    found = []
    for field in dataclasses.fields(declaring):
        declared = typing.cast(Parameter | None, field.metadata.get(_KEY))
        if declared is not None:
            name = declared.name or field.name
            found.append(dataclasses.replace(declared, name=name, field=field.name))
    return tuple(found)


def check_parameters(declared: Any) -> None:
    """Checks all of an instance, in `__post_init__`; FlyJaxError names the first wrong."""
    for one in parameters_of(type(declared)):
        one.check(getattr(declared, one.field))


def values_of(declared: Any) -> dict[str, Any]:
    """The values of an instance's parameters, by their names."""
    return {one.name: getattr(declared, one.field) for one in parameters_of(type(declared))}


def check_keys(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises FlyJaxError for a key that is not known."""
    known = sorted(known)
    for key in sorted(given):
        if key not in known:
            raise FlyJaxError(f"the key {key!r} is unknown; the keys are {', '.join(known)}.")
