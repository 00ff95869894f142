"""Weights in the types that they are used in: made once, kept in a file, and mapped after that.

A file is in safetensors' format, with a checksum of each tensor in its metadata. Its name is a
digest of the files that it was made from, of the types, and of `_VERSION`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from jaxtyping import Array

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import Group, LlamaConfig, groups, scale_name
from fly_jax.models.checkpoints.blocks import on_all_cores, row_blocks
from fly_jax.models.checkpoints.gguf_source import GgufSource
from fly_jax.models.checkpoints.hugging_face import HuggingFaceSource, arranged, tensor_shape
from fly_jax.models.checkpoints.source import Source, fingerprint, identity
from fly_jax.models.quantise import quantised_rows
from fly_jax.sharding.kept_files import forget_oldest, kept_folder, make_folder
from fly_jax.sharding.rules import Layout

VARIABLE = "FLY_JAX_WEIGHTS_CACHE"
# Of what is in the files; another one makes all of them anew.
_VERSION = 1
# What was not read for longest goes when the files take more than this.
_MOST_BYTES = 32 * 2**30
# Smaller weights are made in less time than it takes to look for them.
_LEAST_BYTES = 64 * 2**20
# XLA takes an array as it lies where it begins at such a place.
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_NAMES = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "int32": "I32"}

Say = Callable[[str], object]


def has_rows(source: Source) -> TypeGuard[GgufSource | HuggingFaceSource]:
    """Whether a checkpoint's tensors can be read by rows, and so be kept."""
    is_plain = isinstance(source, HuggingFaceSource) and source.packing is None
    return is_plain or isinstance(source, GgufSource)


def weights_folder(given: str | Path | None) -> Path | None:
    """Where converted weights are kept; None for nowhere.

    Args:
      given: "off" or "none" for nowhere. None takes the environment variable FLY_JAX_WEIGHTS_CACHE,
        else a folder of the user's own.
    """
    return kept_folder(given, VARIABLE, "weights")


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


