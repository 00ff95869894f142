"""The model that the tests of GGUF files write."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from gguf_files import CONFIG, tensors_of

from fly_jax.models.llama import Llama


@pytest.fixture(scope="module")
def model() -> Llama:
    """Random."""
    return Llama.random(CONFIG, jax.random.key(1))


@pytest.fixture(scope="module")
def tensors(model: Llama) -> dict[str, np.ndarray]:
    """The model's, by GGUF's names."""
    return tensors_of(model)
