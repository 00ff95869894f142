"""The parameters of a model: their names, shapes, logical axes, and the types of matrices."""

from __future__ import annotations

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig
from fly_jax.sharding.rules import Layout


@dataclasses.dataclass(frozen=True)
class MatrixType:
    """Matrices of integers, with scales.

    Attributes:
      dtype: of the integers.
      group: so many consecutive inputs share a scale, or the largest divisor of them that the last
        axis of the inputs takes; None for one scale for every output.
      outer: the embedding and the unembedding are integers, too.
    """

    dtype: np.dtype
    group: int | None = None
    outer: bool = True


INT8 = MatrixType(np.dtype(np.int8))
SELF = "self:"
# A target's own matrices, rounded to draft for it; embedding, norms and unembedding are shared.
SELF_DRAFTS = {
    "int8": MatrixType(np.dtype(np.int8), outer=False),
    "int4": MatrixType(np.dtype(ml_dtypes.int4), group=64, outer=False),
}


def check_self_draft(matrices: MatrixType | None, *, int8: bool) -> None:
    """Checks that a target's own draft is another model than the target, which may be int8.

    Raises:
      FlyJaxError: it would be the same.
    """
    if matrices == SELF_DRAFTS["int8"] and int8:
        raise FlyJaxError(
            "self:int8 was given as the draft, and the target's matrices are int8 themselves, so "
            "that it would save nothing; give self:int4, or the target in another type."
        )


def self_draft_type(name: str) -> MatrixType:
    """The type that a draft such as "self:int4" names.

    Raises:
      FlyJaxError: there is none.
    """
    kind = name.removeprefix(SELF)
    if kind not in SELF_DRAFTS:
        raise FlyJaxError(
            f"There is no draft '{name}'; a target's own matrices are rounded by "
            f"{' or '.join(SELF + one for one in SELF_DRAFTS)}: give one of them."
        )
    return SELF_DRAFTS[kind]


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One parameter.

    Attributes:
      shape: size of each axis.
      axes: logical name of each axis.
      inputs: the axes that a product with it sums over; none for norms and scales.
      dtype: of a parameter that has its own; None is the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    dtype: np.dtype | None = None


def parameter_specs(
    config: LlamaConfig, matrices: MatrixType | None = None
) -> dict[str, ParameterSpec]:
    """Every parameter of a model, by its attribute name. Matrices are stored [in, out].

    A model that has been unstacked for a CPU holds them otherwise (`Llama.unstacked`).

    Args:
      matrices: the type of matrices that are integers; each has scales in float32, as a parameter
        of its own (`scale_name`). The embedding's outputs are its rows, which suits both its uses.
    """
    layers, embed, ffw = config.num_layers, config.embed_size, config.ffw_size
    heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_size
    rows = config.draft_vocab_size or config.vocab_size
    norm = ParameterSpec((layers, embed), ("layers", "embed"))
    key = ParameterSpec(
        (layers, embed, kv_heads, head), ("layers", "embed", "kv_heads", "head"), ("embed",)
    )
    gate = ParameterSpec((layers, embed, ffw), ("layers", "embed", "ffw"), ("embed",))
    specs = {
        "embedding": ParameterSpec((rows, embed), ("vocab", "embed"), ("embed",)),
        "attention_norm": norm,
        "query": ParameterSpec(
            (layers, embed, heads, head), ("layers", "embed", "q_heads", "head"), ("embed",)
        ),
        "key": key,
        "value": key,
        "output": ParameterSpec(
            (layers, heads, head, embed),
            ("layers", "q_heads", "head", "embed"),
            ("q_heads", "head"),
        ),
        "mlp_norm": norm,
        "gate": gate,
        "up": gate,
        "down": ParameterSpec((layers, ffw, embed), ("layers", "ffw", "embed"), ("ffw",)),
        "final_norm": ParameterSpec((embed,), ("embed",)),
    }
    if config.attention_biases:
        key_bias = ParameterSpec((layers, kv_heads, head), ("layers", "kv_heads", "head"))
        specs["query_bias"] = ParameterSpec((layers, heads, head), ("layers", "q_heads", "head"))
        specs |= {"key_bias": key_bias, "value_bias": key_bias}
    if config.head_norms:
        head_norm = ParameterSpec((layers, head), ("layers", "head"))
        specs |= {"query_norm": head_norm, "key_norm": head_norm}
    if not config.tied_embeddings:
        specs["unembedding"] = ParameterSpec((embed, rows), ("embed", "vocab"), ("embed",))
    if config.draft_vocab_size is not None:  # the row of each of the target's tokens
        specs["token_rows"] = ParameterSpec(
            (config.vocab_size,), ("vocab",), (), np.dtype(np.int32)
        )
    return specs if matrices is None else _with_scales(specs, matrices)


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are read and written together: those of a layer, or one outside the layers.

    Attributes:
      name: such as `layer_007` or `embedding`.
      layer: its index, or None outside the layers.
    """

    name: str
    layer: int | None

    def specs(self, config: LlamaConfig, *, int8: bool = False) -> dict[str, ParameterSpec]:
        """The group's own part of `parameter_specs`: a layer's without the axis `layers`."""
        specs = parameter_specs(config, INT8 if int8 else None)
        if self.layer is None:
            own = (self.name, scale_name(self.name))
            return {name: specs[name] for name in own if name in specs}
        return {
            name: dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
            for name, spec in specs.items()
            if spec.axes[0] == "layers"
        }


def groups(config: LlamaConfig) -> list[Group]:
    """Every group of a model; those outside the layers, which are the largest, come first."""
    outer = [name for name, spec in parameter_specs(config).items() if spec.axes[0] != "layers"]
    layers = [Group(f"layer_{index:03}", index) for index in range(config.num_layers)]
    return [Group(name, None) for name in outer] + layers


def parameter_sharding(layout: Layout | None, spec: ParameterSpec) -> Sharding:
    """Where a parameter lies: as the layout says, or on the first device."""
    if layout is None:
        return SingleDeviceSharding(jax.devices()[0])
    return layout.sharding(spec.axes, spec.shape)


def scale_name(name: str) -> str:
    """The parameter that holds the scales of a matrix of integers."""
    return f"{name}_scale"


def scale_groups(spec: ParameterSpec, group: int) -> tuple[int, int]:
    """The axis of a matrix along which inputs share scales, and how many of them do."""
    axis = max(spec.axes.index(name) for name in spec.inputs)
    return axis, math.gcd(spec.shape[axis], group)


def _with_scales(specs: dict[str, ParameterSpec], matrices: MatrixType) -> dict[str, ParameterSpec]:
    found: dict[str, ParameterSpec] = {}
    for name, spec in specs.items():
        found[name] = spec
        if spec.inputs and (matrices.outer or spec.axes[0] == "layers"):
            found[name] = dataclasses.replace(spec, dtype=matrices.dtype)
            found[scale_name(name)] = _scale(spec, matrices)
    return found


def _scale(spec: ParameterSpec, matrices: MatrixType) -> ParameterSpec:
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    if matrices.group is None:
        sizes = {axis: size for axis, size in sizes.items() if axis not in spec.inputs}
    else:
        axis, group = scale_groups(spec, matrices.group)
        sizes[spec.axes[axis]] //= group
    return ParameterSpec(tuple(sizes.values()), tuple(sizes), (), np.dtype(np.float32))
