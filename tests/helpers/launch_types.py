"""The fixtures of commands, as their users annotate them, and a bar that is interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

Decoded = Callable[..., list[dict[str, Any]]]
Refused = Callable[..., str]
Ran = Callable[..., Any]
Talk = Callable[..., tuple[list[str], str]]
Folders = tuple[Path, Path]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


class Interrupted(tqdm):
    def update(self, n: float | None = 1) -> bool | None:
        raise KeyboardInterrupt
