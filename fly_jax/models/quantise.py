"""Rounding of matrices to integers, by qwix: as a checkpoint is read, or for a self-draft."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding
from jax.stages import Wrapped
from jaxtyping import Array, Float, Float32, Int8

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import (
    MatrixType,
    ParameterSpec,
    parameter_specs,
    scale_groups,
    scale_of,
)
from fly_jax.models.integers import QArray, dequantize, quantize
from fly_jax.models.llama import Llama, parameter_sharding

SELF = "self:"
# A target's own matrices, rounded to draft for it; embedding, norms and unembedding are shared.
SELF_DRAFTS = {
    "int8": MatrixType(np.dtype(np.int8), outer=False),
    "int4": MatrixType(np.dtype(ml_dtypes.int4), group=64, outer=False),
}


def check_self_draft(matrices: MatrixType | None, *, int8: bool) -> None:
    """Raises FlyJaxError where a target's own draft would be the target itself."""
    if matrices == SELF_DRAFTS["int8"] and int8:
        raise FlyJaxError(
            "self:int8 was given as the draft, and the target's matrices are int8 themselves, so "
            "that it would save nothing; give self:int4, or the target in another type."
        )


def self_draft_type(name: str) -> MatrixType:
    """The type that a draft such as "self:int4" names; raises FlyJaxError where there is none."""
    kind = name.removeprefix(SELF)
    if kind not in SELF_DRAFTS:
        raise FlyJaxError(
            f"There is no draft '{name}'; a target's own matrices are rounded by "
            f"{' or '.join(SELF + one for one in SELF_DRAFTS)}: give one of them."
        )
    return SELF_DRAFTS[kind]


def quantised(
    matrix: Float[Array, "*shape"], spec: ParameterSpec, matrices: MatrixType
) -> tuple[Array, Array]:
    """Rounds a matrix to integers of its weights' range; returns them and their scales."""
    array = _quantised(matrix, spec, matrices)
    scale = array.scale
    if matrices.group is None:
        scale = scale.reshape([spec.shape[index] for index in _outputs(spec)])
    return array.qvalue, scale


def quantised_rows(
    block: Float32[np.ndarray, "outputs inputs"],
) -> tuple[Int8[np.ndarray, "outputs inputs"], Float32[np.ndarray, " outputs"]]:
    """Rounds rows of a matrix to int8, with scales, on the host: the bits of `quantised`."""
    one = np.float32(1)  # XLA multiplies by reciprocals where qwix divides
    scale = np.abs(block).max(axis=1) * (one / np.float32(127.5))  # -128 and 127 are both used
    scale[scale < np.sqrt(np.finfo(np.float32).tiny)] = 1
    rounded = np.rint(block * (one / scale)[:, None])
    return np.clip(rounded, -128, 127).astype(np.int8), scale


def self_draft(target: Llama, matrices: MatrixType, *, held: MatrixType | None = None) -> Llama:
    """Makes a drafter of the target itself, without training: its layers' matrices, rounded.

    Embedding, norms and unembedding are the target's own arrays, so the drafter lies as the target
    does. A layer is rounded at a time, to one of `SELF_DRAFTS`, and kept in the type `held`, if
    that is another: on a CPU only int8 with a scale for each output is fast. The drafter is
    stacked, of an unstacked target too.
    """
    held = held or matrices
    config, layout = target.config, target.layout
    specs = {
        name: ParameterSpec(spec.shape[1:], spec.axes[1:], spec.inputs)
        for name, spec in parameter_specs(config).items()
        if spec.axes[0] == "layers" and spec.inputs
    }
    parameters, wanted = target.outer_parameters(), parameter_specs(config, held)
    rest = {*target.layers} - {*specs} - {*map(scale_of, specs)}
    parameters |= {name: target.stack(name) for name in sorted(rest)}
    for name, spec in specs.items():
        names = (name, scale_of(name))
        both = [wanted[one] for one in names]
        places = tuple(parameter_sharding(layout, one) for one in both)
        stored = tuple(target.stack(one) if one in target.layers else None for one in names)
        # No more than one stack is in memory twice.
        rounded = jax.block_until_ready(_rounding(spec, matrices, held, places)(stored))
        parameters |= dict(zip(names, rounded, strict=True))
    return Llama(config, parameters, layout)


@functools.lru_cache(maxsize=64)
def _rounding(
    spec: ParameterSpec, matrices: MatrixType, held: MatrixType,
    places: tuple[Sharding | Format, ...],
) -> Wrapped:  # fmt: skip
    """The program that rounds a stack of matrices, compiled once for all that are alike."""
    a_layer = functools.partial(_rounded, spec, matrices, held)
    return jax.jit(functools.partial(jax.lax.map, a_layer), out_shardings=places)


def _rounded(
    spec: ParameterSpec, matrices: MatrixType, held: MatrixType, stored: tuple[Array, Array | None]
) -> tuple[Array, Array]:
    """Rounds a layer's matrix (perhaps int8 with scales) to one type; keeps it in another."""
    matrix, scale = stored
    if scale is not None:
        inputs = [index for index, axis in enumerate(spec.axes) if axis in spec.inputs]
        matrix = matrix * jnp.expand_dims(scale, inputs)
    if held.dtype != matrices.dtype:
        matrix = dequantize(_quantised(matrix, spec, matrices))
    return quantised(matrix, spec, held)


def _quantised(matrix: Float[Array, "*shape"], spec: ParameterSpec, matrices: MatrixType) -> QArray:
    wide = matrix.astype(jnp.float32)
    if matrices.group is None:
        return quantize(wide, matrices.dtype, channelwise_axes=_outputs(spec))
    axis, group = scale_groups(spec, matrices.group)
    alone = [index for index in range(len(spec.axes)) if index != axis]
    return quantize(wide, matrices.dtype, channelwise_axes=alone, tiled_axes={axis: group})


def _outputs(spec: ParameterSpec) -> list[int]:
    return [index for index, axis in enumerate(spec.axes) if axis not in spec.inputs]
