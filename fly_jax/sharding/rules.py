"""The table from logical axes to mesh axes, and the placement of arrays that follows from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

MeshAxes = tuple[str, ...]
Axes = Sequence[str | None]  # the logical axis of each dimension; None is replicated


def axes_in(entry: str | MeshAxes | None) -> MeshAxes:
    """The mesh axes of one dimension of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The mesh axes over which each logical axis is split, the outermost first.

    A mesh that lacks one of them splits over the others; no mesh axis means replicated. The fields
    are the logical axes of `parameter_specs` and `CACHE_AXES` in `fly_jax.models`.
    """

    vocab: MeshAxes = ()
    q_heads: MeshAxes = ()
    kv_heads: MeshAxes = ()
    ffw: MeshAxes = ()
    embed: MeshAxes = ()
    features: MeshAxes = ()
    head: MeshAxes = ()
    layers: MeshAxes = ()
    rows: MeshAxes = ("data",)
    cache_batch: MeshAxes = ("data",)
    cache_length: MeshAxes = ()


_XY = ("x", "y")
_TENSOR = ShardingRules(
    vocab=_XY, q_heads=_XY, kv_heads=("x",), ffw=_XY, features=_XY, cache_batch=("data", "y")
)
_NARROW = dataclasses.replace(_TENSOR, vocab=("x",), q_heads=("x",), ffw=("x",), features=("x",))


def _caches(name: str, rules: ShardingRules) -> dict[str, ShardingRules]:
    """Variants of rules: the cache by heads and rows, by heads and positions, or by heads."""
    whole = dataclasses.replace(rules, cache_batch=("data",))
    long = dataclasses.replace(whole, cache_length=("y",))
    return {name: rules, f"{name}_long": long, f"{name}_whole": whole}


# "tensor": matrices over the whole mesh. "narrow": over x alone, the same in every column of y.
# "replicated": whole on every device. Over y a cache is split by rows, with "_long" behind the name
# by positions, with "_whole" not at all.
RULES = _caches("tensor", _TENSOR) | _caches("narrow", _NARROW) | {"replicated": ShardingRules()}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of arrays on a mesh; hashable, so static under `jit`."""

    mesh: Mesh | AbstractMesh
    rules: ShardingRules

    def __post_init__(self) -> None:  # what lies by it is placed with automatic axes
        if isinstance(self.mesh, Mesh):
            kinds = (AxisType.Auto,) * self.mesh.devices.ndim
            mesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)
            object.__setattr__(self, "mesh", mesh)

    def spec(self, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
        """The mesh axes of each dimension, by their logical names.

        A mesh axis is used once per array, by the first dimension that asks for it. A dimension
        that does not divide loses its last mesh axes until it does, and is replicated at the worst.
        """
        kept = (kept for kept, _ in self._assign(axes, shape))
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in kept))

    def sharding(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """The `spec` on the mesh, as `device_put` and `jit` take it."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def shard_bytes(self, axes: Axes, shape: Sequence[int], itemsize: int) -> int:
        """Bytes that one device holds of an array."""
        split = sum((kept for kept, _ in self._assign(axes, shape)), ())
        return math.prod(shape) * itemsize // self.devices(split)

    def splits_inputs(self, spec: Any) -> bool:
        """Tells whether the inputs of a matrix of `parameter_specs` lie on several devices."""
        kept = zip(spec.axes, self._assign(spec.axes, spec.shape), strict=True)
        return any(axis in spec.inputs for axis, (names, _) in kept if names)

    def axes_of(self, axis: str, size: int) -> MeshAxes:
        """The mesh axes over which one dimension is split, on its own."""
        return next(self._assign((axis,), (size,)))[0]

    def place(self, value: np.ndarray, axes: Axes) -> Array:
        """Puts a host array on the mesh; every process has all of it and fills its own devices."""
        sharding = self.sharding(axes, value.shape)
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def constrain(self, x: Array, axes: Axes) -> Array:
        """Tells the compiler, within `jit`, how an intermediate array lies."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def fallbacks(self, specs: Mapping[str, Any]) -> list[str]:
        """Lines on the dimensions that do not divide as the rules ask, of `parameter_specs`."""
        names: dict[str, list[str]] = {}
        for name, spec in specs.items():
            parts = zip(spec.axes, spec.shape, self._assign(spec.axes, spec.shape), strict=True)
            for axis, size, (kept, lost) in parts:
                if lost:
                    wanted = self.devices(kept + lost)
                    instead = f"split over {self.devices(kept)}" if kept else "replicated"
                    reason = (
                        f"{axis} of {size} does not divide over {wanted} devices "
                        f"({', '.join(kept + lost)}), {instead}"
                    )
                    names.setdefault(reason, []).append(name)
        return [f"{', '.join(some)}: {reason}" for reason, some in names.items()]

    def _assign(self, axes: Axes, shape: Sequence[int]) -> Iterator[tuple[MeshAxes, MeshAxes]]:
        """The mesh axes of each dimension, and those lost because it does not divide."""
        used: set[str] = set()
        for axis, size in zip(axes, shape, strict=True):
            asked = axes_in(getattr(self.rules, axis)) if axis is not None else ()
            free = tuple(name for name in asked if self.devices((name,)) > 1 and name not in used)
            count = len(free)
            while size % self.devices(free[:count]):
                count -= 1
            used.update(free[:count])
            yield free[:count], free[count:]

    def devices(self, names: MeshAxes) -> int:
        """The number of devices along these axes of the mesh together."""
        return math.prod(self.mesh.shape.get(name, 1) for name in names)
