"""Checkpoints in and out: loading any known format, converting one, writing Hugging Face's."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int
from safetensors.numpy import save_file
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import (
    INT8,
    Group,
    LlamaConfig,
    ParameterSpec,
    config_fields,
    groups,
    parameter_specs,
    shared_vocabulary,
)
from fly_jax.models.checkpoints.converted import (
    RECORD,
    ConvertedSource,
    Record,
    StoredType,
    group_folder,
    read_record,
    stored_files,
    write_group,
)
from fly_jax.models.checkpoints.gguf_file import open_gguf
from fly_jax.models.checkpoints.gguf_source import GgufSource, gguf_tokenizer, write_tokenizer
from fly_jax.models.checkpoints.hugging_face import (
    HuggingFaceSource,
    is_transposed,
    tensor_name,
    tensor_shape,
)
from fly_jax.models.checkpoints.kept import Kept, Say, has_rows, weights_folder
from fly_jax.models.checkpoints.source import Arranging, Source, Stored, fingerprint
from fly_jax.models.llama import Llama, parameter_sharding
from fly_jax.models.quantise import quantised
from fly_jax.models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from fly_jax.sharding.rules import Layout

WEIGHTS = "model.safetensors"
# The numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**20
# Where glibc's own adjustment ends in a process that frees large arrays: see mallopt(3).
_USUAL_MMAP_BYTES, _USUAL_TRIM_BYTES = 2**25, 2**26


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: all of it was checked but the weights' own values."""

    path: Path
    source: Source
    tokenizer: Tokenizer

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration."""
        return self.source.config

    def check_draft(self, draft: Checkpoint) -> None:
        """Checks that a model's tokens are this one's, so that it can draft for it.

        Raises:
          FlyJaxError: they are others.
        """
        if draft.config.vocab_size != self.config.vocab_size:
            shared_vocabulary(self.config, draft.config, len(self.tokenizer.vocabulary.names))
        check_same_vocabulary(self.tokenizer, draft.tokenizer)
        # Its own token for drafting may be beyond those in common.
        draft.config.with_vocabulary(min(draft.config.vocab_size, self.config.vocab_size))


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a model and its tokenizer, without reading a weight.

    Raises:
      FlyJaxError: what `open_weights`, `load_tokenizer` and `gguf_tokenizer` raise.
    """
    source = open_weights(path)
    if isinstance(source, GgufSource):
        tokenizer = gguf_tokenizer(source.file, source.config.eos_token_ids)
    else:
        tokenizer = load_tokenizer(path, source.config)
    return Checkpoint(path, source, tokenizer)


def open_weights(path: Path) -> Source:
    """Checks a folder of weights, or a GGUF file, without reading one.

    Raises:
      FlyJaxError: the folder, a file or a tensor is missing, a file is damaged or truncated, or a
        tensor has a shape or type that the configuration does not ask for.
    """
    if path.suffix == ".gguf":
        return GgufSource(open_gguf(path))
    return ConvertedSource(path) if (path / RECORD).exists() else HuggingFaceSource(path)


