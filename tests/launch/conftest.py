from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pair import write_pair

from fly_jax.launch.__main__ import main


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def models(tiny_pair: tuple[Path, Path]) -> list[str]:
    """The flags that name the tiny pair."""
    target, draft = tiny_pair
    return [f"--target={target}", f"--draft={draft}", "--dtype=float32"]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must end with status 2 and one sentence, and returns that."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.endswith(".\n")
        assert captured.err.count("\n") == 1
        assert "Traceback" not in captured.err
        return captured.err

    return run