class Kept:
    """A checkpoint whose weights lie in the types that they are used in, matrices as [out, in].

    They are a mapped file's, or in memory where there is no such file.
    """

    arranged = staticmethod(arranged)

    def __init__(
        self,
        source: GgufSource | HuggingFaceSource,
        path: Path,
        dtype: np.dtype,
        *,
        int8: bool,
        folder: Path | None,
        say: Say,
    ) -> None:
        """Maps what was kept, or converts the weights.

        Args:
          path: the source's.
          dtype: of what has no type of its own.
          int8: matrices are integers of 8 bits, with scales.
          folder: where the file is; None for memory.
          say: gets a sentence where the file is damaged, or cannot be kept.

        Raises:
          FlyJaxError: a weight is NaN or infinite.
        """
        self.config, self.int8, self._source = source.config, int8, source
        self._places = _places(self.config, dtype, int8=int8)
        self._size = max(place.end for place in self._places.values())
        data: np.ndarray | None = None
        if folder is not None and self._size >= _LEAST_BYTES:
            types = [_VERSION, dtype.name, int8, identity(path), fingerprint(path)]
            digest = hashlib.sha256(json.dumps(types).encode()).hexdigest()[:32]
            data = self._in_file(folder / f"{digest}.safetensors", say)
        self._data = self._in_memory() if data is None else data

    def tensor(self, group: Group, name: str) -> np.ndarray:
        """A parameter's tensor where it lies."""
        place = self._places[f"{group.name}.{name}"]
        return self._data[place.begin : place.end].view(place.dtype).reshape(place.shape)

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """The group's tensors on the first device."""
        specs = group.specs(self.config, int8=self.int8)
        return {name: jax.device_put(self.tensor(group, name), jax.devices()[0]) for name in specs}

    def describe(self, group: Group, name: str) -> str:
        """Where a parameter lies in the checkpoint that these weights were made from."""
        return self._source.describe(group, name)

    def _in_memory(self) -> np.ndarray:
        # NumPy's own arrays do not begin where XLA takes them as they lie.
        pages = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(pages, np.uint8)

        def write(block: np.ndarray, at: int) -> None:
            memory[at : at + block.nbytes] = block.view(np.uint8).ravel()

        self._convert(write)
        return memory

    def _in_file(self, file: Path, say: Say) -> np.ndarray | None:
        """What a file holds, which is made where there is none; None where it cannot be kept."""
        if file.exists():
            data = self._checked(file)
            if data is not None:
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
        partial = file.with_name(f"{file.stem}.{os.getpid()}.partial")
        begin = len(self._header(None))
        try:
            with partial.open("wb+", buffering=0) as stream:

                def write(block: np.ndarray, at: int) -> None:
                    left = memoryview(block.view(np.uint8).ravel().data)
                    while left:
                        done = os.pwrite(stream.fileno(), left, begin + at)
                        left, at = left[done:], at + done

                self._convert(write)
                data = self._mapped(partial)
                os.pwrite(stream.fileno(), self._header(data), 0)
            partial.replace(file)
        except OSError as error:
            say(
                f"The converted weights are not kept in {file.parent} ({error.strerror}); make "
                "room, or give --weights_cache another folder, or off."
            )
            return None
        finally:
            partial.unlink(missing_ok=True)
        forget_oldest(file.parent, _MOST_BYTES)
        return data

    def _checked(self, file: Path) -> np.ndarray | None:
        """What a file holds; None where that is not what was written."""
        with contextlib.suppress(OSError, ValueError):  # it is gone, or cut off
            data = self._mapped(file)
            header = self._header(data)
            with file.open("rb") as stream:
                if stream.read(len(header)) == header:
                    return data
        return None

    def _mapped(self, file: Path) -> np.ndarray:
        """The bytes of all tensors; raises ValueError where a file has others."""
        begin = len(self._header(None))
        if file.stat().st_size != begin + self._size:
            raise ValueError(file)
        return np.asarray(np.memmap(file, np.uint8, "r", begin))

    def _header(self, data: np.ndarray | None) -> bytes:
        """The beginning of the file, with the checksums of the data; as long without data."""
        sums = dict.fromkeys(self._places, 0)

        def add(key: str) -> None:
            assert data is not None
            sums[key] = zlib.crc32(data[self._places[key].begin : self._places[key].end].data)

        if data is not None:
            on_all_cores(add, self._places)
        fields: dict[str, Any] = {
            key: {
                "dtype": _NAMES[place.dtype.name],
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
        """Hands over all tensors, block by block, each with the place of its first byte."""

        def convert(one: tuple[str, _Place, slice]) -> None:
            key, place, rows = one
            block = self._source.read_rows(place.group, place.name, rows)
            if not np.isfinite(block).all():
                raise FlyJaxError(
                    f"{self.describe(place.group, place.name)} holds NaN or infinite weights; they "
                    "must be finite: download the file again or train the model anew."
                )
            scales = self._places.get(scale_name(key))
            if scales is not None:
                block, scale = quantised_rows(block.astype(np.float32))
                write(scale, scales.of_row(rows.start))
            write(np.ascontiguousarray(block, place.dtype), place.of_row(rows.start))

        blocks = [
            (key, place, rows)
            for key, place in self._places.items()
            if place.name in place.group.specs(self.config)  # and is no scale
            for rows in row_blocks(place.shape)
        ]
        on_all_cores(convert, blocks)


def _places(config: LlamaConfig, dtype: np.dtype, *, int8: bool) -> dict[str, _Place]:
    """Every tensor by its name in the file, one behind the other."""
    places: dict[str, _Place] = {}
    end = 0
    for group in groups(config):
        for name, spec in group.specs(config, int8=int8).items():
            place = _Place(group, name, tensor_shape(name, spec), spec.dtype or dtype, end)
            places[f"{group.name}.{name}"], end = place, place.end
    return places
