"""GGUF files: the header, read at once and never beyond what the file holds, and tensors by rows.

The header is "GGUF", a version, the numbers of tensors and of values of the metadata, the values
(name, type, value), and the tensors (name, sizes, type, place behind the header).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from fly_jax.errors import FlyJaxError

# The types that are read: plain ones, and those that models are quantised to most often.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_MAGIC = b"GGUF"
_PLAIN = {"F32": "f4", "F16": "f2"}
# NumPy's types of a value of the metadata, by GGUF's number; texts and lists have a length.
_VALUES = {
    0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8",
    12: "f8",
}  # fmt: skip
_TEXT, _LIST, _LENGTH_BYTES = 8, 9, 8
_MOST_SIZES = 4


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file."""

    shape: tuple[int, ...]  # rows first, as Hugging Face has it
    kind: gguf.GGMLQuantizationType
    begin: int  # place of its first byte in the file
    stored: tuple[np.dtype, tuple[int, ...]]  # of what lies there; blocks of numbers are bytes


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A file with its header, which was read."""

    path: Path
    tensors: dict[str, GgufTensor]
    values: dict[str, Any]  # the metadata: numbers, texts, and lists of them

    def needed(self, key: str) -> Any:
        """A value that the file must have; raises FlyJaxError where it lacks it."""
        if (value := self.values.get(key)) is None:
            raise FlyJaxError(
                f"{self.path} lacks the key {key}; a GGUF file needs it: download the file again, "
                "or convert the model anew."
            )
        return value

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Reads rows of a tensor, or a part of a vector, in float32; no more stays in memory."""
        one = self.tensors[name]
        dtype, shape = one.stored
        data = np.asarray(np.memmap(self.path, dtype, "r", one.begin, shape))
        if (blocks := getattr(gguf.quants, one.kind.name, None)) is None:
            return data[rows].astype(np.float32)
        is_matrix = data.ndim > 1  # a part of a vector is not one of its bytes
        data = data[rows] if is_matrix else data
        # All at once: `gguf.dequantize` takes sixteen rows at a time, and twice as long.
        found = blocks.dequantize_blocks(data.reshape(-1, blocks.type_size))
        found = found.reshape(*data.shape[:-1], -1)
        return found if is_matrix else found[rows]


def open_gguf(path: Path) -> GgufFile:
    """Reads the header; FlyJaxError for a missing, cut off, unknown or unsupported file."""
    is_gguf = False
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == _MAGIC
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                found = _Header(data).read(path)
    except OSError as error:
        raise FlyJaxError(
            f"{path} cannot be read ({error.strerror or error}); correct the path."
        ) from error
    except (ValueError, LookupError, struct.error) as error:
        what = "cut off or damaged" if is_gguf else "no GGUF file"
        told = f"{path} is {what}; correct the path, or download the file again."
        raise error if isinstance(error, FlyJaxError) else FlyJaxError(told) from error
    for name, tensor in found.tensors.items():
        if tensor.kind.name not in TYPES:
            raise _unread(path, name, tensor.kind.name)
    return found


def _unread(path: Path, tensor: str, kind: object) -> FlyJaxError:
    return FlyJaxError(
        f"The tensor {tensor} in {path} is stored as {kind}; fly_jax reads {', '.join(TYPES)}: "
        "give a file of one of these."
    )


class _Header:
    """A reader of the header, part by part; ValueError for one that the file does not hold."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != _MAGIC:
            raise ValueError("It has another beginning.")
        # The byte order is the one in which the version is small.
        self._order = "<" if data[4:6] != b"\0\0" else ">"
        self._data, self._at = data, len(_MAGIC)
        self._length = struct.Struct(f"{self._order}Q")

    def read(self, path: Path) -> GgufFile:
        """Reads the whole header."""
        if (version := self._number(4)) not in READER_SUPPORTED_VERSIONS:
            known = " and ".join(map(str, READER_SUPPORTED_VERSIONS))
            raise FlyJaxError(
                f"{path} is a GGUF file of version {version}, and the installed gguf package reads "
                f"{known}; convert the model anew, or upgrade gguf."
            )
        num_tensors, num_values = self._number(), self._number()
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key, kind = self._texts(1)[0], self._number(4)
            if key in values:
                raise ValueError(f"It has {key} twice.")
            if kind == _LIST:
                values[key] = self._list(self._number(4), self._number())
            else:
                values[key] = self._list(kind, 1)[0]
        claims: dict[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType, int]] = {}
        for _ in range(num_tensors):
            name, number = self._texts(1)[0], self._number(4)
            if name in claims or number > _MOST_SIZES:
                raise ValueError(f"It has {name} twice, or with {number} axes.")
            shape = tuple(self._number() for _ in range(number))[::-1]
            kind = self._number(4)
            if kind not in list(gguf.GGMLQuantizationType):  # a newer one, or one given up
                raise _unread(path, name, f"type {kind}")
            claims[name] = (shape, gguf.GGMLQuantizationType(kind), self._number())
        unit = values.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(unit) is not int or unit < 1 or unit & (unit - 1):
            raise ValueError(f"Its tensors begin at multiples of {unit}.")
        begin = -(-self._at // unit) * unit
        tensors = {name: self._tensor(path, *claim, begin) for name, claim in claims.items()}
        ends = 0
        for one in sorted(tensors.values(), key=lambda one: one.begin):
            if one.begin < ends:
                raise ValueError("Two of its tensors overlap.")
            ends = one.begin + math.prod(one.stored[1]) * one.stored[0].itemsize
        return GgufFile(path, tensors, values)

    def _tensor(
        self, path: Path, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, place: int,
        begin: int,
    ) -> GgufTensor:  # fmt: skip
        if kind.name in _PLAIN:
            stored = np.dtype(self._order + _PLAIN[kind.name]), shape
        else:
            if self._order == ">":  # which turns the scales within blocks around too
                raise FlyJaxError(
                    f"{path} is big-endian and has a tensor in {kind.name}; fly_jax reads F32 and "
                    "F16 of such: give the little-endian file."
                )
            stored = np.dtype(np.uint8), gguf.quant_shape_to_byte_shape(shape, kind)
        dtype, sizes = stored
        if begin + place + math.prod(sizes) * dtype.itemsize > len(self._data):
            raise ValueError("It ends before its tensors do.")
        return GgufTensor(shape, kind, begin + place, stored)

    def _taken(self, number: int) -> int:
        """Moves on by so many bytes; returns where they begin."""
        begin, self._at = self._at, self._at + number
        if self._at > len(self._data):
            raise ValueError(f"{number} bytes were claimed at byte {begin}.")
        return begin

    def _number(self, size: int = _LENGTH_BYTES) -> int:
        kind = "Q" if size == _LENGTH_BYTES else "I"
        return struct.unpack_from(self._order + kind, self._data, self._taken(size))[0]

    def _list(self, kind: int, count: int) -> list[Any]:
        if kind == _TEXT:
            return self._texts(count)
        dtype = np.dtype(self._order + _VALUES[kind])
        begin = self._taken(count * dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, begin).tolist() if count else []

    def _texts(self, count: int) -> list[str]:
        if count * _LENGTH_BYTES > len(self._data) - self._at:
            raise ValueError(f"{count} texts were claimed at byte {self._at}.")
        data, at, found = self._data, self._at, list[str]()
        for _ in range(count):  # of hundreds of thousands
            (length,) = self._length.unpack_from(data, at)
            at += _LENGTH_BYTES + length
            if at > len(data):
                raise ValueError(f"{length} bytes were claimed before byte {at}.")
            found.append(data[at - length : at].decode())
        self._at = at
        return found
