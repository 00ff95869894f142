"""Hugging Face checkpoints: the tensor of each parameter, and reading by groups.

A safetensors file is 8 bytes of header length (little-endian), the header (JSON: dtype, shape and
byte range of each tensor), and the tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from fly_jax.errors import FlyJaxError
from fly_jax.models import architectures
from fly_jax.models.architectures import Group, ParameterSpec, groups, read_config
from fly_jax.models.checkpoints.packings import Packing, StoredPart, read_packing
from fly_jax.models.checkpoints.source import READ_BUFFER_BYTES, Arranging, Stored
from fly_jax.models.head_config import EAGLE3
from fly_jax.sharding.rules import Layout, axes_in

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
_OTHERS = {"F8_E4M3": jnp.float8_e4m3fn, "I8": jnp.int8, "I32": jnp.int32, "I64": jnp.int64}
_STORED = {name: jnp.dtype(dtype) for name, dtype in (DTYPES | _OTHERS).items()}
_LENGTH_BYTES = 8
_AGAIN = "download the file again"

# Rotary tables, which config.json determines, and scales of activations and caches, which are not
# quantised here.
_WITHOUT_EFFECT = re.compile(
    r"\.(rotary_emb\.inv_freq|weight_shape|(input|output|q|k|v|kv)_(scale|scale_ub|zero_point))$"
)
# The tensors' names: outside the layers, of a layer, and of a head alone. A head's other names lack
# "model.", and EAGLE's layer is `midlayer` or `layers.0`.
_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_OUTER, _LAYER, _OF_HEAD = (_NAMES[of] for of in ("outer", "layer", "head"))
_HEAD_SAYS = "midlayer.hidden_norm.weight"
# A head's tokens are listed twice; there may be copies of the target's tensors.
_BESIDE_HEAD = re.compile(r"t2d|d2t|embed_tokens\.weight|verifier_(norm|lm_head)\.weight")
# A block of so many numbers, and what is computed from it, stays in a core's cache.
_BLOCK_NUMBERS = 2**17

Item = TypeVar("Item")


def tensor_name(group: Group, name: str, *, of_head: bool = False) -> str:
    """The name of the tensor that holds a group's parameter; a head's is that of speculators."""
    if of_head:
        if name.startswith("feature_norm_"):
            return f"{name.replace('feature_norm_', 'fc_norm.')}.weight"
        return _OF_HEAD.get(name) or tensor_name(group, name).removeprefix("model.")
    return _OUTER[name] if group.layer is None else f"model.layers.{group.layer}.{_LAYER[name]}"


def is_transposed(name: str, spec: ParameterSpec) -> bool:
    """Tells whether Hugging Face keeps it as [out, in], a product's matrix, and we as [in, out]."""
    return bool(spec.inputs) and name not in ("embedding", "markov_rows")


