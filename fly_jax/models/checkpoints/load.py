"""Loading any known checkpoint straight into its place, or from what was kept of it.

Kept weights lie as they are used, in a mapped file: safetensors with a checksum of each tensor,
named by a digest of the files that it was made from, of the types, and of `_VERSION`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import mmap
import os
import secrets
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from fly_jax.errors import FlyJaxError
from fly_jax.models import architectures
from fly_jax.models.architectures import INT8, Group, LlamaConfig, ParameterSpec, groups, scale_of
from fly_jax.models.checkpoints import hugging_face
from fly_jax.models.checkpoints.converted import RECORD, ConvertedSource
from fly_jax.models.checkpoints.gguf_file import open_gguf
from fly_jax.models.checkpoints.gguf_source import GgufSource, gguf_tokenizer
from fly_jax.models.checkpoints.hugging_face import HuggingFaceSource, arranged
from fly_jax.models.checkpoints.source import Arranging, Source, Stored, fingerprint, identity
from fly_jax.models.integers import multiplies_unsigned, signed, unsigned
from fly_jax.models.llama import Llama, parameter_sharding, turns_layers
from fly_jax.models.quantise import quantised, quantised_rows
from fly_jax.models.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from fly_jax.shapes import Index
from fly_jax.sharding.mesh import forget_oldest, kept_folder, make_folder
from fly_jax.sharding.rules import Layout

# Options of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**20
# Where glibc's own adjustment ends in a process that frees large arrays: see mallopt(3).
_USUAL_MMAP_BYTES, _USUAL_TRIM_BYTES = 2**25, 2**26

# Version of the kept files' content; a new one makes all of them anew.
_VERSION = 3
# When the files take more than this, those that were not read for longest are removed.
_MOST_BYTES = 32 * 2**30
# Smaller weights are made in less time than it takes to look for them.
_LEAST_BYTES = 64 * 2**20
# XLA takes an array as it lies where it begins at such a place.
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_ABANDONED_SECONDS = 3600  # since anybody wrote to a file that is not whole
_STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "int32": "I32"}

Say = Callable[[str], object]


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

    @property
    def num_parameters(self) -> int:
        """The numbers that the model has, the embedding's included."""
        specs = architectures.parameter_specs(self.config)
        return sum(math.prod(one.shape) for one in specs.values())

    def check_draft(self, draft: Checkpoint) -> None:
        """Raises FlyJaxError unless a model, which is to draft for it, has the same tokens."""
        if draft.config.head is not None:  # and has no tokens of its own
            return
        if draft.config.vocab_size != self.config.vocab_size:
            own = len(self.tokenizer.vocabulary.names)
            architectures.shared_vocabulary(self.config, draft.config, own)
        check_same_vocabulary(self.tokenizer, draft.tokenizer)
        # Its own token for drafting may be beyond those in common.
        size = min(draft.config.vocab_size, self.config.vocab_size)
        dataclasses.replace(draft.config, vocab_size=size)


def open_checkpoint(path: Path, target: Checkpoint | None = None) -> Checkpoint:
    """Opens a model and its tokenizer (a head's is its target's); reads no weight."""
    source = open_weights(path)
    if source.config.head is not None:
        if target is None:
            raise FlyJaxError(
                f"{path} holds a head, which is no model of its own; give it as --draft, "
                "and the model that it was trained for as --target."
            )
        return Checkpoint(path, source, target.tokenizer)
    if not isinstance(source, GgufSource):
        return Checkpoint(path, source, load_tokenizer(path, source.config))
    if target is not None and source.shares_tokenizer(target.source):
        return Checkpoint(path, source, target.tokenizer)
    return Checkpoint(path, source, gguf_tokenizer(source.file, source.config.eos_token_ids))


