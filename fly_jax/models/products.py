"""Activations times matrices: of integers with scales, and as a CPU multiplies them fastest."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

# An equation of `einsum`, activations [batch, time, *in], and a matrix.
Matmul = Callable[[str, Array, Array], Array]

# With so many tokens at most, a CPU is faster with the matrix in front of them.
_FEW_TOKENS = 128
_STEPS = (1, 4, 8)  # in which their number grows


def matmul(equation: str, x: Array, matrix: Array, dtype: DTypeLike | None = None) -> Array:
    """The plain product; of `dtype`, or of the activations'."""
    return jnp.einsum(equation, x, matrix.astype(x.dtype), preferred_element_type=dtype)


def product(equation: str, x: Array, matrix: Array, scale: Array | None, multiply: Matmul) -> Array:
    """Activations times a matrix; the outputs of a matrix of integers are scaled, in float32.

    Where groups of inputs have scales of their own, the matrix is scaled as it is read.

    Args:
      equation: of the product.
      x: activations.
      matrix: a parameter.
      scale: of a matrix of integers.
      multiply: how they are multiplied.
    """
    if scale is not None and scale.ndim == matrix.ndim:
        return multiply(equation, x, _scaled(matrix, scale, x.dtype))
    outputs = multiply(equation, x, matrix)
    return outputs if scale is None else (outputs * scale).astype(outputs.dtype)


def with_turned(multiply: Matmul) -> Matmul:
    """The same product of a matrix that lies [*out, *in], by the equation for [*in, *out]."""

    def of_turned(equation: str, x: Array, matrix: Array) -> Array:
        letters, rest = equation.split(",")
        stored, result = rest.split("->")
        turned = sorted(stored, key=lambda letter: letter in letters)  # outputs, then inputs
        return multiply(f"{letters},{''.join(turned)}->{result}", x, matrix)

    return of_turned


def in_front(equation: str, x: Array, matrix: Array, dtype: DTypeLike | None = None) -> Array:
    """`matmul` of a matrix that lies [*out, *in], as XLA's CPU compiler does it fastest.

    Behind a few tokens it would pack the whole matrix before each product; in front of them it
    packs the tokens, best in fours or eights. Without the barrier it turns the product round again.
    """
    inputs, tokens = x.shape[2:], x.shape[0] * x.shape[1]
    if tokens > _FEW_TOKENS:
        return matmul(equation, x, matrix, dtype)
    step = next(one for one in _STEPS if tokens <= one or one == _STEPS[-1])
    flat = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % step), (0, 0)))
    rows = matrix.astype(x.dtype).reshape(-1, flat.shape[1])
    outputs = jnp.matmul(rows, flat.T, preferred_element_type=dtype)
    outputs = jax.lax.optimization_barrier(outputs)[:, :tokens]
    return outputs.T.reshape(*x.shape[:2], *matrix.shape[: matrix.ndim - len(inputs)])


def _scaled(weights: Array, scale: Array, dtype: DTypeLike) -> Array:
    """A matrix of integers, of whose inputs consecutive ones share a scale."""
    for axis, (size, groups) in enumerate(zip(weights.shape, scale.shape, strict=True)):
        scale = jnp.repeat(scale, size // groups, axis=axis) if groups != size else scale
    return weights.astype(dtype) * scale.astype(dtype)
