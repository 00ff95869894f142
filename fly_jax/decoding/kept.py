"""The caches of a batch that was decoded, kept for the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fly_jax.decoding.state import DecodeState


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a decoder keeps of its last batch.

    Attributes:
      rows: the tokens of each row, as far as the host has read them.
      state: of the device; donated to whoever goes on with it.
    """

    rows: list[list[int]]
    state: DecodeState

    def shared(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens at the beginning of every prompt the caches hold.

        The last two tokens of a row are not relied on: a draft model has not seen the last one
        when a round ends, nor the one before it where all of its draft was kept. Nor is the last
        of a prompt: something has to be run.
        """
        if len(prompts) > len(self.rows) or self.state.target.keys.is_deleted():
            return 0
        return max(0, min(map(_shared, self.rows, prompts)))


def _shared(row: list[int], prompt: Sequence[int]) -> int:
    most = min(len(row) - 2, len(prompt) - 1)
    return next((at for at in range(most) if row[at] != prompt[at]), most)
