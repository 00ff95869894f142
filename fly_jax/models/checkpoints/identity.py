"""Which checkpoint a folder holds, without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 2**16


def identity(path: Path) -> str:
    """A digest that is the same for copies of a checkpoint and differs between checkpoints.

    It is made of the configuration and of each weight file's name, size, beginning, middle and end:
    a fine-tuned model has its parent's names and sizes, and other numbers in them.

    Args:
      path: of any format that loads.
    """
    folder, files = path, [path / "config.json"]
    files += [*path.glob("*.safetensors"), *path.glob("orbax/**/*")]
    if path.is_file():
        folder, files = path.parent, [path]
    digest = hashlib.sha256()
    for one in sorted(file for file in files if file.is_file()):
        size = one.stat().st_size
        digest.update(f"{one.relative_to(folder).as_posix()} {size}\n".encode())
        with one.open("rb") as file:
            for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                file.seek(max(start, 0))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
