"""What a compiled program sends between devices, from its HLO text.

XLA's own cost analysis counts the body of a loop once, however often it runs. Here every exchange
counts as often as the loops around it run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = (
    "all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
    "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_EXCHANGE = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([0-9,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIMIT = re.compile(r"s32\[\]\S* constant\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of a program.

    Attributes:
      kind: as HLO names it.
      shapes: of the results on one device.
      num_bytes: of the results on one device.
      group_size: devices that take part together.
      count: how often it runs.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    group_size: int
    count: int


def exchanges(hlo: str, num_devices: int) -> list[Exchange]:
    """Every exchange of a compiled program, whatever loop or branch it stands in.

    Of a conditional every branch is counted, so that the sum is an upper bound.

    Args:
      hlo: the text of the optimised module.
      num_devices: that the program runs on.
    """
    computations, entry = _computations(hlo)
    return list(_walk(computations, entry, 1, num_devices))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            lines.append(line)
    return found, entry


def _walk(
    computations: dict[str, list[str]], name: str, count: int, num_devices: int
) -> Iterator[Exchange]:
    # The compiler may spread one exchange over several fusions, each of which names it.
    spread: set[tuple[str, str]] = set()
    for line in computations.get(name, ()):
        exchange = _EXCHANGE.search(line)
        if exchange:
            yield _exchange(exchange["kind"], exchange["result"], line, count, num_devices)
            continue
        loop = _LOOP.search(line)
        if loop:
            trips = _trips(line, computations.get(loop[1], []))
            yield from _walk(computations, loop[2], count * trips, num_devices)
            continue
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        for inner in called:
            for found in _walk(computations, inner, count, num_devices):
                key = (found.kind, _largest(found))
                if " fusion(" not in line:
                    yield found
                elif key not in spread:
                    spread.add(key)
                    yield found


def _largest(exchange: Exchange) -> str:
    return str(max(exchange.shapes, key=math.prod, default=()))


def _exchange(kind: str, result: str, line: str, count: int, num_devices: int) -> Exchange:
    arrays = _ARRAY.findall(result)
    # An asynchronous start returns its operands too; the last array is the result.
    if f"{kind}-start(" in line and len(arrays) > 1:
        arrays = arrays[len(arrays) // 2 :]
    arrays = [array for array in arrays if array[0] in _ITEM_BYTES]
    shapes = tuple(tuple(int(size) for size in sizes.split(",") if size) for _, sizes in arrays)
    num_bytes = sum(
        math.prod(shape) * _ITEM_BYTES[kind]
        for shape, (kind, _) in zip(shapes, arrays, strict=True)
    )
    return Exchange(kind, shapes, num_bytes, _group_size(line, num_devices), count)


def _group_size(line: str, num_devices: int) -> int:
    """Devices in one group, in any of the three spellings of HLO."""
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", line)
    if listed:
        return listed[1].count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    meshed = re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line)
    if meshed:
        sizes = dict(part.split("=") for part in meshed[1].split(","))
        return math.prod(int(sizes[name.strip()]) for name in meshed[2].split(","))
    pairs = re.search(r"source_target_pairs=", line)
    return 2 if pairs else num_devices


def _trips(line: str, condition: list[str]) -> int:
    """How often a loop runs: as the compiler knows it, or the limit that its counter is below."""
    known = _KNOWN_TRIPS.search(line)
    if known:
        return int(known[1])
    limits = [int(limit) for text in condition for limit in _LIMIT.findall(text)]
    return max(limits, default=1)
