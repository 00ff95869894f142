"""The fixtures of tests/launch, as their users annotate them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Decoded = Callable[..., list[dict[str, Any]]]
Refused = Callable[..., str]
Talk = Callable[..., tuple[list[str], str]]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
