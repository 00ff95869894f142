"""Programs that are compiled fast: what is decoded does not depend on how well they are optimised.

Nearly all the time of these tests is that of compiling tiny models.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _compiled_fast() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
