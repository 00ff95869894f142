"""Parameters of rules and drafters, declared once where they are used.

A class declares its parameters as dataclass fields made by `parameter`. Flags, TOML keys, the check
of a value and the sentence about a wrong one all derive from that declaration.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Sequence
from typing import Any

from fly_jax.errors import FlyJaxError

_KEY = "parameter"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What is known of one parameter.

    Attributes:
      name: of the flag and the TOML key.
      field: of the class that declares it.
      kind: int, float, bool or str.
      default: the value if none is given.
      help: one line, without a full stop.
      low: smallest value; None for no bound.
      high: largest value; None for no bound.
      above: the value must be larger than this; None for no bound.
      choices: the words allowed; empty for any.
    """

    name: str
    field: str
    kind: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: object) -> None:
        """Checks a value as Python has it; arrays and tracers are data, and pass.

        Raises:
          FlyJaxError: a value of another kind or outside the range.
        """
        if value is None and self.default is None:
            return
        if self.choices:
            if value not in self.choices:
                words = ", ".join(f"'{choice}'" for choice in self.choices)
                raise FlyJaxError(f"{self.name} is {value!r}; it must be one of {words}.")
            return
        if not isinstance(value, bool | int | float | str):
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            float: is_number,
            int: is_number and isinstance(value, int),
            bool: isinstance(value, bool),
            str: isinstance(value, str),
        }[self.kind]
        if not (fits and self._within(value)):
            raise FlyJaxError(f"{self.name} is {value!r}; it must be {self.described}.")

    def _within(self, value: Any) -> bool:
        if self.kind not in (int, float):
            return True
        return (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    @property
    def described(self) -> str:
        """What a value must be, in words that follow "it must be"."""
        if self.choices:
            return " or ".join(f"'{choice}'" for choice in self.choices)
        noun = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (
                ("above", self.above), ("of at least", self.low), ("of at most", self.high),
            )
            if bound is not None
        ]  # fmt: skip
        return " ".join([noun[self.kind], " and ".join(bounds)]).rstrip()


def parameter(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    kind: type | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    static: bool = False,
) -> Any:
    """A dataclass field that is a parameter.

    Args:
      default: the value if none is given.
      help: one line, without a full stop.
      name: of the flag and the TOML key; the field's own if not given.
      kind: of the values; that of the default if not given.
      low: smallest value.
      high: largest value.
      above: the value must be larger than this.
      choices: the words allowed.
      static: part of a rule's structure: another value is another program. Numbers are data.
    """
    declared = Parameter(
        name or "",
        "",
        type(default) if kind is None else kind,
        default,
        help,
        low,
        high,
        above,
        tuple(choices),
    )
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
    """Checks all parameters of an instance; what `__post_init__` calls.

    Raises:
      FlyJaxError: the first value that is not allowed.
    """
    for one in parameters_of(type(declared)):
        one.check(getattr(declared, one.field))
