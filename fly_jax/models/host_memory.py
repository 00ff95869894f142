"""Has the C library give back the memory of large arrays as soon as they are freed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

# The numbers of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**20
# Where glibc's own adjustment ends in a process that frees large arrays: see mallopt(3).
_USUAL_MMAP_BYTES, _USUAL_TRIM_BYTES = 2**25, 2**26


@contextlib.contextmanager
def large_arrays_given_back() -> Iterator[None]:
    """Within it, what is freed goes back to the system; elsewhere than on glibc it does nothing.

    By default glibc keeps freed arrays of up to 32 MiB for later. While a model is loaded, arrays
    that stay lie between those that go, and so what is kept grows with the model
    (benchmarks/load_memory.py measures that it does not).
    """
    _set(_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        _set(_MMAP_THRESHOLD, _USUAL_MMAP_BYTES)
        _set(_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(option, value)
