"""Which large arrays a compiled program copies: a cache or a stack of matrices, above all.

A round only adds a few entries to a cache and reads each matrix once. Where the compiler copies one
of these arrays whole in every layer, the copying is most of the round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.models.specs import parameter_specs
from fly_jax.planning.hlo import EXCHANGES, ITEM_BYTES
from fly_jax.planning.program import Array, Computation, Instruction, Program, frames, parse
from fly_jax.sharding.rules import Layout

# What hands an array on, or changes some of it where it lies. What a loop or a branch returns is
# looked for inside it.
_IN_PLACE = (
    "bitcast", "call", "conditional", "copy-done", "dynamic-update-slice", "get-tuple-element",
    "optimization-barrier", "parameter", "scatter", "tuple", "while",
)  # fmt: skip
_STARTS = ("copy-start", "async-start")
# The compiler's name of a chip's vector memory in a layout: what is fetched into it is read, and
# not written back.
_VECTOR_MEMORY = "S(1)"


@dataclasses.dataclass(frozen=True)
class Copy:
    """An operation that makes a large array from another of its size.

    Attributes:
      operation: as HLO names it, such as "copy" or "fusion".
      name: of its result in the program.
      shape: of the array on one device.
      num_bytes: of the array on one device.
      count: how often it runs.
      in_loop: within the body of a loop.
      in_branch: within a branch of a conditional.
    """

    operation: str
    name: str
    shape: tuple[int, ...]
    num_bytes: int
    count: int
    in_loop: bool
    in_branch: bool

    @property
    def is_repeated(self) -> bool:
        """It is not made once, on the way in or out, but by a loop or a branch."""
        return self.in_loop or self.in_branch


def copies(hlo: str, shapes: Iterable[Sequence[int]], *, unknown_trips: int = 1) -> list[Copy]:
    """Every copy of an array that has one of these shapes, in whatever order it lies.

    Dimensions of 1 do not count, nor does the order of the others (of which a transposed copy has
    another), nor the type (which a widened copy has changed). Arrays that are made from nothing,
    such as an empty cache, are no copies, nor is what is fetched into a chip's vector memory.

    Args:
      hlo: the text of the optimised module.
      shapes: of the large arrays on one device.
      unknown_trips: taken for a loop that nothing but data ends.
    """
    program, wanted = parse(hlo), {_sizes(shape) for shape in shapes}
    return [
        Copy(
            operation=one.opcode,
            name=one.name,
            shape=array.shape,
            num_bytes=math.prod(array.shape) * ITEM_BYTES.get(array.kind, 1),
            count=frame.count,
            in_loop=frame.in_loop,
            in_branch=frame.in_branch,
        )
        for frame in frames(program, unknown_trips=unknown_trips)
        for one in frame.computation.instructions.values()
        for array in _made(program, frame.computation, one)
        if _sizes(array.shape) in wanted and _reads(frame.computation, one, array)
    ]


def large_shapes(
    layout: Layout | None, config: LlamaConfig, rows: int, capacity: int
) -> set[tuple[int, ...]]:
    """Shapes of what a device holds of a model's cache and of each of its stacks of matrices.

    Args:
      layout: how the model lies; None on one device.
      config: its shape.
      rows: of the cache.
      capacity: its positions.
    """
    arrays: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (CACHE_AXES, cache_shape(config, rows, capacity))
    ]
    arrays += [
        (spec.axes, spec.shape)
        for spec in parameter_specs(config).values()
        if spec.inputs and spec.axes[0] == "layers"
    ]
    return {
        shape if layout is None else layout.sharding(axes, shape).shard_shape(shape)
        for axes, shape in arrays
    }


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _made(program: Program, computation: Computation, one: Instruction) -> Iterator[Array]:
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
    """Whether a result of a fusion is one of its operands, changed where it lies."""
    inside = program.computation(fusion.called[0]) if fusion.called else Computation({}, None)
    one = inside.root
    if one is not None and one.opcode == "tuple":
        one = inside.instructions.get(one.operands[index])
    while one is not None and one.opcode in ("bitcast", "dynamic-update-slice", "scatter"):
        one = inside.instructions.get(one.operands[0])
    return one is not None and one.opcode == "parameter"


def _reads(computation: Computation, one: Instruction, array: Array) -> bool:
    """Whether it is given an array of that size at the least, or collects one."""
    if one.opcode.removesuffix("-start") in EXCHANGES:
        return True
    given = (computation.instructions.get(operand) for operand in one.operands)
    return any(
        math.prod(other.shape) >= math.prod(array.shape)
        for source in given
        if source is not None
        for other in source.arrays
    )
