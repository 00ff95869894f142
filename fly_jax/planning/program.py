"""A compiled program as its HLO text says it: what runs, how often, within which loop or branch.

XLA's own cost analysis counts the body of a loop once, however often it runs. Here the trips of a
loop are worked out from its counter: where it starts, what it is compared with, and its step.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ASSIGNED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"direction=(\w+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([0-9,]*)\](\{[^}]*\})?")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
# What hands its operand on, as far as a counter is concerned.
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type, shape and layout of an array of the program, on one device."""

    kind: str
    shape: tuple[int, ...]
    layout: str


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: of its result.
      result: type of the result, as it is written.
      opcode: such as "dynamic-update-slice".
      inputs: what stands between the parentheses.
      attributes: what follows them.
    """

    name: str
    result: str
    opcode: str
    inputs: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of what it is given."""
        return tuple(_NAME.findall(self.inputs))

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Of the result: several where it is a tuple."""
        return tuple(
            Array(kind, tuple(int(size) for size in sizes.split(",") if size), layout)
            for kind, sizes, layout in _ARRAY.findall(self.result)
        )

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls, the branches of a conditional in their order."""
        branches = _BRANCHES.search(self.attributes)
        if branches:
            return tuple(name.strip().lstrip("%") for name in branches[1].split(","))
        return tuple(_CALLED.findall(self.attributes))


@dataclasses.dataclass(frozen=True)
class Computation:
    """One function of the program.

    Attributes:
      instructions: by name, in the order in which they stand.
      root: the one that gives its result.
    """

    instructions: dict[str, Instruction]
    root: Instruction | None


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole module.

    Attributes:
      computations: by name.
      entry: the one that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    def computation(self, name: str) -> Computation:
        """The one of that name; an empty one where the text has none."""
        return self.computations.get(name, Computation({}, None))


@dataclasses.dataclass(frozen=True)
class Frame:
    """One computation that runs, as it is called from one place; what is fused is none.

    Attributes:
      computation: what runs.
      count: how often, at most.
      in_loop: within the body of a loop.
      in_branch: within a branch of a conditional.
    """

    computation: Computation
    count: int
    in_loop: bool
    in_branch: bool


def parse(hlo: str) -> Program:
    """Reads the text of an optimised module, as `compiled.as_text()` gives it."""
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    lines: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name, lines, root = header[2], {}, None
            entry = name if header[1] else entry
            continue
        if line.startswith("}") and name:
            computations[name] = Computation(lines, root or next(reversed(lines.values()), None))
            name = ""
        assigned = _ASSIGNED.match(line) if name else None
        if assigned:
            instruction = _instruction(assigned[2], line[assigned.end() :])
            lines[instruction.name] = instruction
            root = instruction if assigned[1] else root
    return Program(computations, entry)


def frames(program: Program, *, unknown_trips: int = 1) -> Iterator[Frame]:
    """Every computation that runs, once for each place that it is called from.

    Of a conditional every branch is given, with the count of the whole, so that what is summed
    over them is an upper bound.

    Args:
      program: what to go through.
      unknown_trips: taken for a loop that nothing but data ends.
    """
    yield from _frames(_Scope(program, program.entry, ()), 1, False, False, unknown_trips)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        name, result, rest[:opening], rest[opening + 1 : closing - 1], rest[closing:]
    )


