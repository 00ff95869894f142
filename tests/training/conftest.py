"""What the tests of training share."""

from pathlib import Path

import pytest

from fly_jax.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained by the recipe."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(directory)
    return directory
