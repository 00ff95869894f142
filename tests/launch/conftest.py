import json
from unittest.mock import Mock

import pytest
from launch_types import Decoded, Folders, Patch, Ran

from fly_jax.decoding import pair as pair_module
from fly_jax.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_pair: Folders) -> Tokenizer:
    return load_tokenizer(tiny_pair[0])


@pytest.fixture(scope="session")
def models(tiny_pair: Folders) -> list[str]:
    """The flags that name the tiny pair."""
    return [f"--target={tiny_pair[0]}", f"--draft={tiny_pair[1]}", "--dtype=float32"]


@pytest.fixture(scope="session")
def chatty(chatty_pair: Folders) -> list[str]:
    """The flags that name the tiny pair, with a chat template."""
    return [f"--target={chatty_pair[0]}", f"--draft={chatty_pair[1]}"]


@pytest.fixture
def no_weights(monkeypatch: Patch) -> None:
    """Reading weights fails."""
    failing = Mock(side_effect=AssertionError("weights were read"))
    monkeypatch.setattr(pair_module, "load_llama", failing)


@pytest.fixture
def decoded(ran: Ran) -> Decoded:
    """Runs generate, and gives the objects that it prints."""
    return lambda *given: [json.loads(line) for line in ran(*given, "--json").out.splitlines()]


@pytest.fixture
def of_pair(decoded: Decoded, models: list[str]) -> Decoded:
    """Runs generate with the tiny pair, and gives the objects that it prints."""
    return lambda *arguments: decoded(*models, *arguments)
