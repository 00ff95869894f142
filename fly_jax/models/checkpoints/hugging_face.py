"""Hugging Face checkpoints: which tensor is which parameter, and reading them by groups."""

from __future__ import annotations

import math
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array
from orbax.checkpoint import v1 as ocp

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.config_json import read_config
from fly_jax.models.checkpoints.source import READ_BUFFER_BYTES, Group, groups
from fly_jax.models.checkpoints.stored import DTYPES, StoredTensor, stored_tensors
from fly_jax.models.specs import ParameterSpec
from fly_jax.sharding.rules import Layout

_OUTER = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def tensor_name(group: Group, name: str) -> str:
    """The tensor that holds a parameter of a group."""
    if group.layer is None:
        return _OUTER[name]
    return f"model.layers.{group.layer}.{_LAYER[name]}"


def is_transposed(name: str, spec: ParameterSpec) -> bool:
    """Hugging Face keeps products' matrices [out, in], and we [in, out]."""
    return bool(spec.inputs) and name != "embedding"


def tensor_shape(name: str, spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of the tensor that holds a parameter of a group."""
    if not is_transposed(name, spec):
        return spec.shape if spec.inputs else (math.prod(spec.shape),)
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    inputs = math.prod(sizes[axis] for axis in spec.inputs)
    return (math.prod(spec.shape) // inputs, inputs)


class HuggingFaceSource:
    """A folder with `config.json` and safetensors, in one file or in several with an index.

    Each process reads only the bytes that its devices take.
    """

    int8 = False

    def __init__(self, folder: Path) -> None:
        """Checks the folder without reading a weight.

        Raises:
          FlyJaxError: the folder, a file or a tensor is missing, a file is damaged or truncated,
            or a tensor has a shape or type that the configuration does not ask for.
        """
        self._stored = stored_tensors(folder)
        self.config = read_config(folder)
        needed = {
            tensor_name(group, name): tensor_shape(name, spec)
            for group in groups(self.config)
            for name, spec in group.specs(self.config).items()
        }
        _check(folder, self._stored, needed)

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """The group's tensors [out, in], split by rows."""
        specs = group.specs(self.config)
        files: dict[Path, dict[str, jax.ShapeDtypeStruct]] = {}
        for name, spec in specs.items():
            tensor = tensor_name(group, name)
            stored = self._stored[tensor]
            files.setdefault(stored.file, {})[tensor] = jax.ShapeDtypeStruct(
                stored.shape,
                DTYPES[stored.dtype],
                sharding=row_sharding(layout, spec, stored.shape[0]),
            )
        context = ocp.Context()
        context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
        context.memory_options.read_concurrent_bytes = READ_BUFFER_BYTES
        tensors: dict[str, Array] = {}
        with context:
            for file, abstract in files.items():
                tensors |= ocp.load(file, abstract)
        return {name: tensors[tensor_name(group, name)] for name in specs}

    def arranged(self, name: str, stored: Array, spec: ParameterSpec) -> Array:
        """The tensor as [in, out], with heads as an axis of their own."""
        return (stored.T if is_transposed(name, spec) else stored).reshape(spec.shape)

    def describe(self, group: Group, name: str) -> str:
        """The tensor and its file."""
        tensor = tensor_name(group, name)
        return f"The tensor {tensor} in {self._stored[tensor].file}"


def _check(
    folder: Path, stored: dict[str, StoredTensor], needed: dict[str, tuple[int, ...]]
) -> None:
    missing = [tensor for tensor in needed if tensor not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FlyJaxError(
            f"{folder} lacks the tensor {missing[0]}{more}; config.json asks for it: download the "
            "whole checkpoint, or give the config.json that belongs to the weights."
        )
    for tensor, shape in needed.items():
        found = stored[tensor]
        if found.shape != shape:
            raise FlyJaxError(
                f"The tensor {tensor} in {found.file} has shape {list(found.shape)}; config.json "
                f"asks for {list(shape)}: give weights and config.json of the same model."
            )
        if found.dtype not in DTYPES:
            raise FlyJaxError(
                f"The tensor {tensor} in {found.file} is stored as {found.dtype}; fly_jax reads "
                f"{', '.join(DTYPES)}: give a checkpoint that is not quantised."
            )


def row_sharding(layout: Layout | None, spec: ParameterSpec, num_rows: int) -> Sharding:
    """Where a stored matrix goes first: its rows over as many devices as the parameter takes.

    Rows are contiguous in the file, so each device's part is one read; parts of columns would make
    many small ones.
    """
    if layout is None:
        return SingleDeviceSharding(jax.devices()[0])
    names: list[str] = []
    for entry in layout.spec(spec.axes, spec.shape):
        names += [entry] if isinstance(entry, str) else list(entry or ())
    while num_rows % math.prod(layout.mesh.shape[name] for name in names):
        names.pop()
    return NamedSharding(layout.mesh, PartitionSpec(tuple(names) or None))
