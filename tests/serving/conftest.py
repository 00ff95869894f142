"""The server that test_server asks, and what makes starting one cheap."""

import gc
from collections.abc import Iterator

import pytest
from live_server import live, server

__all__ = ["live", "server"]


@pytest.fixture(autouse=True)
def _no_garbage() -> Iterator[None]:
    """A server collects as it starts; what other tests have left need not be looked through."""
    gc.freeze()
    yield
    gc.unfreeze()
