"""What a checkpoint folder holds, from the headers of its safetensors files alone.

A file is 8 bytes of header length (little-endian), the header (JSON: dtype, shape and byte range
of each tensor), and the tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from fly_jax.errors import FlyJaxError

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_AGAIN = "download the file again"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
      file: where it lies.
      shape: as stored; matrices are [out, in].
      dtype: as the header spells it, such as "BF16".
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the folder's safetensors files, by name. Reads no weights.

    Raises:
      FlyJaxError: no such folder, no safetensors file, a file that the index names is absent, a
        damaged header, a truncated file, or a tensor that lies in two files.
    """
    _check_folder(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
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
    for name in _indexed_files(folder):
        if not (folder / name).is_file():
            raise FlyJaxError(
                f"{folder / name} does not exist, but {INDEX} names it; the checkpoint needs all "
                "of its files: download this one."
            )
    if not any(folder.glob("*.safetensors")):
        other = next((path for kind in ("*.bin", "*.pth") for path in folder.glob(kind)), None)
        found = f"only {other.name} and the like" if other else "no weights"
        raise FlyJaxError(
            f"{folder} holds {found}; fly_jax needs safetensors files: download the model in "
            "that format, or convert it with transformers' save_pretrained."
        )


def _indexed_files(folder: Path) -> list[str]:
    """The files that the index names, each once; empty if there is no index."""
    path = folder / INDEX
    if not path.exists():
        return []
    try:
        files = json.loads(path.read_bytes())["weight_map"].values()
        return sorted({str(file) for file in files})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlyJaxError(
            f"{path} is not an index of safetensors files ({_reason(error)}); {_AGAIN}."
        ) from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                raise ValueError(
                    f"its length is {length} bytes in a file of {size}; {_MOST_HEADER_BYTES} are "
                    "the most"
                )
            if stream.peek(1)[:1] != b"{":
                raise ValueError("it does not begin with {")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(file, tuple(entry["shape"]), entry["dtype"])
            for name, entry in header.items()
        }
        ends = {name: _checked_end(tensors[name], header[name]) for name in header}
        _check_overlap({name: tuple(header[name]["data_offsets"]) for name in header})
    except OSError as error:
        raise FlyJaxError(f"{file} cannot be read ({_reason(error)}); {_AGAIN}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FlyJaxError(
            f"The safetensors header of {file} is damaged ({_reason(error)}); {_AGAIN}."
        ) from error
    needed = _LENGTH_BYTES + length + max(ends.values(), default=0)
    if size != needed:
        last = max(ends, key=ends.__getitem__, default="nothing")
        state = "truncated" if size < needed else "too long"
        raise FlyJaxError(
            f"{file} is {state}: it has {size} bytes, and its tensors up to {last} need {needed}; "
            f"{_AGAIN}."
        )
    return tensors


def _checked_end(tensor: StoredTensor, entry: dict[str, Any]) -> int:
    """The byte after the tensor, counted from the end of the header."""
    start, end = entry["data_offsets"]
    if start < 0 or end < start or any(size < 0 for size in tensor.shape):
        raise ValueError(f"a tensor lies at bytes {start} to {end}")
    if tensor.dtype in DTYPES:
        bytes_needed = math.prod(tensor.shape) * jnp.dtype(DTYPES[tensor.dtype]).itemsize
        if end - start != bytes_needed:
            raise ValueError(f"{end - start} bytes for shape {list(tensor.shape)}")
    return int(end)


def _check_overlap(ranges: dict[str, tuple[int, int]]) -> None:
    """Refuses tensors of which two have a byte in common."""
    found = sorted((start, end, name) for name, (start, end) in ranges.items() if start < end)
    for (_, end, name), (start, _, other) in itertools.pairwise(found):
        if start < end:
            raise ValueError(f"the tensors {name} and {other} overlap")


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")
