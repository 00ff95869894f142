"""The HLO text of a compiled program: what runs how often, what travels, what is copied."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fly_jax.models.architectures import LlamaConfig, parameter_specs
from fly_jax.models.cache import CACHE_AXES, cache_shape, held_caches
from fly_jax.sharding.rules import Layout

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ASSIGNED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_DIRECTION = re.compile(r"direction=(\w+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([0-9,]*)\](\{[^}]*\})?")
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "LT": operator.lt, "GT": operator.gt, "LE": operator.le, "GE": operator.ge, "NE": operator.ne,
    "add": operator.add, "subtract": operator.sub,
}  # fmt: skip
# A loop of more trips is taken to be one that only data ends.
_MOST_TRIPS = 2**10
# Operations that hand a counter on unchanged.
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "optimization-barrier")


class Array(NamedTuple):
    """Type, shape and layout of an array of the program, on one device."""

    kind: str
    shape: tuple[int, ...]
    layout: str


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation: `name = result opcode(inputs), attributes`."""

    name: str
    result: str
    opcode: str
    inputs: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        return tuple(_NAME.findall(self.inputs))

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result: several where it is a tuple."""
        return tuple(
            Array(kind, tuple(int(size) for size in sizes.split(",") if size), layout)
            for kind, sizes, layout in _ARRAY.findall(self.result)
        )

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls, the branches of a conditional in their order."""
        if branches := _BRANCHES.search(self.attributes):
            return tuple(name.strip().lstrip("%") for name in branches[1].split(","))
        return tuple(_CALLED.findall(self.attributes))


class Computation(NamedTuple):
    """A function of the program: its lines by name, in their order, and the one it returns."""

    instructions: dict[str, Instruction]
    root: Instruction | None


