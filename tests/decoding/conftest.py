"""Programs that are compiled fast: what is decoded does not depend on how well they are optimised.

Nearly all the time of these tests is that of compiling tiny models.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

_OPTION = "jax_disable_most_optimizations"


@pytest.fixture(autouse=True, scope="module")
def _compiled_fast() -> Iterator[None]:
    before = jax.config.read(_OPTION)
    jax.config.update(_OPTION, True)
    yield
    jax.config.update(_OPTION, before)


@pytest.fixture
def compiled_well() -> Iterator[None]:
    """For tests that look at a program, which must be the one that users run."""
    jax.config.update(_OPTION, False)
    yield
    jax.config.update(_OPTION, True)