def open_weights(path: Path) -> Source:
    """Checks a folder of weights, or a GGUF file, without reading one.

    FlyJaxError for what is missing, damaged or truncated, or not as the configuration asks.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return GgufSource(open_gguf(path))
    return ConvertedSource(path) if (path / RECORD).exists() else HuggingFaceSource(path)


def load_llama(
    checkpoint: Path | Checkpoint, *, layout: Layout | None = None, dtype: DTypeLike = jnp.float32,
    int8: bool = False, vocab_size: int | None = None, unstacked: bool = False,
    weights_cache: str | Path | None = "off", say: Say = warnings.warn,
) -> Llama:  # fmt: skip
    """Loads weights straight into their place.

    FlyJaxError as `open_weights`, for a weight that is NaN or infinite, or a drafter's `token_rows`
    that are none of its rows.

    Beyond its devices' parts of the model, a process needs memory for its parts of one group (a
    layer, or the embedding) a few times over. For a model that is `unstacked` on a CPU it needs
    hardly any, unless it is small: the arrays are the bytes that were converted, in a mapped file
    or in memory.

    Args:
      checkpoint: the folder of a Hugging Face checkpoint with safetensors, or of what `convert`
        has written; or what `open_checkpoint` gives, which is not opened again.
      layout: how parameters are split over a mesh; None puts them on the first device.
      dtype: of the parameters, whatever the stored type; int8 matrices stay integers.
      int8: the matrices become int8 as they are read.
      vocab_size: tokens of the vocabulary, without the rows that pad it; None is all.
      unstacked: the model is `Llama.unstacked`, on one device.
      weights_cache: folder that keeps what was converted for one device; "off" or "none" for none.
        None takes the environment variable FLY_JAX_WEIGHTS_CACHE, else a folder of the user's own.
      say: gets a sentence where such a file is damaged, or cannot be kept.
    """
    source = open_weights(checkpoint) if isinstance(checkpoint, Path) else checkpoint.source
    config = source.config
    if vocab_size not in (None, config.vocab_size):
        config = dataclasses.replace(config, vocab_size=vocab_size)
    if layout is None and _has_rows(source):
        path = checkpoint if isinstance(checkpoint, Path) else checkpoint.path
        kept = _Kept(source, np.dtype(dtype), int8=int8)
        lies = source.stored_types == {_STORED_NAMES.get(kept.dtype.name)}  # which needs no second
        is_converted = unstacked or int8 or not lies
        is_mapped = is_converted and kept.map(path, weights_cache, say)
        if unstacked:
            return _unstacked(kept, config)
        source = kept if is_mapped else source
    outer: dict[str, Array] = {}
    stacks: dict[str, Array] = {}
    with large_arrays_given_back():
        for group in groups(config):
            width = jnp.dtype(dtype)
            parts = read_group(source, group, config, layout=layout, dtype=width, int8=int8)
            if "token_rows" in parts:
                _check_rows(parts["token_rows"], config, source.describe(group, "token_rows"))
            if group.layer is None:
                outer |= parts
            else:
                types = tuple((name, part.dtype) for name, part in parts.items())
                empty, insert = _stacking(config, layout, types)
                stacks = insert(stacks or empty(), parts, group.layer)
            del parts  # before the next are read,
            jax.block_until_ready(stacks)  # which would pile up if this did not wait
    model = Llama(config, outer | stacks, layout)
    if unstacked:
        model.unstack()
    return model


def _unstacked(source: _Kept, config: LlamaConfig) -> Llama:
    """An unstacked Llama of tensors as they lie, one array per layer."""
    turned = turns_layers(config, source.dtype, has_integers=source.int8)
    parameters: dict[str, Any] = {}
    for group in groups(config):
        for name, spec in group.specs(config, int8=source.int8).items():
            # Outputs come first, and tokens are outputs.
            sizes = dict(zip(spec.axes, spec.shape, strict=True))
            axes = sorted(spec.axes, key=spec.inputs.__contains__)
            tensor = source.tensor(group, name)[: sizes.get("vocab")]
            lying = tensor.reshape([sizes[axis] for axis in axes])
            if group.layer is not None and not turned:
                lying = lying.transpose([axes.index(axis) for axis in spec.axes])
            part = jax.device_put(lying, jax.devices()[0])
            if name == "token_rows":
                _check_rows(part, config, source.describe(group, name))
            parameters[name] = part if group.layer is None else (*parameters.get(name, ()), part)
    return Llama(config, parameters)


def _check_rows(rows: Int[Array, " vocab"], config: LlamaConfig, where: str) -> None:
    if not bool(jnp.all((rows >= 0) & (rows <= config.unknown_row))):
        raise FlyJaxError(
            f"{where} names rows that the embedding does not have; each must be from 0 to "
            f"{config.unknown_row}: make the drafter again."
        )


def read_group(
    source: Source, group: Group, config: LlamaConfig, *, layout: Layout | None, dtype: jnp.dtype,
    int8: bool,
) -> dict[str, Array]:  # fmt: skip
    """Reads the parameters of a group, as `Llama` takes them but without the axis `layers`.

    The config is the source's, or has a smaller vocabulary; `dtype` is of those without a type of
    their own. FlyJaxError for a damaged file, or a weight that is NaN or infinite.
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
        source.read(group, layout), arranged=source.arranged,
        specs=tuple(group.specs(source.config, int8=source.int8).items()),
        vocab_size=config.vocab_size, quantise=int8 and not source.int8, dtype=dtype,
    )  # fmt: skip
    for name, is_finite in jax.device_get(finite).items():
        _check_finite(is_finite, source, group, name)
    return parts


