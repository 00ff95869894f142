"""Work on a tensor, block by block of its rows, on all cores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

# In float32 half a MiB: what is computed of a block stays in a core's cache.
_NUMBERS = 2**17


def row_blocks(shape: tuple[int, ...]) -> list[slice]:
    """The rows of a matrix in blocks of a size that a core works on best; a vector in one."""
    step = shape[0] if len(shape) == 1 else max(_NUMBERS // math.prod(shape[1:]), 1)
    return [slice(at, min(at + step, shape[0])) for at in range(0, shape[0], step)]


def on_all_cores(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Does the work for each item, in threads: NumPy lets others run while it computes.

    Raises:
      Exception: what the work for an item raised; items that wait are left out then.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(work, items):
            pass
