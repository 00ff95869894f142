"""Writing of checkpoints: in Hugging Face's form, or converted for any mesh."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import Group, LlamaConfig, config_fields, groups, parameter_specs
from fly_jax.models.checkpoints import converted, hugging_face
from fly_jax.models.checkpoints.gguf_source import GgufSource, gguf_tokenizer, write_tokenizer
from fly_jax.models.checkpoints.load import large_arrays_given_back, open_weights, read_group
from fly_jax.models.checkpoints.source import Source, fingerprint
from fly_jax.models.llama import Llama

WEIGHTS = "model.safetensors"
_CARRIED = ("*.json", "*.model", "*.jinja")  # the configuration and the tokenizer
_NOT_CARRIED = "*.safetensors.index.json"


def save_hf(model: Llama, folder: Path, dtype: DTypeLike = jnp.bfloat16, of: str = "") -> None:
    """Writes `config.json` and `model.safetensors` for transformers.

    A head's are for speculators and vLLM; `of` names its target.
    """
    config, written = model.config, jnp.dtype(dtype)
    own = {name: spec.dtype for name, spec in parameter_specs(config).items()}
    values = model.stacked().parameters()
    parameters = {name: np.asarray(values[name]).astype(of or written) for name, of in own.items()}
    tensors: dict[str, np.ndarray] = {}
    for group in groups(config):
        for name, spec in group.specs(config).items():
            part = parameters[name] if group.layer is None else parameters[name][group.layer]
            shape = hugging_face.tensor_shape(name, spec)
            if hugging_face.is_transposed(name, spec):
                part = part.reshape(*reversed(shape)).T
            key = hugging_face.tensor_name(group, name, of_head=config.head is not None)
            tensors[key] = np.ascontiguousarray(part.reshape(shape))
    if config.head is not None and config.draft_vocab_size is not None:
        is_known = tensors["d2t"] != config.unknown_row
        known = np.flatnonzero(is_known)
        tensors |= {"t2d": is_known, "d2t": known - np.arange(len(known))}
    folder.mkdir(parents=True, exist_ok=True)
    description = config_fields(config) | {"dtype": written.name, "torch_dtype": written.name}
    if config.head is not None:
        description["speculators_config"]["verifier"]["name_or_path"] = of or None
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    partial = folder / f"{WEIGHTS}.partial"
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
    except SafetensorError as error:
        raise FlyJaxError(
            f"{partial} cannot be written ({error}); make room, or give another folder."
        ) from error
    shutil.copymode(folder / "config.json", partial)  # save_file's is its owner's alone
    partial.replace(folder / WEIGHTS)


def convert(source: Path, output: Path, dtype: converted.StoredType = "bfloat16") -> None:
    """Writes a checkpoint as Orbax checkpoints, from which any mesh reads its parts.

    It needs memory for one group: a layer, or the embedding. What an earlier run has made is kept.
    FlyJaxError for a damaged source or weights that are not finite, or an output that holds
    something else, is damaged or has too little room.

    Args:
      source: a GGUF file, a Hugging Face checkpoint, or one converted to another type.
      output: a folder that is new, empty, or holds an unfinished conversion of this kind.
      dtype: of the weights; int8 quantises matrices and keeps the rest in float32.
    """
    checkpoint = open_weights(source)
    if isinstance(checkpoint, GgufSource):  # its tokenizer can be made, before work is done
        gguf_tokenizer(checkpoint.file, checkpoint.config.eos_token_ids)
    if checkpoint.config.head is not None:
        raise FlyJaxError(
            f"{source} holds a head, which is not converted; give it as it is, as --draft."
        )
    if checkpoint.int8:
        raise FlyJaxError(
            f"{source} is int8 already; convert the checkpoint that it was made from."
        )
    fields = config_fields(checkpoint.config)
    if _begin(output, converted.Record(fields, fingerprint(source), dtype)):
        open_weights(output)  # is not damaged
        return
    left = _left(output, checkpoint.config)
    int8 = dtype == "int8"
    width = jnp.dtype(jnp.float32 if int8 else dtype)
    sizes = {one: _bytes(one, checkpoint.config, width, int8) for one in groups(checkpoint.config)}
    needed, free = sum(sizes[group] for group in left), shutil.disk_usage(output).free
    if free < needed:
        raise FlyJaxError(
            f"The rest of the conversion needs {needed / 1e9:.1f} GB and {output} has room for "
            f"{free / 1e9:.1f}; give an --output on a larger disk."
        )
    total = sum(sizes.values())
    done = total - needed
    with (
        large_arrays_given_back(),
        tqdm(total=total, initial=done, unit="B", unit_scale=True, desc="Converting") as bar,
    ):
        for group in left:
            read = functools.partial(read_group, checkpoint, group, checkpoint.config)
            # No group is held while the next is read.
            converted.write_group(output, group, read(layout=None, dtype=width, int8=int8))
            bar.update(sizes[group])
    if not isinstance(checkpoint, hugging_face.HuggingFaceSource) or checkpoint.packing is not None:
        (output / "config.json").write_text(f"{json.dumps(fields, indent=2)}\n")
    carry_tokenizer(source, checkpoint, output)
    record = converted.read_record(output)
    dataclasses.replace(record, files=converted.stored_files(output)).write(output)


def carry_tokenizer(path: Path, source: Source, output: Path) -> None:
    """Writes the tokenizer and all else beside the weights; FlyJaxError for a bad GGUF."""
    if isinstance(source, GgufSource):
        write_tokenizer(source.file, output)
        return
    for pattern in _CARRIED:
        for carried in path.glob(pattern):
            own = carried.match(_NOT_CARRIED) or carried.name == converted.RECORD
            if not own and not (output / carried.name).exists():
                partial = output / f"{carried.name}.partial"
                shutil.copy(carried, partial)
                partial.replace(output / carried.name)  # so that none is ever half there


def _begin(output: Path, wanted: converted.Record) -> bool:
    """Prepares the folder for this conversion; tells whether it is finished already."""
    if (output / converted.RECORD).exists():
        found = converted.read_record(output)
        if (found.source, found.dtype) != (wanted.source, wanted.dtype):
            what = "from other weights" if found.source != wanted.source else f"to {found.dtype}"
            raise FlyJaxError(
                f"{output} holds a conversion {what}; give another --output, or remove the folder."
            )
        return found.files is not None
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FlyJaxError(
            f"{output} exists and is no conversion; give an --output that is new or empty."
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        wanted.write(output)
    except OSError as error:
        raise FlyJaxError(
            f"{output} cannot be written ({error.strerror}); give another --output."
        ) from error
    return False


def _left(output: Path, config: LlamaConfig) -> list[Group]:
    """The groups that are not written yet; what an interrupted write has left is removed."""
    known = {converted.group_folder(output, group): group for group in groups(config)}
    for path in next(iter(known)).parent.glob("*"):
        if path not in known:
            shutil.rmtree(path)
    return [group for path, group in known.items() if not path.is_dir()]


def _bytes(group: Group, config: LlamaConfig, width: jnp.dtype, int8: bool) -> int:
    specs = group.specs(config, int8=int8).values()
    return sum(math.prod(spec.shape) * (spec.dtype or width).itemsize for spec in specs)