def _check_finite(is_finite: np.bool, source: Source, group: Group, name: str) -> None:
    if not is_finite:
        raise FlyJaxError(
            f"{source.describe(group, name)} holds NaN or infinite weights; they must be "
            "finite: download the file again or train the model anew."
        )


def _arranged(
    stored: Mapping[str, Stored], arranged: Arranging, specs: tuple[tuple[str, ParameterSpec], ...],
    vocab_size: int, quantise: bool, dtype: jnp.dtype,
) -> tuple[dict[str, Array], dict[str, Bool[Array, ""]]]:  # fmt: skip
    """Arranges a group's parameters; also tells for each whether its numbers are finite."""
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
            parts[name], parts[scale_of(name)] = quantised(part, spec, INT8)
        else:
            parts[name] = part.astype(spec.dtype or dtype)
    return parts, finite


@functools.lru_cache(maxsize=64)
def _stacking(
    config: LlamaConfig, layout: Layout | None, types: tuple[tuple[str, np.dtype], ...]
) -> tuple[Wrapped, Wrapped]:
    """The programs that make empty stacks of the layers' parts, and that insert a layer's."""
    specs = architectures.parameter_specs(config, INT8)  # also names those of other models
    places = {name: parameter_sharding(layout, specs[name]) for name, _ in types}

    def empty() -> dict[str, Array]:
        return {name: jnp.zeros(specs[name].shape, dtype) for name, dtype in types}

    def insert(stacks: dict[str, Array], parts: dict[str, Array], layer: Index) -> dict[str, Array]:
        update = jax.lax.dynamic_update_index_in_dim
        return {name: update(stacks[name], part, layer, 0) for name, part in parts.items()}

    inserting = jax.jit(insert, donate_argnames=("stacks",), out_shardings=places)
    return jax.jit(empty, out_shardings=places), inserting


