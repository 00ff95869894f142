"""Which checkpoint a folder holds, without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 2**16


def identity(folder: Path) -> str:
    """A digest that is the same for copies of a checkpoint and differs between checkpoints.

    It is made of the configuration and of each weight file's name, size, beginning, middle and end:
    a fine-tuned model has its parent's names and sizes, and other numbers in them.

    Args:
      folder: of any format that loads.
    """
    files = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("orbax/**/*")]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        with path.open("rb") as file:
            for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                file.seek(max(start, 0))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
