"""Eight simulated devices for every test, set before any JAX backend exists; no cache on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["FLY_JAX_COMPILATION_CACHE"] = "off"  # no test leaves programs in the user's folder

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module_alone() -> Iterator[None]:
    """Forgets compiled programs: all of them together take more memory maps than Linux allows."""
    yield
    jax.clear_caches()
