"""The caches of a batch that was decoded, kept for the next one."""

from __future__ import annotations

from collections.abc import Sequence

from fly_jax.decoding.state import DecodeState

_UNSEEN = 2


class Kept:
    """What a decoder keeps of its last batch."""

    def __init__(self, rows: list[list[int]], state: DecodeState) -> None:
        """Keeps.

        Args:
          rows: the tokens of each row, as far as the host has read them.
          state: of the device.
        """
        self._rows, self._state = rows, state

    @property
    def capacity(self) -> int:
        """Of the caches."""
        return self._state.target.capacity

    def shared(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens at the beginning of every prompt the caches hold: see `num_shared`."""
        if len(prompts) > len(self._rows) or self._state.target.keys.is_deleted():
            return 0
        return max(0, min(map(num_shared, self._rows, prompts)))

    def take(self) -> DecodeState:
        """The state, which is donated to whoever goes on with it: nothing is kept any more."""
        state = self._state
        del self._state
        return state


def num_shared(row: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens at the beginning of a prompt the caches of a row hold; may be negative.

    The row's last two tokens are not relied on. A draft model has not seen the last one when
    a round ends, nor the one before it where all of its draft was kept; and a row that is
    finished is fed its last one again, with too little attended to, while others go on. Nor is
    the last of the prompt: something has to be run.
    """
    most = min(len(row) - _UNSEEN, len(prompt) - 1)
    return next((at for at in range(most) if row[at] != prompt[at]), most)