def save_hf(model: Llama, folder: Path, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors` as transformers reads them."""
    config, written = model.config, jnp.dtype(dtype)
    own = {name: spec.dtype for name, spec in parameter_specs(config).items()}
    parameters = {
        name: np.asarray(values).astype(own[name] or written)
        for name, values in model.stacked().parameters().items()
    }
    tensors: dict[str, np.ndarray] = {}
    for group in groups(config):
        for name, spec in group.specs(config).items():
            part = parameters[name] if group.layer is None else parameters[name][group.layer]
            shape = tensor_shape(name, spec)
            if is_transposed(name, spec):
                part = part.reshape(*reversed(shape)).T
            tensors[tensor_name(group, name)] = np.ascontiguousarray(part.reshape(shape))
    folder.mkdir(parents=True, exist_ok=True)
    description = config_fields(config) | {"dtype": written.name, "torch_dtype": written.name}
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / WEIGHTS)  # save_file's is its owner's alone


def load_llama(
    checkpoint: Path | Checkpoint,
    *,
    layout: Layout | None = None,
    dtype: DTypeLike = jnp.float32,
    int8: bool = False,
    vocab_size: int | None = None,
    unstacked: bool = False,
    weights_cache: str | Path | None = "off",
    say: Say = warnings.warn,
) -> Llama:
    """Loads weights straight into their place.

    Beyond its devices' parts of the model, a process needs memory for its parts of one group: a
    layer, or the embedding, a few times over. Of a model that is `unstacked` on a CPU it needs next
    to none: the arrays are the bytes that were converted, in a mapped file or in memory.

    Args:
      checkpoint: the folder of a Hugging Face checkpoint with safetensors, or of what `convert`
        has written; or what `open_checkpoint` gives, which is not opened again.
      layout: how parameters are split over a mesh; None puts them on the first device.
      dtype: of the parameters, whatever the stored type; int8 matrices stay int8.
      int8: the matrices become int8 as they are read.
      vocab_size: tokens of the vocabulary, without the rows that pad it; None is all.
      unstacked: the model is `Llama.unstacked`, on one device.
      weights_cache: folder that keeps what was converted for one device; see `weights_folder`.
      say: gets a sentence where such a file is damaged, or cannot be kept.

    Raises:
      FlyJaxError: what `open_weights` raises, a weight is NaN or infinite, or a drafter's
        `token_rows` are none of its rows.
    """
    source = open_weights(checkpoint) if isinstance(checkpoint, Path) else checkpoint.source
    config = source.config
    if vocab_size not in (None, config.vocab_size):
        config = config.with_vocabulary(vocab_size)
    folder = weights_folder(weights_cache) if layout is None else None
    if layout is None and (unstacked or folder is not None) and has_rows(source):
        path = checkpoint if isinstance(checkpoint, Path) else checkpoint.path
        width = np.dtype(dtype)
        source = Kept(source, path, width, int8=int8, folder=folder, say=say)
        if unstacked and not int8:
            return _unstacked(source, config)
    outer: dict[str, Array] = {}
    stacks: dict[str, Array] = {}
    with large_arrays_given_back():
        for group in groups(config):
            parts = read_group(
                source, group, config, layout=layout, dtype=jnp.dtype(dtype), int8=int8
            )
            if "token_rows" in parts:
                _check_rows(parts["token_rows"], config, source.describe(group, "token_rows"))
            if group.layer is None:
                outer |= parts
            else:
                stacks = _insert(stacks or _empty_stacks(config, parts, layout), parts, group.layer)
            del parts  # before the next are read,
            jax.block_until_ready(stacks)  # which would pile up if this did not wait
    model = Llama(config, outer | stacks, layout)
    if unstacked:
        model.unstack()
    return model


def _unstacked(source: Kept, config: LlamaConfig) -> Llama:
    """`Llama.unstacked` of tensors as they lie, one array per layer."""
    parameters: dict[str, Any] = {}
    for group in groups(config):
        for name, spec in group.specs(config, int8=source.int8).items():
            # Outputs come first, and tokens are outputs.
            sizes = dict(zip(spec.axes, spec.shape, strict=True))
            axes = sorted(spec.axes, key=spec.inputs.__contains__)
            tensor = source.tensor(group, name)[: sizes.get("vocab")]
            part = jax.device_put(tensor.reshape([sizes[axis] for axis in axes]), jax.devices()[0])
            if name == "token_rows":
                _check_rows(part, config, source.describe(group, name))
            parameters[name] = part if group.layer is None else (*parameters.get(name, ()), part)
    return Llama(config, parameters)


def _check_rows(rows: Int[Array, " vocab"], config: LlamaConfig, where: str) -> None:
    """Raises FlyJaxError for tokens whose row is none of the embedding's."""
    number = config.draft_vocab_size
    assert number is not None
    if not bool(jnp.all((rows >= 0) & (rows < number))):
        raise FlyJaxError(
            f"{where} names rows that the embedding does not have; each must be from 0 to "
            f"{number - 1}: make the drafter again."
        )


def read_group(
    source: Source,
    group: Group,
    config: LlamaConfig,
    *,
    layout: Layout | None,
    dtype: jnp.dtype,
    int8: bool,
) -> dict[str, Array]:
    """The parameters of a group, as `Llama` takes them but without the axis `layers`.

    Args:
      config: the source's, or with a smaller vocabulary.
      dtype: of those that have no type of their own.
      int8: quantise the matrices, if they are not stored so.

    Raises:
      FlyJaxError: a file is damaged, or a weight is NaN or infinite.
    """
    wanted = group.specs(config, int8=int8 or source.int8)
    arrange = jax.jit(
        _arranged,
        static_argnames=("arranged", "specs", "vocab_size", "quantise", "dtype"),
        out_shardings=(
            {name: parameter_sharding(layout, spec) for name, spec in wanted.items()},
            parameter_sharding(layout, ParameterSpec((), ())),
        ),
    )
    parts, finite = arrange(
        source.read(group, layout),
        arranged=source.arranged,
        specs=tuple(group.specs(source.config, int8=source.int8).items()),
        vocab_size=config.vocab_size,
        quantise=int8 and not source.int8,
        dtype=dtype,
    )
    for name, is_finite in jax.device_get(finite).items():
        if not is_finite:
            raise FlyJaxError(
                f"{source.describe(group, name)} holds NaN or infinite weights; they must be "
                "finite: download the file again or train the model anew."
            )
    return parts


def _arranged(
    stored: Mapping[str, Stored],
    arranged: Arranging,
    specs: tuple[tuple[str, ParameterSpec], ...],
    vocab_size: int,
    quantise: bool,
    dtype: jnp.dtype,
) -> tuple[dict[str, Array], dict[str, Bool[Array, ""]]]:
    """A group's parameters from what is stored, and for each whether its numbers are finite."""
    parts: dict[str, Array] = {}
    finite: dict[str, Bool[Array, ""]] = {}
    for name, spec in specs:
        part = arranged(name, stored[name], spec)
        finite[name] = jnp.isfinite(part).all()
        if "vocab" in spec.axes:
            axis = spec.axes.index("vocab")
            part = jax.lax.slice_in_dim(part, 0, min(vocab_size, spec.shape[axis]), axis=axis)
            spec = dataclasses.replace(spec, shape=part.shape)
        if quantise and spec.inputs:
            parts |= quantised(name, part, spec, INT8)
        else:
            parts[name] = part.astype(spec.dtype or dtype)
    return parts, finite


def _empty_stacks(
    config: LlamaConfig, parts: dict[str, Array], layout: Layout | None
) -> dict[str, Array]:
    """Zeros for the parts of all layers."""
    specs = parameter_specs(config, INT8)  # also names those of a model that is not int8
    shardings = {name: parameter_sharding(layout, specs[name]) for name in parts}
    sizes = tuple((name, specs[name].shape, part.dtype) for name, part in parts.items())
    return jax.jit(_zeros, static_argnums=0, out_shardings=shardings)(sizes)


def _zeros(sizes: tuple[tuple[str, tuple[int, ...], jnp.dtype], ...]) -> dict[str, Array]:
    return {name: jnp.zeros(shape, dtype) for name, shape, dtype in sizes}


@functools.partial(jax.jit, donate_argnames=("stacks",))
def _insert(
    stacks: dict[str, Array], parts: dict[str, Array], layer: Int[Array, ""]
) -> dict[str, Array]:
    """Writes a layer's parts into the stacks, in place."""
    return {
        name: jax.lax.dynamic_update_index_in_dim(stacks[name], part, layer, axis=0)
        for name, part in parts.items()
    }


@contextlib.contextmanager
def large_arrays_given_back() -> Iterator[None]:
    """Within it, what is freed of large arrays goes back to the system; does that on glibc only.

    By default glibc keeps freed arrays of up to 32 MiB for later. While a model is loaded, arrays
    that stay lie between those that go, and so what is kept grows with the model
    (benchmarks/load_memory.py measures that it does not).
    """
    _set_malloc(_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        _set_malloc(_MMAP_THRESHOLD, _USUAL_MMAP_BYTES)
        _set_malloc(_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)


def _set_malloc(option: int, value: int) -> None:
    """An option of the C library's memory."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(option, value)


_CARRIED = ("*.json", "*.model", "*.jinja")  # the configuration and the tokenizer
_NOT_CARRIED = "*.safetensors.index.json"


def convert(source: Path, output: Path, dtype: StoredType = "bfloat16") -> None:
    """Writes a checkpoint as Orbax checkpoints, from which any mesh reads its parts.

    It needs memory for one group: a layer, or the embedding. What is there of an earlier run with
    the same source and type is kept.

    Args:
      source: folder of a Hugging Face checkpoint, or of one converted to another type; or a GGUF
        file.
      output: a folder that is new, empty, or holds an unfinished conversion of this kind.
      dtype: of the weights; int8 quantises matrices and keeps the rest in float32.

    Raises:
      FlyJaxError: the source is damaged or holds weights that are not finite, or the output holds
        something else, is damaged or has too little room.
    """
    checkpoint = open_weights(source)
    if isinstance(checkpoint, GgufSource):  # its tokenizer can be made, before work is done
        gguf_tokenizer(checkpoint.file, checkpoint.config.eos_token_ids)
    if checkpoint.int8:
        raise FlyJaxError(
            f"{source} is int8 already; convert the checkpoint that it was made from."
        )
    if _begin(output, Record(config_fields(checkpoint.config), fingerprint(source), dtype)):
        open_weights(output)  # is not damaged
        return
    left = _left(output, checkpoint.config)
    sizes = {group: _bytes(group, checkpoint.config, dtype) for group in groups(checkpoint.config)}
    _check_room(output, sum(sizes[group] for group in left))
    int8 = dtype == "int8"
    width = jnp.dtype(jnp.float32 if int8 else dtype)
    total = sum(sizes.values())
    done = total - sum(sizes[group] for group in left)
    with (
        large_arrays_given_back(),
        tqdm(total=total, initial=done, unit="B", unit_scale=True, desc="Converting") as bar,
    ):
        for group in left:
            write_group(  # no group is held while the next is read
                output,
                group,
                read_group(
                    checkpoint, group, checkpoint.config, layout=None, dtype=width, int8=int8
                ),
            )
            bar.update(sizes[group])
    if not isinstance(checkpoint, HuggingFaceSource) or checkpoint.packing is not None:
        fields = json.dumps(config_fields(checkpoint.config), indent=2)
        (output / "config.json").write_text(f"{fields}\n")
    carry_tokenizer(source, checkpoint, output)
    record = read_record(output)
    dataclasses.replace(record, files=stored_files(output)).write(output)


def carry_tokenizer(path: Path, source: Source, output: Path) -> None:
    """Writes the tokenizer of a checkpoint, and what else it has beside its weights.

    Raises:
      FlyJaxError: a GGUF file that is damaged.
    """
    if isinstance(source, GgufSource):
        write_tokenizer(source.file, output)
        return
    for pattern in _CARRIED:
        for carried in path.glob(pattern):
            own = carried.match(_NOT_CARRIED) or carried.name == RECORD
            if not own and not (output / carried.name).exists():
                partial = output / f"{carried.name}.partial"
                shutil.copy(carried, partial)
                partial.replace(output / carried.name)  # so that none is ever half there


def _begin(output: Path, wanted: Record) -> bool:
    """Makes the folder ready for this conversion; whether it is finished already."""
    if (output / RECORD).exists():
        found = read_record(output)
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
    known = {group_folder(output, group): group for group in groups(config)}
    if known:
        for path in next(iter(known)).parent.glob("*"):
            if path not in known:
                shutil.rmtree(path)
    return [group for path, group in known.items() if not path.is_dir()]


def _bytes(group: Group, config: LlamaConfig, dtype: StoredType) -> int:
    width = jnp.dtype(jnp.float32 if dtype == "int8" else dtype)
    specs = group.specs(config, int8=dtype == "int8").values()
    return sum(math.prod(spec.shape) * (spec.dtype or width).itemsize for spec in specs)


def _check_room(output: Path, needed: int) -> None:
    free = shutil.disk_usage(output).free
    if free < needed:
        raise FlyJaxError(
            f"The rest of the conversion needs {needed / 1e9:.1f} GB and {output} has room for "
            f"{free / 1e9:.1f}; give an --output on a larger disk."
        )