def tensor_shape(name: str, spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of the tensor that holds a parameter of a group."""
    if not is_transposed(name, spec):
        return spec.shape if spec.inputs else (math.prod(spec.shape),)
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    inputs = math.prod(sizes[axis] for axis in spec.inputs)
    return (math.prod(spec.shape) // inputs, inputs)


def arranged(name: str, stored: Array, spec: ParameterSpec) -> Array:
    """The tensor as [in, out], with heads as an axis of their own."""
    return (stored.T if is_transposed(name, spec) else stored).reshape(spec.shape)


def row_blocks(shape: tuple[int, ...]) -> list[slice]:
    """The rows of a matrix in blocks of a size that a core works on best; a vector in one."""
    step = shape[0] if len(shape) == 1 else max(_BLOCK_NUMBERS // math.prod(shape[1:]), 1)
    return [slice(at, min(at + step, shape[0])) for at in range(0, shape[0], step)]


def on_all_cores(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Runs the work for each item in threads: NumPy lets others run while it computes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(work, items))  # which raises what one has raised


@dataclasses.dataclass(frozen=True)
class Unpacking:
    """A form of `arranged` for quantised matrices, which are widened first."""

    packing: Packing

    def __call__(self, name: str, stored: Stored, spec: ParameterSpec) -> Array:
        """Makes the parameter of a name."""
        if isinstance(stored, dict):
            stored = self.packing.widened(stored, *tensor_shape(name, spec))
        return arranged(name, stored, spec)


class HuggingFaceSource:
    """A folder with `config.json` and safetensors; each process reads what its devices take."""

    int8 = False

    def __init__(self, folder: Path) -> None:
        """Checks the folder without reading a weight.

        FlyJaxError for what is missing or damaged, a tensor of another shape or type than the
        configuration asks for, or an unknown quantisation.
        """
        self._stored = stored_tensors(folder)
        path = folder / "config.json"
        fields = architectures.read_json(path)
        said = fields.get("quantization_config") or fields.get("compression_config")
        self.packing = read_packing(said, str(path)) if said else None
        self.arranged: Arranging = arranged if self.packing is None else Unpacking(self.packing)
        self.config = read_config(folder)
        if _HEAD_SAYS in self._stored:  # EAGLE's own files say nothing else of it
            self.config = architectures.config_of({**fields, "architectures": [EAGLE3]}, str(path))
        if self.config.head is not None:
            own = "lm_head.weight" in self._stored  # and otherwise neither table
            both = own and "embed_tokens.weight" in self._stored
            head = dataclasses.replace(self.config.head, has_embedding=both, has_unembedding=own)
            self.config = dataclasses.replace(self.config, head=head)
        self.config.check_layers(len(self._stored))
        needed: dict[str, StoredPart] = {}
        for group in groups(self.config):
            for name, spec in group.specs(self.config).items():
                needed.update(self._tensors(group, name, spec).values())
        _check(folder, self._stored, needed)
        self._check_rest(needed)
        self.stored_types = {self._stored[name].dtype for name in needed}

    def _check_rest(self, needed: Container[str]) -> None:
        """Raises FlyJaxError for tensors that would change the text and are no parameters."""
        is_head = self.config.head is not None
        for name, tensor in self._stored.items():
            of_others = _BESIDE_HEAD.fullmatch(name) if is_head else not name.startswith("model.")
            is_known = name in needed or of_others or _WITHOUT_EFFECT.search(name)
            if is_known or (name.endswith(".bias") and tensor.is_zero()):
                continue
            raise FlyJaxError(
                f"{tensor.file} has the tensor {name}, which {'heads' if is_head else 'models'} of "
                f"type '{self.config.architecture}' do not have: without it the text would be "
                "wrong; give the folder of such a model."
            )

    def read(self, group: Group, layout: Layout | None) -> dict[str, Stored]:
        """Reads the group's tensors [out, in], split by rows."""
        specs = group.specs(self.config)
        if "token_rows" in specs and self.config.head is not None:
            rows = self._rows_of_head()
            sharding = row_sharding(layout, specs["token_rows"], len(rows))
            return {"token_rows": jax.device_put(rows, sharding)}
        if "embedding" in specs:
            self._check_tied()
        files: dict[Path, dict[str, jax.ShapeDtypeStruct]] = {}
        names = {name: self._tensors(group, name, spec) for name, spec in specs.items()}
        for name, tensors in names.items():
            for tensor, _ in tensors.values():
                stored = self._stored[tensor]
                where = row_sharding(layout, specs[name], *stored.shape[:1])
                one = jax.ShapeDtypeStruct(stored.shape, _STORED[stored.dtype], sharding=where)
                files.setdefault(stored.file, {})[tensor] = one
        from orbax.checkpoint import v1 as ocp  # in half a second

        context = ocp.Context()
        context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
        context.memory_options.read_concurrent_bytes = READ_BUFFER_BYTES
        found: dict[str, Array] = {}
        with context:
            for file, abstract in files.items():
                found |= ocp.load(file, abstract)
        parts_of = {
            name: {part: found[tensor] for part, (tensor, _) in tensors.items()}
            for name, tensors in names.items()
        }
        return {name: parts.get("", parts) for name, parts in parts_of.items()}

    def read_rows(self, group: Group, name: str, rows: slice) -> np.ndarray:
        """Reads rows of a parameter's tensor, as stored; nothing of it stays in memory."""
        if name == "token_rows" and self.config.head is not None:
            return self._rows_of_head()[rows]
        if name == "embedding" and not rows.start:
            self._check_tied()
        return self._stored[self._name(group, name)].mapped()[rows]

    def _check_tied(self) -> None:
        """Raises FlyJaxError for an unembedding that is another table than config.json says."""
        table, own = (self._stored.get(_OUTER[one]) for one in ("embedding", "unembedding"))
        if self.config.tied_embeddings and table and own and not own.equals(table):
            raise FlyJaxError(
                f"{own.file} has an lm_head.weight other than the embedding, and config.json ties "
                "them; set tie_word_embeddings to false in config.json."
            )

    def _rows_of_head(self) -> np.ndarray:
        """The `token_rows` of a head; its file has each row's token less the row's index."""
        tensor = self._stored[_OF_HEAD["token_rows"]]
        distances = tensor.mapped().astype(np.int64)
        tokens = np.arange(len(distances)) + distances
        size = self.config.vocab_size
        if len(np.unique(tokens)) < len(tokens) or tokens.min() < 0 or tokens.max() >= size:
            raise FlyJaxError(
                f"The tensor d2t in {tensor.file} names a token twice or one beyond the vocabulary "
                f"of {size}; each row of a head has a token of its own: download the file again."
            )
        rows = np.full(size, self.config.unknown_row, np.int32)
        rows[tokens] = np.arange(len(tokens))
        return rows

    def _name(self, group: Group, name: str) -> str:
        found = tensor_name(group, name, of_head=self.config.head is not None)
        return found.replace("layers.0.", "midlayer.") if _HEAD_SAYS in self._stored else found

    def describe(self, group: Group, name: str) -> str:
        """The tensor and its file, in words."""
        tensor, _ = next(iter(self._tensors(group, name, group.specs(self.config)[name]).values()))
        return f"The tensor {tensor} in {self._stored[tensor].file}"

    def _tensors(
        self, group: Group, name: str, spec: ParameterSpec
    ) -> dict[str, tuple[str, StoredPart]]:
        """The tensors that hold a parameter, by the parts of its packing, or by "" alone.

        Matrices that a packing left out are stored as they are.
        """
        whole, shape = self._name(group, name), tensor_shape(name, spec)
        plain = self._stored.get(whole)
        is_plain = plain is not None and plain.dtype in DTYPES
        if name == "token_rows" and self.config.head is not None:
            return {"": (whole, StoredPart(((self.config.unknown_row,),), ("I64", "I32")))}
        if self.packing is None or is_plain or not is_transposed(name, spec):
            dtypes = ("I32",) if name == "token_rows" else tuple(DTYPES)
            return {"": (whole, StoredPart((shape,), dtypes))}
        stem = whole.removesuffix("weight")
        return {
            part: (stem + part, one)
            for part, one in self.packing.parts(*shape).items()
            if not one.is_optional or stem + part in self._stored
        }


def _check(folder: Path, stored: dict[str, StoredTensor], needed: dict[str, StoredPart]) -> None:
    if missing := [tensor for tensor in needed if tensor not in stored]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FlyJaxError(
            f"{folder} lacks the tensor {missing[0]}{more}; config.json asks for it: download the "
            "whole checkpoint, or give the config.json that belongs to the weights."
        )
    for tensor, part in needed.items():
        found = stored[tensor]
        if found.shape not in part.shapes:
            raise FlyJaxError(
                f"The tensor {tensor} in {found.file} has shape {list(found.shape)}; config.json "
                f"asks for {' or '.join(str(list(shape)) for shape in part.shapes)}: give weights "
                "and config.json of the same model."
            )
        if found.dtype not in part.dtypes:
            raise FlyJaxError(
                f"The tensor {tensor} in {found.file} is stored as {found.dtype}; config.json has "
                f"it read as {', '.join(part.dtypes)}: download the whole checkpoint again, or "
                "give one that is not quantised."
            )


def row_sharding(layout: Layout | None, spec: ParameterSpec, num_rows: int = 1) -> Sharding:
    """The first sharding of a stored matrix: contiguous rows on as many devices as possible."""
    if layout is None:
        return SingleDeviceSharding(jax.devices()[0])
    names = [name for entry in layout.spec(spec.axes, spec.shape) for name in axes_in(entry)]
    while num_rows % math.prod(layout.mesh.shape[name] for name in names):
        names.pop()
    return NamedSharding(layout.mesh, PartitionSpec(tuple(names)) if names else PartitionSpec())


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    file: Path
    shape: tuple[int, ...]  # as stored; matrices are [out, in]
    dtype: str  # as the header spells it, such as "BF16"
    begin: int  # place of its first byte in the file
    end: int  # place of the one after its last

    def mapped(self) -> np.ndarray:
        """The numbers in a mapped file, read as they are looked at."""
        return self._bytes().view(_STORED[self.dtype]).reshape(self.shape)

    def is_zero(self) -> bool:
        """Tells whether all its numbers are zero."""
        return self.begin == self.end or not self._bytes().any()

    def equals(self, other: StoredTensor) -> bool:
        """Tells whether another tensor has the same bytes."""
        one, two = self._bytes(), other._bytes()
        parts = range(0, max(len(one), len(two)), READ_BUFFER_BYTES)
        ends = (slice(at, at + READ_BUFFER_BYTES) for at in parts)
        return all(np.array_equal(one[some], two[some]) for some in ends)

    def _bytes(self) -> np.ndarray:
        return np.asarray(np.memmap(self.file, np.uint8, "r", self.begin, (self.end - self.begin,)))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors files, by name, unread.

    FlyJaxError: a missing folder or file, one that is damaged or cut off, or a tensor in two.
    """
    _check_folder(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("[!.]*.safetensors")):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise FlyJaxError(
                    f"The tensor {name} lies both in {tensors[name].file} and in {file}; "
                    "it must be in one file: remove the other."
                )
            tensors[name] = tensor
    return tensors


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FlyJaxError(
            f"{folder} {what}; fly_jax needs a folder: give that of a Hugging Face checkpoint."
        )
    index, names = folder / INDEX, list[str]()
    if index.exists():
        try:
            files = json.loads(index.read_bytes())["weight_map"].values()
            names = sorted({str(file) for file in files})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FlyJaxError(
                f"{index} is not an index of safetensors files ({_reason(error)}); {_AGAIN}."
            ) from error
    for name in names:
        if not (folder / name).is_file():
            raise FlyJaxError(
                f"{folder / name} does not exist, but {INDEX} names it; the checkpoint needs all "
                "of its files: download this one."
            )
    if not any(folder.glob("[!.]*.safetensors")):
        if one := next(folder.glob("*.gguf"), None):
            raise FlyJaxError(f"{folder} holds {one.name} and no safetensors files; give {one}.")
        other = next((path for kind in ("*.bin", "*.pth") for path in folder.glob(kind)), None)
        found = f"only {other.name} and the like" if other else "no weights"
        raise FlyJaxError(
            f"{folder} holds {found}; fly_jax needs safetensors files: download the model in "
            "that format, or convert it with transformers' save_pretrained."
        )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    try:
        # The package checks the header and the file's length. It would say of any file that cannot
        # be opened that it is not there.
        with file.open("rb") as stream, safe_open(file, "numpy"):
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
            data = stream.tell()  # where the tensors begin, from which the header counts
        header.pop("__metadata__", None)
        for name, entry in header.items():
            match entry:
                case {"dtype": str(dtype), "shape": shape, "data_offsets": [begin, end]}:
                    found[name] = StoredTensor(file, tuple(shape), dtype, data + begin, data + end)
                case _:  # a form that the package takes and nobody writes
                    raise SafetensorError(f"{name} lacks a dtype, a shape or two data_offsets")
    except OSError as error:
        raise FlyJaxError(f"{file} cannot be read ({_reason(error)}); {_AGAIN}.") from error
    except SafetensorError as error:
        raise FlyJaxError(
            f"{file} is no whole safetensors file ({_reason(error)}); {_AGAIN}."
        ) from error
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
