"""Products of integers: of activations that are rounded token by token."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from fly_jax.shapes import Index

try:
    from qwix import QArray as QArray
    from qwix import dequantize as dequantize
    from qwix import quantize as quantize
except ImportError:  # older ones have them only here; tpu-inference asks for one of them
    from qwix.pallas import QArray as QArray
    from qwix.pallas import dequantize as dequantize
    from qwix.pallas import quantize as quantize

# Up to so many tokens the matrix, of int8, is in front of them: it is not packed.
_FEW_INTEGERS = 24
_LONG_ROW = 4096  # inputs; longer rows of integers are not read faster
_COLUMNS = {jnp.dtype(jnp.int8): 4, jnp.dtype(jnp.uint8): 8}  # tokens multiplied at a time
_TILE = 32  # rows of int8 that lie together in a TPU's memory
_FEW_ROWS = 256  # that are read one after the other sooner than the matrix is copied
_SIGN = 128  # what stands in a uint8 for 0

Numbers = TypeVar("Numbers", Array, np.ndarray)
Matrix = Int8[Array, "*out_in"] | UInt8[Array, "*out_in"]


@functools.cache
def multiplies_unsigned() -> bool:
    """Tells whether programs run on a CPU that multiplies uint8 by int8 the fastest.

    One with AVX-512 VNNI does; AMX has instructions for int8 by int8 as well. Elsewhere XLA has no
    fast product of the first kind. A machine that does not say what it has is taken to have none.
    """
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    return jax.default_backend() == "cpu" and "avx512_vnni" in text and "amx_int8" not in text


def unsigned(matrix: Numbers) -> Numbers:
    """The matrix, of int8, with 128 added to each number: uint8."""
    return matrix.view(jnp.uint8) ^ np.uint8(_SIGN)


def signed(matrix: Numbers) -> Numbers:
    """Undoes `unsigned`; returns any other matrix as it is."""
    return (matrix ^ np.uint8(_SIGN)).view(jnp.int8) if matrix.dtype == jnp.uint8 else matrix


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for matrices that are alike
def of_integers(
    x: Float[Array, "rows time *in"], matrix: Matrix | Sequence[Matrix],
    scale: Float32[Array, "*out"] | Sequence[Float32[Array, "*out"]],
    dtype: DTypeLike | None = None, chosen: Index | None = None,
) -> Float[Array, "rows time *out"]:  # fmt: skip
    """Multiplies activations, rounded to int8 with a scale for each token, by a matrix [*out, *in].

    The matrix is int8, or `unsigned`; or the `chosen` one of several, which is not copied. The sums
    are integers, and so exact: a token's result depends neither on the number of others nor on
    that. XLA's CPU compiler is fast with two rows and more.
    """
    several: Any = ([matrix], [scale]) if chosen is None else (matrix, scale)
    matrices, scales = several
    tokens = x.shape[0] * x.shape[1]
    rows = quantize(x.reshape(tokens, -1).astype(jnp.float32), jnp.int8, channelwise_axes=[0])
    # Several tokens are multiplied at a time, and long rows are read up to twice as fast as short:
    # columns of padding have tokens again, each for another output of a row, with zeros beside it.
    kind = matrices[0].dtype
    columns = _COLUMNS[kind]
    room = 1 if rows.shape[1] >= _LONG_ROW else max(columns // tokens, 1)
    blocks = math.gcd(scales[0].size, 2 ** (room.bit_length() - 1))
    fill = -tokens % (columns // blocks if blocks > 1 else 4)
    integers = jnp.pad(rows.qvalue, ((0, fill), (0, 0)))
    if blocks > 1:
        few, inputs = integers.shape

        def place(block: Index, found: Array) -> Array:
            return jax.lax.dynamic_update_slice(found, integers, (block * few, block * inputs))

        # By a loop: the compiler fuses a `where` with the rounding, which it then does for each
        # place, zeros included.
        nothing = jnp.zeros((columns, blocks * inputs), jnp.int8)
        integers = jax.lax.fori_loop(0, blocks, place, nothing)
    is_wide = tokens > _FEW_INTEGERS and kind == jnp.int8
    # What 128 too many in each number of the matrix adds to a token's sums; exact in float32.
    surplus = _SIGN * rows.qvalue.astype(jnp.float32).sum(axis=1).astype(jnp.int32)
    surplus = jnp.int32(0) if kind == jnp.int8 else surplus

    @jax.jit  # traced once, not for each matrix
    def of(matrix: Array, scale: Array, integers: Array, of_tokens: Array, surplus: Array) -> Array:
        lying, scale = matrix.reshape(-1, integers.shape[1]), scale.reshape(-1)
        if is_wide:
            sums = _dot(integers, lying)[:tokens] * scale * of_tokens
            return jax.lax.optimization_barrier(sums)
        sums = _dot(lying, integers).reshape(len(scale), -1)[:, :tokens] - surplus
        return jax.lax.optimization_barrier(sums * scale[:, None] * of_tokens.T)

    each = [functools.partial(of, *one) for one in zip(matrices, scales, strict=True)]
    which = jnp.int32(0) if chosen is None else chosen
    outputs = jax.lax.switch(which, each, integers, rows.scale, surplus)
    outputs = outputs if is_wide else outputs.T
    return outputs.reshape(*x.shape[:2], *scales[0].shape).astype(dtype or x.dtype)


def behind(
    equation: str, x: Float[Array, "rows time *in"], matrix: Int8[Array, "*size"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "rows time *out"]:  # fmt: skip
    """Multiplies as `of_integers`, but for the outputs' scale, by a matrix that lies [*in, *out].

    So TPUs multiply fastest. The equation is that of the product.
    """
    # Digits that the type of x lacks, and the compiler may keep, would become other integers.
    kept = jnp.finfo(x.dtype)
    wide = jax.lax.reduce_precision(x.astype(jnp.float32), kept.nexp, kept.nmant)
    rows = quantize(wide, jnp.int8, channelwise_axes=[0, 1])
    sums = jnp.einsum(equation, rows.qvalue, matrix, preferred_element_type=jnp.int32)
    scale = rows.scale.reshape(*x.shape[:2], *(1,) * (sums.ndim - 2))
    return (sums * scale).astype(dtype or x.dtype)


def rows_by_tiles(
    matrix: Int8[Array, "rows size"], which: Int32[Array, "*shape"]
) -> Int8[Array, "*shape size"]:
    """The rows of a matrix with these numbers, one after the other, by the tiles of a TPU's memory.

    For a lookup of all at once the compiler copies the matrix, to tiles of fewer rows.
    """
    if len(matrix) % _TILE or which.size > _FEW_ROWS:
        return matrix[which]
    tiles = matrix.reshape(-1, _TILE, matrix.shape[1])

    def row(number: Int32[Array, ""]) -> Int8[Array, " size"]:
        tile = jax.lax.dynamic_index_in_dim(tiles, number // _TILE, keepdims=False)
        return jnp.where(jnp.arange(_TILE)[:, None] == number % _TILE, tile, 0).sum(0, jnp.int8)

    return jax.lax.map(row, which.reshape(-1)).reshape(*which.shape, -1)


def _dot(
    one: Int8[Array, "outputs inputs"] | UInt8[Array, "outputs inputs"],
    other: Int8[Array, "columns inputs"],
) -> Int32[Array, "outputs columns"]:
    if one.dtype == jnp.uint8:
        return _unsigned_dot_p.bind(one, other)
    return jax.lax.dot_general(one, other, (((1,), (1,)), ((), ())), None, jnp.int32)


# A product of uint8 by int8: `lax.dot_general` would widen both to int32 first.
_unsigned_dot_p = Primitive("unsigned_dot")
_unsigned_dot_p.def_abstract_eval(
    lambda one, other: jax.core.ShapedArray((one.shape[0], other.shape[0]), jnp.dtype(jnp.int32))
)


def _lower_dot(ctx: mlir.LoweringRuleContext, one: ir.Value, other: ir.Value) -> list[ir.Value]:
    numbers = stablehlo.DotDimensionNumbers.get([], [], [1], [1])
    kind = ir.RankedTensorType.get(ctx.avals_out[0].shape, ir.IntegerType.get_signless(32))
    return [stablehlo.dot_general(kind, one, other, numbers)]


mlir.register_lowering(_unsigned_dot_p, _lower_dot)
