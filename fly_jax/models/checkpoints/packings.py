"""The packings of quantised matrices in published checkpoints, widened as they are read.

A matrix is several tensors, whose names begin alike, and `quantization_config` says which: integers
or 8-bit floats, less a zero point, times the scale of their group.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from fly_jax.errors import FlyJaxError

Shape = tuple[int, ...]
Matrix = Float[Array, "outputs inputs"]
_FLOATS = ("BF16", "F16", "F32")
_WORD = 32  # bits of the integers that others are packed into
# The place, in an integer of AWQ's, of each of eight neighbours.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """A tensor of a matrix, with the shapes and types that it may have."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A packing of 8-bit floats or integers, with a scale for each matrix, output, or block.

    DeepSeek's `fp8`, Meta's `fbgemm_fp8`, and `compressed-tensors`.
    """

    scale: str = "weight_scale"  # what the scales' names end with
    block: tuple[int, int] | None = None  # [outputs, inputs]; None for each output, or the matrix

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredPart]:
        """The weights, and scales of one of the shapes that these formats have."""
        shapes: tuple[Shape, ...] = ((outputs, 1), (outputs,), (1,), (1, 1), ())
        if self.block is not None:
            shapes = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        return {
            "weight": StoredPart(((outputs, inputs),), ("F8_E4M3", "I8")),
            self.scale: StoredPart(shapes, _FLOATS),
        }

    def widened(self, parts: Mapping[str, Array], outputs: int, inputs: int) -> Matrix:
        """Multiplies the weights by the scales of their blocks, outputs or matrix."""
        scale = parts[self.scale].astype(jnp.float32)
        if self.block is not None:
            for axis, size in enumerate(self.block):
                scale = jnp.repeat(scale, size, axis)
            scale = scale[:outputs, :inputs]
        else:
            scale = scale.reshape(-1, 1)
        return parts["weight"].astype(jnp.float32) * scale


@dataclasses.dataclass(frozen=True)
class Awq:
    """The packing of AWQ's "gemm": 4-bit integers with zero points, eight outputs in one int32."""

    group: int

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredPart]:
        """The weights and zero points in words of eight outputs, and the scales of groups."""
        words, groups = _whole(outputs, 8, "awq"), _whole(inputs, self.group, "awq")
        return {
            "qweight": StoredPart(((inputs, words),), ("I32",)),
            "qzeros": StoredPart(((groups, words),), ("I32",)),
            "scales": StoredPart(((groups, outputs),), _FLOATS),
        }

    def widened(self, parts: Mapping[str, Array], outputs: int, inputs: int) -> Matrix:
        """Unpacks the words in AWQ's order, and scales them by groups of inputs."""

        def unpacked(words: Int32[Array, "rows words"]) -> Int[Array, "rows outputs"]:
            eight = _unpacked(words, 4).reshape(*words.shape, 8)
            return eight[..., jnp.array(_AWQ_PLACES)].reshape(len(words), outputs)

        zeros = jnp.repeat(unpacked(parts["qzeros"]), self.group, 0)
        scales = jnp.repeat(parts["scales"].astype(jnp.float32), self.group, 0)
        return ((unpacked(parts["qweight"]) - zeros) * scales).T


