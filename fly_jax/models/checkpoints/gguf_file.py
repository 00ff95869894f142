"""A GGUF file: its metadata and where its tensors lie."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from fly_jax.errors import FlyJaxError

# The types that are read: plain ones, and those that models are quantised to most often.
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A file that has been opened: its header was read, and its tensors are mapped into memory.

    Attributes:
      path: of the file.
      tensors: by name.
    """

    path: Path
    tensors: dict[str, gguf.ReaderTensor]
    fields: dict[str, gguf.ReaderField]

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a text, or a list of them."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def needed(self, key: str) -> Any:
        """A value that the file must have.

        Raises:
          FlyJaxError: it lacks it.
        """
        value = self.value(key)
        if value is None:
            raise FlyJaxError(
                f"{self.path} lacks the key {key}; a GGUF file needs it: download the file again, "
                "or convert the model anew."
            )
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, rows first, as Hugging Face has it."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def rows(self, name: str, rows: slice) -> np.ndarray:
        """Some rows of a tensor, or a part of a vector, in float32."""
        tensor = self.tensors[name]
        return gguf.dequantize(np.asarray(tensor.data[rows]), tensor.tensor_type)


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is a GGUF file, and no folder."""
    return path.suffix == ".gguf" and path.is_file()


def open_gguf(path: Path) -> GgufFile:
    """Reads the header.

    Raises:
      FlyJaxError: the file is missing, cut off, of an unknown version, or has tensors of a type
        that is not read.
    """
    head = b""
    try:
        with path.open("rb") as file:
            head = file.read(8)
        reader = gguf.GGUFReader(path)
    except OSError as error:
        raise FlyJaxError(
            f"{path} cannot be read ({error.strerror or error}); correct the path."
        ) from error
    except Exception as error:  # the library raises whatever a broken header leads to
        raise FlyJaxError(_unreadable(path, head)) from error
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in TYPES:
            raise FlyJaxError(
                f"The tensor {tensor.name} in {path} is stored as {tensor.tensor_type.name}; "
                f"fly_jax reads {', '.join(TYPES)}: give a file of one of these."
            )
    return GgufFile(path, {one.name: one for one in reader.tensors}, dict(reader.fields))


def _unreadable(path: Path, head: bytes) -> str:
    """What is wrong with a file that begins so and that the library cannot read."""
    if head[:4] != b"GGUF":
        return f"{path} is no GGUF file; correct the path, or download the file again."
    version = int.from_bytes(head[4:], "little")
    if version not in READER_SUPPORTED_VERSIONS:
        return (
            f"{path} is a GGUF file of version {version}, and the installed gguf package reads "
            f"{' and '.join(map(str, READER_SUPPORTED_VERSIONS))}; convert the model anew, or "
            "upgrade gguf."
        )
    return f"{path} is cut off or damaged; download the file again."
