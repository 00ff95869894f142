"""Hugging Face Llama checkpoints: which tensor is which parameter, in both directions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

from fly_jax.errors import FlyJaxError
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama, ParameterSpec, parameter_specs
from fly_jax.models.stored import DTYPES, StoredTensor, stored_tensors
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
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def _tensor_names(name: str, config: LlamaConfig) -> list[str]:
    """The tensors that make up a parameter, one per layer or a single one."""
    if name in _OUTER:
        return [_OUTER[name]]
    return [f"model.layers.{index}.{_LAYER[name]}" for index in range(config.num_layers)]


def _is_transposed(name: str) -> bool:
    """Hugging Face keeps products' matrices [out, in], and we [in, out]."""
    return name != "embedding" and not name.endswith("norm")


def _hf_shape(name: str, spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of each of a parameter's tensors in the checkpoint."""
    shape = spec.shape if name in _OUTER else spec.shape[1:]
    if not _is_transposed(name):
        return shape
    inputs = math.prod(shape[:2]) if name == "output" else shape[0]
    return (math.prod(shape) // inputs, inputs)


def save_hf(model: Llama, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`, in bfloat16, as transformers reads them."""
    config = model.config
    specs = parameter_specs(config)
    tensors: dict[str, np.ndarray] = {}
    for name, values in model.parameters().items():
        parameter = np.asarray(values).astype(ml_dtypes.bfloat16)
        names, shape = _tensor_names(name, config), _hf_shape(name, specs[name])
        if _is_transposed(name):
            parameter = parameter.reshape(len(names), *reversed(shape)).swapaxes(1, 2)
        parameter = parameter.reshape(len(names), *shape)
        tensors |= dict(zip(names, map(np.ascontiguousarray, parameter), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    description = config.to_hf() | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")


def check_checkpoint(folder: Path) -> LlamaConfig:
    """Checks a Hugging Face folder without reading a weight: its configuration.

    Raises:
      FlyJaxError: the folder, a file or a tensor is missing, a file is damaged or truncated, or a
        tensor has a shape or type that the configuration does not ask for.
    """
    return _check(folder)[0]


def load_llama(
    folder: Path, *, layout: Layout | None = None, dtype: DTypeLike = jnp.float32
) -> Llama:
    """Loads a Hugging Face folder: safetensors in one file, or in several with an index.

    Each process reads only the bytes that its devices take. Beyond the model itself, the memory
    needed is that of one parameter of all layers.

    Args:
      folder: with `config.json` and the weights.
      layout: how parameters are split over a mesh; None puts them on the first device.
      dtype: of the parameters, whatever the stored type.

    Raises:
      FlyJaxError: what `check_checkpoint` raises, or a weight is NaN or infinite.
    """
    config, stored = _check(folder)
    parameters: dict[str, Array] = {}
    finite: dict[str, Bool[Array, " tensors"]] = {}
    for name, spec in parameter_specs(config).items():
        parts = {tensor: stored[tensor] for tensor in _tensor_names(name, config)}
        source = _source_sharding(layout, spec, _hf_shape(name, spec)[0])
        assemble = jax.jit(
            _assemble,
            static_argnames=("shape", "transpose", "dtype"),
            out_shardings=_result_shardings(layout, spec),
        )
        parameters[name], finite[name] = assemble(
            _read(folder, parts, source),
            shape=spec.shape,
            transpose=_is_transposed(name),
            dtype=jnp.dtype(dtype),
        )
    for name, flags in jax.device_get(finite).items():
        for tensor, is_finite in zip(_tensor_names(name, config), flags, strict=True):
            if not is_finite:
                raise FlyJaxError(
                    f"The tensor {tensor} in {stored[tensor].file} holds NaN or infinite weights; "
                    "they must be finite: download the file again or train the model anew."
                )
    return Llama(config, parameters, layout)


def _check(folder: Path) -> tuple[LlamaConfig, dict[str, StoredTensor]]:
    """The configuration and every stored tensor, after all checks that read no weight."""
    stored = stored_tensors(folder)
    config = LlamaConfig.from_folder(folder)
    needed = {
        tensor: _hf_shape(name, spec)
        for name, spec in parameter_specs(config).items()
        for tensor in _tensor_names(name, config)
    }
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
    return config, stored


def _source_sharding(layout: Layout | None, spec: ParameterSpec, num_rows: int) -> Sharding:
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


def _result_shardings(
    layout: Layout | None, spec: ParameterSpec
) -> tuple[NamedSharding, NamedSharding] | None:
    if layout is None:
        return None
    whole = NamedSharding(layout.mesh, PartitionSpec())
    return layout.sharding(spec.axes, spec.shape), whole


def _read(folder: Path, stored: dict[str, StoredTensor], sharding: Sharding) -> list[Array]:
    """The tensors as they are stored, in order."""
    abstract = {
        name: jax.ShapeDtypeStruct(tensor.shape, DTYPES[tensor.dtype], sharding=sharding)
        for name, tensor in stored.items()
    }
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        arrays = ocp.load(folder, abstract)
    return [arrays[name] for name in stored]


def _assemble(
    tensors: list[Array], shape: tuple[int, ...], transpose: bool, dtype: jnp.dtype
) -> tuple[Array, Bool[Array, " tensors"]]:
    """A parameter from its tensors, and for each of them whether all its numbers are finite."""
    stacked = jnp.stack([tensor.astype(dtype) for tensor in tensors])
    finite = jnp.isfinite(stacked).all(axis=tuple(range(1, stacked.ndim)))
    if transpose:
        stacked = stacked.swapaxes(1, 2)
    return stacked.reshape(shape), finite
