"""How a prompt is taken in: in pieces of few sizes, so that few programs are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Tokens that a piece may have, besides the largest: each size fits into the next four times.
_SMALLEST_PIECE = 16
_GROWTH = 4


class Piece(NamedTuple):
    """Some tokens of a prompt that one pass takes in.

    Attributes:
      start: position of the first.
      size: how many are run, those beyond the prompt among them.
      attended: cache positions that attention reads.
    """

    start: int
    size: int
    attended: int


def piece_sizes(largest: int) -> tuple[int, ...]:
    """The sizes of pieces, in ascending order."""
    sizes = [largest]
    while sizes[0] // _GROWTH >= _SMALLEST_PIECE:
        sizes.insert(0, sizes[0] // _GROWTH)
    return tuple(sizes)


def pieces(start: int, end: int, sizes: Sequence[int], steps: Sequence[int]) -> Iterator[Piece]:
    """What takes in the tokens of a prompt from `start` to `end`.

    Args:
      start: tokens that the caches hold already.
      end: of the prompt.
      sizes: from `piece_sizes`; the largest is at most the last of `steps`.
      steps: see `ladder`; the last one is the capacity.
    """
    while start < end:
        size = next((size for size in sizes if size >= end - start), sizes[-1])
        # What would run over the end of the cache begins earlier: running tokens twice is harmless.
        at = min(start, steps[-1] - size)
        yield Piece(at, size, next(step for step in steps if step >= at))
        start = at + size


def shared_beginnings(prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens at the beginning of each prompt some other one has too; never all of it."""
    order = sorted(range(len(prompts)), key=lambda index: tuple(prompts[index]))
    found = [0] * len(prompts)
    for one, other in itertools.pairwise(order):  # sorted, neighbours have most in common
        pairs = zip(prompts[one], prompts[other], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for index in (one, other):
            found[index] = max(found[index], min(same, len(prompts[index]) - 1))
    return found
