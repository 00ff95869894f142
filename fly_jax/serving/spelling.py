"""What a request's tokens spell, up to the first of its stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from fly_jax.decoding.generation import Settled
from fly_jax.models.tokenizers.tokenizer import TextStream, Tokenizer
from fly_jax.verification.rules import Why


class _Token(NamedTuple):
    """A token and what it adds to the text."""

    token_id: int
    why: Why
    text: str


class Spelling:
    """The text of one request, token by token.

    A token in whose text a stop string may have begun is held back until that is decided, so
    nothing that was handed out is ever part of one.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        """Begins behind a prompt.

        Args:
          tokenizer: of the models.
          stops: texts before which the continuation ends; none of them empty.
        """
        self._stream = TextStream(tokenizer, continues=True)
        self._stops = tuple(stops)
        self._held: list[_Token] = []

    def push(self, settled: Settled) -> tuple[Settled | None, int]:
        """Takes what has settled.

        Returns:
          What may be handed out, with its texts (None if that is nothing), and how many of the
          tokens taken the request has: fewer than all where a stop string was complete before.
        """
        text = "".join(token.text for token in self._held)
        for number, pair in enumerate(zip(settled.token_ids, settled.why, strict=True), 1):
            added = self._stream.push([pair[0]])
            text += added
            self._held.append(_Token(*pair, added))
            begin = self._begin_of_stop(text)
            if begin is not None:
                self._cut(begin)
                stopped = dataclasses.replace(settled, finish_reason="stop")
                return self._released(stopped, len(self._held)), number
        if settled.finish_reason is not None:
            last = self._held[-1]
            self._held[-1] = last._replace(text=last.text + self._stream.finish())
            return self._released(settled, len(self._held)), len(settled.token_ids)
        return self._released(settled, self._num_safe(text)), len(settled.token_ids)

    def _begin_of_stop(self, text: str) -> int | None:
        """Where the stop string begins that is complete first; of several the longest."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _cut(self, length: int) -> None:
        """Shortens the text of the tokens held to so many characters."""
        for index, token in enumerate(self._held):
            self._held[index] = token._replace(text=token.text[:length])
            length = max(length - len(token.text), 0)

    def _num_safe(self, text: str) -> int:
        """Tokens held before any in whose text a stop string may have begun."""
        begun = max((_overlap(text, stop) for stop in self._stops), default=0)
        end, safe = 0, len(text) - begun
        for number, token in enumerate(self._held):
            end += len(token.text)
            if end > safe:
                return number
        return len(self._held)

    def _released(self, settled: Settled, number: int) -> Settled | None:
        """Hands out the first tokens held."""
        given, self._held = self._held[:number], self._held[number:]
        if not given:
            return None
        ids, why, texts = zip(*given, strict=True)
        return dataclasses.replace(settled, token_ids=ids, why=why, texts=texts)


def _overlap(text: str, stop: str) -> int:
    """How much of a stop string, but not all of it, the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
