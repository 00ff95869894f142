"""Matrices to int8: one scale for every output, by qwix."""

from __future__ import annotations

import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float

from fly_jax.models.llama import ParameterSpec, scale_name


def quantised(name: str, matrix: Float[Array, "*shape"], spec: ParameterSpec) -> dict[str, Array]:
    """An int8 matrix and the scales of its outputs: the range of int8 is that of its weights.

    Args:
      name: of the parameter.
      matrix: the parameter, or one layer of it.
      spec: its specification, of one layer where the matrix is.

    Returns:
      Both under their names in `parameter_specs`.
    """
    outputs = [index for index, axis in enumerate(spec.axes) if axis not in spec.inputs]
    array = qwix.quantize(matrix.astype(jnp.float32), jnp.int8, channelwise_axes=outputs)
    scale = array.scale.reshape([spec.shape[index] for index in outputs])
    return {name: array.qvalue, scale_name(name): scale}
