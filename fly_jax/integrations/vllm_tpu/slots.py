"""Places on the device that requests hold, whichever row they are in."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Bool, Int32


class Slots:
    """A place for each request, from its first step to its last.

    Attributes:
      num: of the places. More requests may be alive where some were preempted; what has found no
        place is said to be at `num`.
    """

    def __init__(self, num: int) -> None:
        """All free."""
        self.num = num
        self._of: dict[str, int] = {}
        self._free = list(range(num))[::-1]

    def step(
        self, rows: Sequence[str | None], live: Collection[str]
    ) -> tuple[Int32[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
        """Where each row's request is, and whether it is new.

        Args:
          rows: the requests' ids in the order of the rows; None for padding, which is at `num`.
          live: ids of all requests that the engine knows; what others held is free again.
        """
        for gone in [name for name in self._of if name not in live]:
            slot = self._of.pop(gone)
            self._free += [slot] if slot < self.num else []
        is_new = np.zeros(len(rows), bool)
        slots = np.full(len(rows), self.num, np.int32)
        for index, name in enumerate(rows):
            if name is None:
                continue
            if name not in self._of:
                self._of[name] = self._free.pop() if self._free else self.num
                is_new[index] = True
            slots[index] = self._of[name]
        return slots, is_new
