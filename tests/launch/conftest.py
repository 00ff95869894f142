import json
import shutil
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from launch_types import Captured, Decoded, Folders, Patch, Ran, Refused
from tiny_pair import TEMPLATE

from fly_jax.decoding import pair as pair_module
from fly_jax.launch.__main__ import main
from fly_jax.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_pair: Folders) -> Tokenizer:
    return load_tokenizer(tiny_pair[0])


@pytest.fixture(scope="session")
def models(tiny_pair: Folders) -> list[str]:
    """The flags that name the tiny pair."""
    return [f"--target={tiny_pair[0]}", f"--draft={tiny_pair[1]}", "--dtype=float32"]


@pytest.fixture(scope="session")
def chatty(tiny_pair: Folders, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that name the tiny pair, with a chat template."""
    folder = shutil.copytree(tiny_pair[0], tmp_path_factory.mktemp("chat") / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return [f"--target={folder}", f"--draft={tiny_pair[1]}"]


@pytest.fixture
def no_weights(monkeypatch: Patch) -> None:
    """Reading weights fails."""
    failing = Mock(side_effect=AssertionError("weights were read"))
    monkeypatch.setattr(pair_module, "load_llama", failing)


@pytest.fixture
def ran(capsys: Captured) -> Ran:
    """Runs a command line that must end with this status; gives its `out` and its `err`."""

    def run(*arguments: str, status: int = 0) -> Any:
        capsys.readouterr()
        assert main(arguments) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def decoded(ran: Ran) -> Decoded:
    """Runs generate, and gives the objects that it prints."""
    return lambda *given: [json.loads(line) for line in ran(*given, "--json").out.splitlines()]


@pytest.fixture
def of_pair(decoded: Decoded, models: list[str]) -> Decoded:
    """Runs generate with the tiny pair, and gives the objects that it prints."""
    return lambda *arguments: decoded(*models, *arguments)


@pytest.fixture
def refused(capsys: Captured) -> Refused:
    """Runs a command line that must end with status 2 and one sentence, and returns that."""

    def run(*arguments: str, words: Sequence[str] = ()) -> str:
        assert main(arguments) == 2
        out, sentence = capsys.readouterr()
        assert (out, sentence.count("\n"), sentence[-2:]) == ("", 1, ".\n")
        assert "Traceback" not in sentence
        for word in words:
            assert word in sentence
        return sentence

    return run