class Program(NamedTuple):
    """A whole module: its computations by name, empty where it has none, and which runs first."""

    computations: Mapping[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation that runs, `count` times at most, as called from a place; none is fused."""

    computation: Computation
    count: int
    in_loop: bool
    in_branch: bool


def parse(hlo: str) -> Program:
    """Reads the text of an optimised module, as `compiled.as_text()` gives it."""
    computations = collections.defaultdict[str, Computation](lambda: Computation({}, None))
    entry, name = "", ""
    lines: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
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
    """Yields the computations that run, once for each place that they are called from.

    All branches of a conditional are yielded, with the count of the whole, so that sums over them
    are upper bounds. A loop that only data ends makes `unknown_trips`.
    """

    def of(scope: _Scope, count: int, in_loop: bool, in_branch: bool) -> Iterator[Frame]:
        yield Frame(scope.computation, count, in_loop, in_branch)
        for one in scope.computation.instructions.values():
            if one.opcode == "while":
                trips, inside = _loop(scope, one)
                trips = unknown_trips if trips is None else trips
                if trips:
                    yield from of(inside, count * trips, True, in_branch)
            elif one.opcode == "conditional":
                for name, operand in zip(one.called, one.operands[1:], strict=False):
                    inside = _Scope(program, name, (scope.value(operand),))
                    yield from of(inside, count, in_loop, True)
            elif one.opcode in ("call", "async-start"):
                for name in one.called:
                    given = tuple(map(scope.value, one.operands))
                    yield from of(_Scope(program, name, given), count, in_loop, in_branch)

    yield from of(_Scope(program, program.entry, ()), 1, False, False)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inputs = rest[opening + 1 : closing - 1]
    return Instruction(name, result, rest[:opening], inputs, rest[closing:])


def _closing(text: str, opening: int) -> int:
    """The position after the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


@dataclasses.dataclass(frozen=True)
class _Carried:
    """A slot of a loop, whatever it carries."""

    slot: int


# What is known of a value: a number (a truth is 1 or 0), a slot of a loop, several, or nothing.
_Value = int | _Carried | tuple["_Value", ...] | None


class _Scope:
    """A computation with what is known of its parameters: works out its whole numbers."""

    def __init__(self, program: Program, name: str, given: Sequence[_Value]) -> None:
        self.program = program
        self.computation = program.computations[name]
        self._given = given
        self._known: dict[str, _Value] = {}

    def value(self, name: str) -> _Value:
        """The value of the result of that name, as far as it is known."""
        if name not in self._known:
            one = self.computation.instructions.get(name)
            self._known[name] = None if one is None else self._worked_out(one)
        return self._known[name]

    def result(self) -> _Value:
        """The value of the whole, as far as it is known."""
        root = self.computation.root
        return None if root is None else self.value(root.name)

    def _worked_out(self, one: Instruction) -> _Value:
        if any(array.shape for array in one.arrays) and not one.result.startswith("("):
            return None  # counters are scalars
        if one.opcode == "parameter":
            index = int(one.inputs)
            return self._given[index] if index < len(self._given) else None
        if one.opcode == "constant":
            truth = {"true": "1", "false": "0"}.get(one.inputs, one.inputs)
            return int(truth) if one.arrays and re.fullmatch(r"-?\d+", truth) else None
        values = tuple(map(self.value, one.operands))
        if one.opcode == "get-tuple-element":
            return _element(values[0], int(_INDEX.findall(one.attributes)[0]))
        if one.opcode == "tuple":
            return values
        if one.opcode in _SAME:
            return values[0]
        if one.opcode in ("fusion", "call") and one.called:
            return _Scope(self.program, one.called[0], values).result()
        if one.opcode == "and":  # where one of them ends a loop, what the others say is no matter
            return 0 if 0 in values else None if None in values else 1
        direction = _DIRECTION.search(one.attributes)
        work = _ARITHMETIC.get(direction[1] if direction else one.opcode)
        numbers = [value for value in values if isinstance(value, int)]
        return int(work(*numbers)) if work is not None and len(numbers) == 2 else None


def _element(value: _Value, slot: int) -> _Value:
    return value[slot] if isinstance(value, tuple) and slot < len(value) else None


def _loop(scope: _Scope, one: Instruction) -> tuple[int | None, _Scope]:
    """Counts the trips of a `while` at most (None: only data ends it); also gives its body."""
    names = _LOOP.search(one.attributes)
    condition, body = (names[1], names[2]) if names else ("", "")
    init = scope.value(one.operands[0]) if one.operands else None
    slots = range(len(one.arrays))
    after = _Scope(scope.program, body, (tuple(map(_Carried, slots)),)).result()
    kept = [_element(after, slot) == _Carried(slot) for slot in slots]
    before = [_element(init, slot) for slot in slots]
    inside = tuple(value if same else None for value, same in zip(before, kept, strict=True))
    found = _Scope(scope.program, body, (inside,))
    if known := _KNOWN_TRIPS.search(one.attributes):
        return int(known[1]), found
    # A counter whose start is data is taken to start at 0, the least: no fewer trips than in fact.
    state: _Value = tuple(
        0 if value is None and not same and array.kind != "pred" else value
        for value, same, array in zip(before, kept, one.arrays, strict=True)
    )
    for trips in range(_MOST_TRIPS):
        if _Scope(scope.program, condition, (state,)).result() == 0:
            return trips, found
        state = _Scope(scope.program, body, (state,)).result()
    return None, found


EXCHANGES = (
    "all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
    "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange with its results on one device; `axes` are its group's, empty if unknown."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    group_size: int
    count: int
    axes: tuple[str, ...] = ()


def exchanges(hlo: str, num_devices: int, *, unknown_trips: int = 1) -> list[Exchange]:
    """The exchanges of a compiled program, as often as the loops around them run; see `frames`."""
    program, found = parse(hlo), []
    for frame in frames(program, unknown_trips=unknown_trips):
        for kind, one in _within(program, frame.computation):
            arrays = tuple(array for array in one.arrays if array.kind in ITEM_BYTES)
            # An asynchronous start returns its operands before its results, and perhaps marks.
            if one.opcode.endswith("-start") and kind != "all-reduce":
                arrays = tuple(array for array in arrays if array.kind != "u32" or array.shape)
                arrays = arrays[len(arrays) // 2 :]
            num_bytes = sum(math.prod(array.shape) * ITEM_BYTES[array.kind] for array in arrays)
            shapes = tuple(array.shape for array in arrays)
            size = _group_size(one.attributes, num_devices)
            found.append(Exchange(kind, shapes, num_bytes, size, frame.count))
    return found


def cycles(hlo: str, *, unknown_trips: int = 1) -> int:
    """What a TPU's compiler takes the program's instructions for, in cycles, without exchanges."""
    return sum(
        frame.count * sum(map(int, _CYCLES.findall(one.attributes)))
        for frame in frames(parse(hlo), unknown_trips=unknown_trips)
        for one in frame.computation.instructions.values()
    )


def _within(program: Program, computation: Computation) -> Iterator[tuple[str, Instruction]]:
    """The exchanges of one computation, with their kinds, and those of what it fuses."""
    # The compiler may spread one exchange over several fusions, each of which names it.
    spread: set[tuple[str, str]] = set()
    for one in computation.instructions.values():
        kind = one.opcode.removesuffix("-start")
        if kind in EXCHANGES:
            yield kind, one
        elif one.opcode == "fusion":
            for name in one.called:
                for found, inner in _within(program, program.computations[name]):
                    key = (found, str(max((a.shape for a in inner.arrays), key=math.prod)))
                    if key not in spread:
                        spread.add(key)
                        yield found, inner


def _group_size(line: str, num_devices: int) -> int:
    """Devices in one group, in any of the spellings of HLO."""
    if listed := re.search(r"replica_groups=\{\{([0-9,]*)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line):
        sizes = dict(part.split("=") for part in meshed[1].split(","))
        # A part of an axis is written with the size before it and its own: 'x':(2)4.
        parts = (re.split(r":\(\d+\)", name.strip()) for name in meshed[2].split(","))
        return math.prod(int(own[0] if own else sizes[name]) for name, *own in parts)
    return 2 if "source_target_pairs=" in line else num_devices


# Operations that hand an array on, or change it in place; loops and branches are looked into.
_IN_PLACE = (
    "bitcast", "call", "conditional", "copy-done", "dynamic-update-slice", "get-tuple-element",
    "optimization-barrier", "parameter", "scatter", "slice-start", "tuple", "while",
)  # fmt: skip
_STARTS = ("copy-start", "async-start")
# The compiler's name of a chip's vector memory in a layout: what is fetched into it is read, and
# not written back.
_VECTOR_MEMORY = "S(1)"


@dataclasses.dataclass(frozen=True)
class Copy:
    """An operation, as HLO names it, that makes a large array, on one device, from another."""

    operation: str
    name: str
    shape: tuple[int, ...]
    num_bytes: int
    count: int
    in_loop: bool
    in_branch: bool

    @property
    def is_repeated(self) -> bool:
        """Tells whether a loop or a branch makes it, rather than once on the way in or out."""
        return self.in_loop or self.in_branch


def copies(hlo: str, shapes: Iterable[Sequence[int]], *, unknown_trips: int = 1) -> list[Copy]:
    """The copies of arrays that have one of these shapes, in whatever order of dimensions.

    Dimensions of 1 do not count, nor does the type (which a widened copy has changed). Arrays made
    from nothing, such as an empty cache, are no copies, nor is what a vector memory fetches.
    """
    program, wanted = parse(hlo), {_sizes(shape) for shape in shapes}
    found = []
    for frame in frames(program, unknown_trips=unknown_trips):
        where = frame.count, frame.in_loop, frame.in_branch
        for one in frame.computation.instructions.values():
            for array in _made(program, one):
                if _sizes(array.shape) in wanted and _reads(frame.computation, one, array):
                    num_bytes = math.prod(array.shape) * ITEM_BYTES.get(array.kind, 1)
                    found.append(Copy(one.opcode, one.name, array.shape, num_bytes, *where))
    return found


def large_shapes(
    layout: Layout | None, config: LlamaConfig, rows: int, capacity: int
) -> set[tuple[int, ...]]:
    """The shapes, on one device, of a model's caches and of each of its stacks of matrices."""
    specs = parameter_specs(config).values()
    arrays = [(one.axes, one.shape) for one in specs if one.inputs and one.axes[0] == "layers"]
    arrays += [(CACHE_AXES, cache_shape(one, rows, capacity)) for one in held_caches(config)]
    return {
        shape if layout is None else layout.sharding(axes, shape).shard_shape(shape)
        for axes, shape in arrays
    }


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _made(program: Program, one: Instruction) -> Iterator[Array]:
    """The arrays that an instruction writes anew."""
    if one.opcode in _IN_PLACE:
        return
    # An asynchronous start gives its result first, and then what it is made from.
    arrays = one.arrays[:1] if one.opcode in _STARTS else one.arrays
    for index, array in enumerate(arrays):
        in_place = one.opcode == "fusion" and _updates(program, one, index)
        if not in_place and _VECTOR_MEMORY not in array.layout:
            yield array


def _updates(program: Program, fusion: Instruction, index: int) -> bool:
    """Tells whether a result of a fusion is one of its operands, changed in place."""
    inside = program.computations[next(iter(fusion.called), "")]
    one = inside.root
    if one is not None and one.opcode == "tuple":
        one = inside.instructions.get(one.operands[index])
    while one is not None and one.opcode in ("bitcast", "dynamic-update-slice", "scatter"):
        one = inside.instructions.get(one.operands[0])
    return one is not None and one.opcode == "parameter"


def _reads(computation: Computation, one: Instruction, array: Array) -> bool:
    """Tells whether it is given an array of at least that size, or collects one."""
    if one.opcode.removesuffix("-start") in EXCHANGES:
        return True
    given = (computation.instructions.get(operand) for operand in one.operands)
    arrays = [other for source in given if source is not None for other in source.arrays]
    return any(math.prod(other.shape) >= math.prod(array.shape) for other in arrays)
