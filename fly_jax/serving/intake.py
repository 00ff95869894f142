"""Taking prompts in, one after the other and piece by piece, before they get a slot."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import DecodeState
from fly_jax.serving.prefill import Piece, piece_sizes, pieces, shared_beginnings
from fly_jax.serving.request import Request, Ticket
from fly_jax.serving.rows import row_of
from fly_jax.serving.slots import LEAST_SHARED, Prefix


class Intake:
    """One row that a prompt is run in.

    Attributes:
      sizes: that pieces may have, in ascending order.
      ticket: whose prompt is being taken in; None for nobody's.
    """

    def __init__(
        self,
        programs: Programs,
        spec: RoundSpec,
        steps: Sequence[int],
        prefill_chunk: int,
        max_length: int,
    ) -> None:
        """Nobody's prompt is taken in.

        Args:
          programs: that run.
          spec: of the rounds.
          steps: see `ladder`; the last is the capacity.
          prefill_chunk: tokens of the largest piece.
          max_length: see `Engine`.
        """
        self.sizes = piece_sizes(prefill_chunk)
        self.ticket: Ticket | None = None
        self._prefix = Prefix(0, 0)
        self._programs, self._spec = programs, spec
        self._steps, self._max_length = steps, max_length
        self._one: DecodeState | None = None
        self._planned: collections.deque[Piece] = collections.deque()

    def limit(self, request: Request) -> int:
        """Length at which a request is done."""
        return min(len(request.prompt) + request.max_new_tokens, self._max_length)

    def row(self, ticket: Ticket) -> DecodeState:
        """A state of one row, of whose prompt nothing has been run."""
        limit = self.limit(ticket.request)
        return row_of(self._programs, self._spec, ticket, limit, self._steps[-1])

    def begin(self, ticket: Ticket, prefix: Prefix, state: DecodeState) -> None:
        """Takes the next prompt, behind what it shares with a slot of the state."""
        one = self.row(ticket)
        if prefix.length:
            one = self._programs.copy_row(one, state, prefix.slot)
        self.ticket, self._prefix, self._one = ticket, prefix, one
        length = len(ticket.request.prompt)
        self._planned.extend(pieces(prefix.length, length, self.sizes, self._steps))

    def run(self) -> tuple[int, DecodeState | None]:
        """Runs the next piece: its tokens, and the row once the whole prompt has been run."""
        assert self._one is not None
        piece = self._planned.popleft()
        self._one = self._programs.take_in(self._one, piece.size, piece.start, piece.attended)
        return piece.size, None if self._planned else self._one.attending(None)

    def end(self) -> tuple[Ticket, Prefix]:
        """Whose prompt has been run, and what of it was copied."""
        ticket = self.ticket
        assert ticket is not None
        self.drop()
        return ticket, self._prefix

    def drop(self) -> None:
        """Is free for the next prompt."""
        self.ticket = self._one = None
        self._planned.clear()

    def needed(self, prompts: Sequence[Sequence[int]], *, shares: bool) -> list[tuple[int, int]]:
        """The pieces of prompts, by size and how far they attend.

        Args:
          prompts: what will be taken in, in whatever order.
          shares: also behind what one of them has in common with another.
        """
        begins = {(0, len(prompt)) for prompt in prompts}
        if shares:
            shared = shared_beginnings(prompts)
            lengths = map(len, prompts)
            begins |= {one for one in zip(shared, lengths, strict=True) if one[0] >= LEAST_SHARED}
        planned = (pieces(*begin, self.sizes, self._steps) for begin in begins)
        return sorted({(one.size, one.attended) for some in planned for one in some})
