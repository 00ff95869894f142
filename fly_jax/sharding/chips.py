"""Accelerators by name, from chips.toml, and the time of an exchange by their figures."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fly_jax.errors import FlyJaxError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """An accelerator and the network between several; bandwidths are in bytes per second."""

    name: str
    kinds: tuple[str, ...]  # beginnings of JAX's `device_kind`
    memory_bytes: float  # what a program may use
    memory_bandwidth: float
    flops: float  # bfloat16 operations per second
    link_bandwidth: float  # along one axis of a mesh (on a ring, both ways), or to the switch
    step_seconds: float  # latency of one hop on a torus, or of one pass through the switch
    vector_memory: float  # bytes that stay between two operations, in it or in the last cache
    integer_flops: float = 0.0  # of int8 by int8; 0 where int8 matrices are widened
    ring: int = 1  # an axis of a multiple of so many chips is a ring; a shorter one has two ends
    slices: tuple[str, ...] = ()  # shapes that it is sold in; empty for one behind a switch
    domain: int = 0  # chips behind one switch; 0 where there is none
    network_bandwidth: float = 0.0  # of what it sends beyond its switch
    network_seconds: float = 0.0  # latency there

    @property
    def is_tpu(self) -> bool:
        """Tells whether libtpu has a compiler for it."""
        return bool(self.slices)

    def exchange_seconds(
        self, kind: str, num_bytes: float, sizes: Sequence[int], stride: int = 1
    ) -> float:
        """Time of one exchange (as HLO names it) between the devices along some axes of the mesh.

        An all-reduce is a reduce-scatter and an all-gather. Each moves all but a chip's own share:
        half of the way around a ring, in both directions at once, or along all of an axis with two
        ends, to which all comes from one side. Behind switches it passes the switch with what is
        exchanged within, and then the network, where every chip passes on the share left to it.

        `num_bytes` are of the whole result on one device, and `stride` is devices from one of a
        group to the next: those along the axes inside.
        """
        sizes = [size for size in sizes if size > 1]
        if not sizes:
            return 0.0
        phases = 2 if kind == "all-reduce" else 1
        count = math.prod(sizes)
        if not self.is_tpu:
            return phases * self._switched_seconds(kind, num_bytes, count, stride)
        rings = [size % self.ring == 0 for size in sizes]
        steps = sum(size // 2 if one else size - 1 for size, one in zip(sizes, rings, strict=True))
        bandwidth = self.link_bandwidth * sum(1.0 if one else 0.5 for one in rings)
        moved = num_bytes * (count - 1) / count / bandwidth
        if kind == "reduce-scatter":  # of which the result is one chip's share
            moved *= count
        elif kind == "all-to-all":  # half of what each chip has passes the middle of an axis
            moved = max(moved, num_bytes * max(sizes) / 4 * len(sizes) / bandwidth)
        return phases * (steps * self.step_seconds + moved)

    def _switched_seconds(self, kind: str, num_bytes: float, count: int, stride: int) -> float:
        """The seconds of one phase of an exchange of `count` chips, over one switch or more."""
        near = min(count, max(self.domain // stride, 1)) if self.domain else count
        switches = -(-count // near)
        seconds = 0.0
        if near > 1:
            seconds += self.step_seconds + num_bytes * (near - 1) / near / self.link_bandwidth
        if switches > 1:
            # In an all-to-all every chip has something of its own for every other.
            share = num_bytes if kind == "all-to-all" else num_bytes / near
            away = share * (switches - 1) / switches
            seconds += self.network_seconds + away / self.network_bandwidth
        return seconds


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _chip(name: str, like: str = "", **own: Any) -> Chip:
    """A chip of its own fields, and those of the chip that it is like."""
    fields = _TABLES.get(like, {}) | own
    fields |= {key: tuple(fields[key]) for key in ("kinds", "slices") if key in fields}
    return Chip(name=name, **fields)


CHIPS = {name: _chip(name, **own) for name, own in _TABLES.items()}


def chip_named(name: str) -> Chip:
    """The chip of that name; raises FlyJaxError where there is none."""
    if name not in CHIPS:
        raise FlyJaxError(
            f"There is no chip '{name}'; the chips are {', '.join(CHIPS)}: name one of them."
        )
    return CHIPS[name]


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a `device_kind` of JAX; None for a CPU, or one whose figures are unknown."""
    named = {kind: chip for chip in CHIPS.values() for kind in chip.kinds}
    matches = [kind for kind in named if device_kind.startswith(kind)]
    return named[max(matches, key=len)] if matches else None


def group_of(mesh: Mapping[str, int], names: Sequence[str]) -> tuple[list[int], int]:
    """The sizes of neighbouring axes of a mesh (outermost first), and the stride of their group."""
    axes = list(mesh)
    own = [name for name in axes if name in names]
    inside = axes[axes.index(own[-1]) + 1 :] if own else []
    return [mesh[name] for name in own], math.prod(mesh[name] for name in inside)
