"""What a compiled program sends between devices, from its HLO text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from fly_jax.planning.program import Computation, Instruction, Program, frames, parse

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
    """One exchange of a program.

    Attributes:
      kind: as HLO names it.
      shapes: of the results on one device.
      num_bytes: of the results on one device.
      group_size: devices that take part together.
      count: how often it runs.
      axes: of the mesh, along which a group lies; empty where only the group's size is known.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    group_size: int
    count: int
    axes: tuple[str, ...] = ()


def exchanges(hlo: str, num_devices: int, *, unknown_trips: int = 1) -> list[Exchange]:
    """Every exchange of a compiled program, whatever loop or branch it stands in.

    Each counts as often as the loops around it run. Of a conditional every branch is counted, so
    that the sum is an upper bound.

    Args:
      hlo: the text of the optimised module.
      num_devices: that the program runs on.
      unknown_trips: taken for a loop that nothing but data ends.
    """
    program = parse(hlo)
    return [
        _exchange(kind, one, frame.count, num_devices)
        for frame in frames(program, unknown_trips=unknown_trips)
        for kind, one in _within(program, frame.computation)
    ]


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
                for found, inner in _within(program, program.computation(name)):
                    key = (found, str(max((a.shape for a in inner.arrays), key=math.prod)))
                    if key not in spread:
                        spread.add(key)
                        yield found, inner


def _exchange(kind: str, one: Instruction, count: int, num_devices: int) -> Exchange:
    arrays = one.arrays
    # An asynchronous start returns its operands too; the last array is the result.
    if one.opcode.endswith("-start") and len(arrays) > 1:
        arrays = arrays[len(arrays) // 2 :]
    arrays = tuple(array for array in arrays if array.kind in ITEM_BYTES)
    num_bytes = sum(math.prod(array.shape) * ITEM_BYTES[array.kind] for array in arrays)
    shapes = tuple(array.shape for array in arrays)
    return Exchange(kind, shapes, num_bytes, _group_size(one.attributes, num_devices), count)


def _group_size(line: str, num_devices: int) -> int:
    """Devices in one group, in any of the spellings of HLO."""
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", line)
    if listed:
        return listed[1].count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    meshed = re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line)
    if meshed:
        sizes = dict(part.split("=") for part in meshed[1].split(","))
        # A part of an axis is written with what comes before it and its own size: 'x':(2)4.
        parts = (re.split(r":\(\d+\)", name.strip()) for name in meshed[2].split(","))
        return math.prod(int(own[0] if own else sizes[name]) for name, *own in parts)
    pairs = re.search(r"source_target_pairs=", line)
    return 2 if pairs else num_devices