@dataclasses.dataclass(frozen=True)
class Gptq:
    """The packing of GPTQ: integers of 2, 4 or 8 bits, [inputs, outputs], several in one int32."""

    bits: int
    group: int | None  # inputs that share a scale; None for all of them
    is_ordered: bool  # the checkpoint names each input's group
    zero_offset: int  # added to zero points: one, but in `gptq_v2`

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredPart]:
        """The weights in words along inputs, zero points along outputs, scales, inputs' groups."""
        per_word = _WORD // self.bits
        groups = -(-inputs // (self.group or inputs))
        return {
            "qweight": StoredPart(((_whole(inputs, per_word, "gptq"), outputs),), ("I32",)),
            "qzeros": StoredPart(((groups, _whole(outputs, per_word, "gptq")),), ("I32",)),
            "scales": StoredPart(((groups, outputs),), _FLOATS),
            "g_idx": StoredPart(((inputs,),), ("I32",), is_optional=not self.is_ordered),
        }

    def widened(self, parts: Mapping[str, Array], outputs: int, inputs: int) -> Matrix:
        """Unpacks the words, and scales them by the inputs' groups."""
        matrix = _unpacked(parts["qweight"].T, self.bits)
        zeros = _unpacked(parts["qzeros"], self.bits) + self.zero_offset
        of = parts.get("g_idx", jnp.arange(inputs) // (self.group or inputs))
        return (matrix - zeros.T[:, of]) * _of_groups(parts["scales"].T, of)


@dataclasses.dataclass(frozen=True)
class Packed:
    """The "pack-quantized" of `compressed-tensors`: 4 or 8 bits, several inputs in one int32."""

    bits: int
    group: int | None  # inputs that share a scale; None for one of each output
    is_ordered: bool  # the checkpoint names each input's group
    is_symmetric: bool  # without zero points

    def parts(self, outputs: int, inputs: int) -> dict[str, StoredPart]:
        """The weights in words along inputs, scales, inputs' groups, and any zero points."""
        per_word = _WORD // self.bits
        groups = 1 if self.group is None else _whole(inputs, self.group, "pack-quantized")
        words = _whole(inputs, per_word, "pack-quantized")
        found = {
            "weight_packed": StoredPart(((outputs, words),), ("I32",)),
            "weight_scale": StoredPart(((outputs, groups),), _FLOATS),
            "weight_g_idx": StoredPart(((inputs,),), ("I32",), is_optional=not self.is_ordered),
        }
        if not self.is_symmetric:
            rows = -(-outputs // per_word)
            found["weight_zero_point"] = StoredPart(((rows, groups),), ("I32",))
        return found

    def widened(self, parts: Mapping[str, Array], outputs: int, inputs: int) -> Matrix:
        """Unpacks the words around half their range, and scales them by the inputs' groups."""
        half = 1 << (self.bits - 1)
        matrix = _unpacked(parts["weight_packed"], self.bits) - half
        of = parts.get("weight_g_idx", jnp.arange(inputs) // (self.group or inputs))
        if not self.is_symmetric:
            zeros = _unpacked(parts["weight_zero_point"].T, self.bits)[:, :outputs].T - half
            matrix = matrix - zeros[:, of]
        return matrix * _of_groups(parts["weight_scale"], of)


def _unpacked(words: Int32[Array, "rows words"], bits: int) -> Int[Array, "rows numbers"]:
    """The integers of so many bits that lie in words, the lowest bits first."""
    shifts = jnp.arange(0, _WORD, bits, dtype=jnp.int32)
    numbers = jnp.right_shift(words[..., None], shifts) & ((1 << bits) - 1)
    return numbers.reshape(len(words), -1)


def _of_groups(scales: Float[Array, "outputs groups"], of: Int[Array, " inputs"]) -> Matrix:
    """The scale of each input's group; NaN for a group that does not exist."""
    found = scales.astype(jnp.float32).at[:, of].get(mode="fill", fill_value=jnp.nan)
    return jnp.where(of < 0, jnp.nan, found)


def _whole(size: int, of: int, name: str) -> int:
    """The quotient of two sizes; FlyJaxError where a rest is left."""
    number, rest = divmod(size, of)
    if rest:
        raise FlyJaxError(
            f"config.json says quantization {name} in groups of {of}, and a matrix has {size} rows "
            "or columns, which is no multiple: give weights and config.json of the same model."
        )
    return number


# A way to store a matrix of [outputs, inputs]; equal for checkpoints stored alike. `parts` are its
# tensors by the ends of their names, and `widened` makes a float32 matrix of them under `jit`.
Packing = Scaled | Awq | Gptq | Packed


def read_packing(said: Mapping[str, Any], source: str) -> Packing:
    """The packing that a `quantization_config` describes; FlyJaxError for one that is not read."""
    ways: dict[str, Callable[[Mapping[str, Any]], Packing | None]] = {
        "fp8": _fp8, "fbgemm_fp8": lambda _: Scaled(), "awq": _awq, "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
    }  # fmt: skip
    try:
        method = said.get("quant_method")
        if method in ways and (found := ways[method](said)) is not None:
            return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FlyJaxError(
            f"The quantization_config of {source} is not described as expected ({error!r}); "
            "download the file again."
        ) from error
    named = ("quant_method", "bits", "version", "format", "checkpoint_format")
    told = json.dumps({name: said[name] for name in named if name in said})[:200]
    raise FlyJaxError(
        f"{source} describes weights that are quantised in a way that fly_jax does not read "
        f"({told}); it reads fp8, fbgemm_fp8, awq (gemm, 4 bits), gptq (2, 4 or 8 bits) "
        "and compressed-tensors (float, int or packed integers of 4 or 8 bits): give such a "
        "checkpoint, or the one that this was made from."
    )


def _fp8(said: Mapping[str, Any]) -> Packing | None:
    block = said.get("weight_block_size")
    return Scaled() if block is None else Scaled("weight_scale_inv", _pair(block))


def _awq(said: Mapping[str, Any]) -> Packing | None:
    given = _positive(said["bits"]), said.get("zero_point", True), said.get("version", "gemm")
    is_known = given[:2] == (4, True) and str(given[2]).lower() == "gemm"
    return Awq(_positive(said["group_size"])) if is_known else None


def _gptq(said: Mapping[str, Any]) -> Packing | None:
    bits, group = _positive(said["bits"]), said["group_size"]
    form = said.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        return None
    group = None if group == -1 else _positive(group)
    return Gptq(bits, group, bool(said.get("desc_act")), int(form == "gptq"))


def _compressed_tensors(said: Mapping[str, Any]) -> Packing | None:
    groups = list(said["config_groups"].values())
    own = [(one.get("format") or said["format"], one["weights"]) for one in groups]
    kinds = {(form, json.dumps(weights, sort_keys=True)) for form, weights in own}
    sparsity = (said.get("sparsity_config") or {}).get("format", "dense")
    if len(kinds) != 1 or sparsity != "dense" or said.get("transform_config"):
        return None
    form, weights = own[0]
    bits, group = _positive(weights["num_bits"]), weights.get("group_size")
    strategy, is_symmetric = weights["strategy"], weights.get("symmetric", True)
    if form == "pack-quantized" and bits in (4, 8) and strategy in ("group", "channel"):
        group = _positive(group) if strategy == "group" else None
        is_ordered = weights.get("actorder") in (True, "group")
        return Packed(bits, group, is_ordered, is_symmetric)
    is_known = form in ("float-quantized", "int-quantized", "naive-quantized")
    if not is_known or bits != 8 or not is_symmetric:
        return None
    if strategy == "block":
        return Scaled(block=_pair(weights["block_structure"]))
    return Scaled() if strategy in ("channel", "tensor") else None


def _positive(size: Any) -> int:
    if type(size) is not int or size < 1:
        raise ValueError(f"a size of {size}")
    return size


def _pair(block: Any) -> tuple[int, int]:
    rows, columns = map(_positive, block)
    return rows, columns
