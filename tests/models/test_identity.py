"""What tells checkpoints apart."""

from __future__ import annotations

import shutil
from pathlib import Path

from tiny_pair import write_pair

from fly_jax.models.checkpoints.source import identity


def test_copies_are_the_same_and_anything_else_is_not(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    assert identity(copy) == identity(target)
    assert identity(draft) != identity(target)  # of the same shapes, names and sizes
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert identity(copy) != identity(target)
    weights.write_bytes((target / "model.safetensors").read_bytes())
    assert identity(copy) == identity(target)
    (copy / "config.json").write_text("{}")
    assert identity(copy) != identity(target)