def _closing(text: str, opening: int) -> int:
    """The position after the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _frames(
    scope: _Scope, count: int, in_loop: bool, in_branch: bool, unknown_trips: int
) -> Iterator[Frame]:
    yield Frame(scope.computation, count, in_loop, in_branch)
    for one in scope.computation.instructions.values():
        if one.opcode == "while":
            loop = _Loop(scope, one)
            trips = unknown_trips if loop.trips is None else loop.trips
            if trips:
                yield from _frames(loop.inside, count * trips, True, in_branch, unknown_trips)
        elif one.opcode == "conditional":
            for name, operand in zip(one.called, one.operands[1:], strict=False):
                inside = _Scope(scope.program, name, (scope.value(operand),))
                yield from _frames(inside, count, in_loop, True, unknown_trips)
        elif one.opcode in ("call", "async-start"):
            for name in one.called:
                given = tuple(scope.value(operand) for operand in one.operands)
                inside = _Scope(scope.program, name, given)
                yield from _frames(inside, count, in_loop, in_branch, unknown_trips)


@dataclasses.dataclass(frozen=True)
class _Counter:
    """A number that a loop carries, and what has been added to it."""

    slot: int
    added: int = 0


@dataclasses.dataclass(frozen=True)
class _State:
    """All that a loop carries."""


# What is known of a value: a number, one of a loop, several, or nothing.
_Value = int | _Counter | _State | tuple["_Value", ...] | None


class _Scope:
    """A computation with what is known of its parameters: works out its whole numbers."""

    def __init__(self, program: Program, name: str, given: Sequence[_Value]) -> None:
        self.program = program
        self.computation = program.computation(name)
        self._given = given
        self._known: dict[str, _Value] = {}

    def value(self, name: str) -> _Value:
        """What is known of the result of that name."""
        if name not in self._known:
            one = self.computation.instructions.get(name)
            self._known[name] = None if one is None else self._worked_out(one)
        return self._known[name]

    def result(self) -> _Value:
        """What is known of the result of the whole."""
        root = self.computation.root
        return None if root is None else self.value(root.name)

    def within(self, one: Instruction) -> _Scope:
        """What a fusion or call runs."""
        given = tuple(self.value(operand) for operand in one.operands)
        return _Scope(self.program, one.called[0], given)

    def _worked_out(self, one: Instruction) -> _Value:
        if any(array.shape for array in one.arrays) and not one.result.startswith("("):
            return None  # counters are scalars
        if one.opcode == "parameter":
            index = int(one.inputs)
            return self._given[index] if index < len(self._given) else None
        if one.opcode == "constant":
            is_number = one.arrays and re.fullmatch(r"-?\d+", one.inputs)
            return int(one.inputs) if is_number else None
        if one.opcode == "get-tuple-element":
            at = _INDEX.search(one.attributes)
            return _element(self.value(one.operands[0]), int(at[1]) if at else 0)
        if one.opcode == "tuple":
            return tuple(self.value(operand) for operand in one.operands)
        if one.opcode in _SAME:
            return self.value(one.operands[0])
        if one.opcode in ("add", "subtract"):
            first, second = (self.value(operand) for operand in one.operands)
            return _sum(first, second, -1 if one.opcode == "subtract" else 1)
        if one.opcode in ("fusion", "call") and one.called:
            return self.within(one).result()
        return None


def _element(value: _Value, index: int) -> _Value:
    if isinstance(value, _State):
        return _Counter(index)
    return value[index] if isinstance(value, tuple) and index < len(value) else None


def _sum(first: _Value, second: _Value, sign: int) -> _Value:
    if isinstance(first, int) and isinstance(second, int):
        return first + sign * second
    if isinstance(first, _Counter) and isinstance(second, int):
        return _Counter(first.slot, first.added + sign * second)
    if isinstance(first, int) and isinstance(second, _Counter) and sign > 0:
        return _Counter(second.slot, second.added + first)
    return None


class _Loop:
    """A `while` in its place.

    Attributes:
      trips: how often it runs at most; None where only data says that.
      inside: its body, with what is known of what it carries unchanged.
    """

    trips: int | None
    inside: _Scope

    def __init__(self, scope: _Scope, one: Instruction) -> None:
        names = _LOOP.search(one.attributes)
        condition, body = (names[1], names[2]) if names else ("", "")
        self._init = scope.value(one.operands[0]) if one.operands else None
        self._after = _Scope(scope.program, body, (_State(),)).result()
        known = _KNOWN_TRIPS.search(one.attributes)
        if known:
            self.trips = int(known[1])
        else:
            bounds = list(_bounds(_Scope(scope.program, condition, (_State(),))))
            counts = [self._count(*bound) for bound in bounds]
            # A loop that several things end runs as often as the first of them lets it.
            self.trips = min((count for count in counts if count is not None), default=None)
        self.inside = _Scope(scope.program, body, (self._unchanged(),))

    def _unchanged(self) -> _Value:
        """What the loop carries, without what it changes."""
        if not isinstance(self._init, tuple):
            return None
        return tuple(
            value if _element(self._after, slot) == _Counter(slot) else None
            for slot, value in enumerate(self._init)
        )

    def _count(self, first: _Value, direction: str, second: _Value) -> int | None:
        """Trips while `first` compares so with `second`, one a counter, the other a limit."""
        limit = self._constant(second)
        if limit is None or not isinstance(first, _Counter):
            limit, first, direction = self._constant(first), second, _MIRRORED.get(direction, "")
        if limit is None or not isinstance(first, _Counter):
            return None
        start = _element(self._init, first.slot)
        # A counter whose start is data starts at 0 at the least: more trips than there will be.
        begin = (start if isinstance(start, int) else 0) + first.added
        after = _element(self._after, first.slot)
        is_counted = isinstance(after, _Counter) and after.slot == first.slot and after.added != 0
        step = after.added if is_counted and isinstance(after, _Counter) else 1
        if direction in ("LT", "LE") or (direction == "NE" and step > 0):
            away = limit - begin + (direction == "LE")
        elif direction in ("GT", "GE", "NE"):
            away, step = begin - limit + (direction == "GE"), -step
        else:
            return None
        return max(-(-away // step), 0) if step > 0 else None

    def _constant(self, value: _Value) -> int | None:
        """A number, or one that the loop carries unchanged."""
        if isinstance(value, _Counter) and _element(self._after, value.slot) == _Counter(
            value.slot
        ):
            start = _element(self._init, value.slot)
            return start + value.added if isinstance(start, int) else None
        return value if isinstance(value, int) else None


def _bounds(scope: _Scope) -> Iterator[tuple[_Value, str, _Value]]:
    """What a loop's condition compares, where all of it has to hold."""
    root = scope.computation.root
    pending = [] if root is None else [root.name]
    while pending:
        one = scope.computation.instructions.get(pending.pop())
        if one is None:
            continue
        direction = _DIRECTION.search(one.attributes)
        if one.opcode == "compare" and direction:
            first, second = (scope.value(operand) for operand in one.operands)
            yield first, direction[1], second
        elif one.opcode == "and":
            pending += one.operands
        elif one.opcode == "fusion" and one.called:
            yield from _bounds(scope.within(one))