@contextlib.contextmanager
def large_arrays_given_back() -> Iterator[None]:
    """Returns freed memory of large arrays to the system while it is entered; on glibc only.

    By default glibc keeps more with a larger model, as benchmarks/load_memory.py measures.
    """
    _set_malloc(_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        _set_malloc(_MMAP_THRESHOLD, _USUAL_MMAP_BYTES)
        _set_malloc(_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)


def _set_malloc(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(option, value)


def _has_rows(source: Source) -> TypeGuard[GgufSource | HuggingFaceSource]:
    """Tells whether a checkpoint's tensors can be read by rows, and so be kept."""
    return source.arranged is arranged  # as Hugging Face has them, and in one piece


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor, and where it begins and ends in the bytes of all."""

    group: Group
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    def of_row(self, row: int) -> int:
        return self.begin + row * math.prod(self.shape[1:]) * self.dtype.itemsize


class _Kept:
    """A checkpoint whose weights lie as large models use them, [out, in], in a file or memory."""

    arranged = staticmethod(arranged)

    def __init__(
        self, source: GgufSource | HuggingFaceSource, dtype: np.dtype, *, int8: bool
    ) -> None:
        """Places each tensor; those that have no type of their own get `dtype`.

        Where this machine multiplies matrices of uint8, those of int8 are kept so.
        """
        self.config, self.int8, self._source, self.dtype = source.config, int8, source, dtype
        self._integers = np.dtype(np.uint8 if multiplies_unsigned() else np.int8) if int8 else None
        self._places = _places(self.config, dtype, self._integers)
        self._size = max(place.end for place in self._places.values())

    def map(self, path: Path, folder: str | Path | None, say: Say) -> bool:
        """Maps the file of the weights converted from `path`, or makes it; tells whether it could.

        `folder` is `load_llama`'s `weights_cache`. FlyJaxError for a weight that is not finite.
        """
        if self._size < _LEAST_BYTES:
            return False
        found = kept_folder(folder, "FLY_JAX_WEIGHTS_CACHE", "weights")
        if found is None:
            return False
        integers = "uint8" if self._integers == np.uint8 else self.int8
        types = [_VERSION, self.dtype.name, integers, identity(path), fingerprint(path)]
        digest = hashlib.sha256(json.dumps(types).encode()).hexdigest()[:32]
        if (data := self._in_file(found / f"{digest}.safetensors", say)) is not None:
            self._data = data
        return data is not None

    @functools.cached_property
    def _data(self) -> np.ndarray:
        """The bytes of all tensors: in memory, unless a file was mapped."""
        # NumPy's own arrays do not begin where XLA takes them as they lie.
        pages = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(pages, np.uint8)

        def write(block: np.ndarray, at: int) -> None:
            memory[at : at + block.nbytes] = block.view(np.uint8).ravel()

        self._convert(write)
        return memory

    def tensor(self, group: Group, name: str) -> np.ndarray:
        """The tensor of a parameter, where it lies."""
        place = self._places[f"{group.name}.{name}"]
        return self._data[place.begin : place.end].view(place.dtype).reshape(place.shape)

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """Puts the group's tensors on the first device."""
        specs = group.specs(self.config, int8=self.int8)
        first = jax.devices()[0]
        return {name: signed(jax.device_put(self.tensor(group, name), first)) for name in specs}

    def describe(self, group: Group, name: str) -> str:
        """The place of a parameter in the original checkpoint, in words."""
        return self._source.describe(group, name)

    def _in_file(self, file: Path, say: Say) -> np.ndarray | None:
        """The bytes of a file, made where there is none; None where it cannot be kept."""
        if os.path.exists(file):  # which Path raises of a folder that may not be searched
            if (data := self._checked(file)) is not None:
                with contextlib.suppress(OSError):  # of a file that is only read
                    os.utime(file)  # those that were not read go before it
                return data
            say(f"The converted weights in {file} are damaged; they are made anew.")
            with contextlib.suppress(OSError):
                file.unlink()
        try:
            make_folder(file.parent, "Converted weights", "weights_cache")
        except FlyJaxError as error:
            say(str(error))
            return None
        free = shutil.disk_usage(file.parent).free
        if self._size > min(free // 2, _MOST_BYTES):
            say(
                f"The converted weights take {self._size / 1e9:.1f} GB and are not kept: at most "
                f"{_MOST_BYTES / 1e9:.0f} GB are, and half of the {free / 1e9:.1f} GB that "
                f"{file.parent} has room for; give --weights_cache another folder, or off."
            )
            return None
        partial = file.with_name(f"{file.stem}.{secrets.token_hex(8)}.partial")
        for left in file.parent.glob(f"{file.stem}.*.partial"):  # by a process that was killed
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    left.unlink()
        begin = len(self._header(None))
        try:
            with partial.open("wb+", buffering=0) as stream:

                def write(block: np.ndarray, at: int) -> None:
                    left = memoryview(block.view(np.uint8).ravel().data)
                    while left:
                        done = os.pwrite(stream.fileno(), left, begin + at)
                        left, at = left[done:], at + done

                self._convert(write)
                data, _, header = self._mapped(partial)
                os.pwrite(stream.fileno(), header, 0)
            partial.replace(file)
        except OSError as error:
            say(
                f"The converted weights are not kept in {file.parent} ({error.strerror}); make "
                "room, or give --weights_cache another folder, or off."
            )
            return None
        finally:
            partial.unlink(missing_ok=True)
        forget_oldest(file.parent, _MOST_BYTES, "[0-9a-f]" * 32 + ".*")  # and nobody else's
        return data

    def _checked(self, file: Path) -> np.ndarray | None:
        """The bytes of a file; None where they are not those that were written."""
        with contextlib.suppress(OSError, ValueError):  # it is gone, or cut off
            data, written, header = self._mapped(file)
            return data if written == header else None
        return None

    def _mapped(self, file: Path) -> tuple[np.ndarray, bytes, bytes]:
        """The bytes of all tensors, the header of the file and theirs; ValueError for its size."""
        begin = len(self._header(None))
        if file.stat().st_size != begin + self._size:
            raise ValueError(file)
        with file.open("rb") as stream:
            pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(pages, np.uint8, offset=begin)
        header = self._header(data)
        pages.madvise(mmap.MADV_DONTNEED)  # only what is used comes again, few rows of an embedding
        return data, pages[:begin], header

    def _header(self, data: np.ndarray | None) -> bytes:
        """The beginning of the file, with the checksums of the data; as long without data."""
        sums = dict.fromkeys(self._places, 0)

        def add(key: str) -> None:
            assert data is not None
            sums[key] = zlib.crc32(data[self._places[key].begin : self._places[key].end].data)

        if data is not None:
            hugging_face.on_all_cores(add, self._places)
        fields: dict[str, Any] = {
            key: {
                "dtype": _STORED_NAMES[place.dtype.name],
                "shape": place.shape,
                "data_offsets": [place.begin, place.end],
            }
            for key, place in self._places.items()
        }
        fields["__metadata__"] = {key: f"{value:08x}" for key, value in sums.items()}
        text = json.dumps(fields).encode()
        text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def _convert(self, write: Callable[[np.ndarray, int], None]) -> None:
        """Writes all tensors, block by block, each with the place of its first byte."""

        def convert(one: tuple[str, _Place, slice]) -> None:
            key, place, rows = one
            block = self._source.read_rows(place.group, place.name, rows)
            _check_finite(np.isfinite(block).all(), self, place.group, place.name)
            if (scales := self._places.get(scale_of(key))) is not None:
                block, scale = quantised_rows(block.astype(np.float32))
                write(scale, scales.of_row(rows.start))
                if place.dtype == np.uint8:
                    block = unsigned(block)
            write(np.ascontiguousarray(block, place.dtype), place.of_row(rows.start))

        blocks = [
            (key, place, rows)
            for key, place in self._places.items()
            if place.name in place.group.specs(self.config)  # and is no scale
            for rows in hugging_face.row_blocks(place.shape)
        ]
        hugging_face.on_all_cores(convert, blocks)


def _places(config: LlamaConfig, dtype: np.dtype, integers: np.dtype | None) -> dict[str, _Place]:
    """The places of all tensors by their names in the file, one behind the other.

    Matrices are `integers` of this type, with scales; None leaves them in the other type.
    """
    found = [
        _Place(
            group, name, hugging_face.tensor_shape(name, spec),
            integers if integers and spec.dtype == np.int8 else spec.dtype or dtype, 0,
        )
        for group in groups(config)
        for name, spec in group.specs(config, int8=integers is not None).items()
    ]  # fmt: skip
    places: dict[str, _Place] = {}
    end = 0
    # Uneven ones last, so that all others begin where XLA takes them as they lie.
    for one in sorted(found, key=lambda place: place.end % _ALIGNMENT > 0):
        place = places[f"{one.group.name}.{one.name}"] = dataclasses.replace(one, begin=end)
        end = place.end
    return places
