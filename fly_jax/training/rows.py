"""Rows that a head learns from, and the tokens that it knows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt16

from fly_jax.training.expectations import Expected
from fly_jax.training.trainer import Recipe, Row, stacked

ROW_LENGTH = 512
# Weight of a prompt's token: it is never drafted, but has the same words as answers.
_PROMPT_WEIGHT = 0.3


class HeardRow(NamedTuple):
    """A row of documents, or with a leading axis a batch of them, with the teacher's figures.

    Attributes:
      likely: tokens that it expects instead of `tokens[t + 1]`, with `shares` for probabilities.
      features: inputs of some of its layers at `tokens[t]`, the bits of bfloat16 numbers.
    """

    row: Row
    likely: Int32[np.ndarray, "length few"]
    shares: Float32[np.ndarray, "length few"]
    features: UInt16[np.ndarray, "length features"]


def frequent_tokens(
    documents: Sequence[Expected], vocab_size: int, number: int
) -> tuple[Int32[np.ndarray, " known"], float]:
    """The most frequent tokens, ascending, and the share of the answers that they are."""
    said, seen = np.zeros(vocab_size), np.zeros(vocab_size)
    for one in documents:
        said += np.bincount(one.tokens[one.num_prompt :], minlength=vocab_size)
        seen += np.bincount(one.tokens, minlength=vocab_size)
    # Tokens of prompts fill the places that answers leave.
    order = np.argsort(-(said + seen / (1 + seen.sum())), kind="stable")[:number]
    known = np.sort(order).astype(np.int32)
    return known, float(said[known].sum() / max(said.sum(), 1))


def batches(documents: Sequence[Expected], recipe: Recipe, start_step: int) -> Iterator[HeardRow]:
    """Yields batches of rows of documents without end; each depends on the seed and its number."""
    numbers = itertools.count(start_step * recipe.batch_size)
    draws = (random.Random(f"{recipe.seed}/{number}") for number in numbers)
    rows = (laid_out(_drawn(documents, one), recipe.row_length) for one in draws)
    return stacked(rows, recipe.batch_size)


def _drawn(documents: Sequence[Expected], rng: random.Random) -> Iterator[Expected]:
    while True:
        yield documents[rng.randrange(len(documents))]


def laid_out(documents: Iterable[Expected], length: int) -> HeardRow:
    """A row of documents; the last one is cut off, and zeros follow if they end too early."""
    size, start = length + 1, 0
    documents = iter(documents)
    first = next(documents)
    few, wide = first.likely.shape[1], first.features.shape[1]
    tokens, segments, positions = (np.zeros(size, np.int32) for _ in range(3))
    weights, features = np.zeros(size, np.float32), np.zeros((size, wide), np.uint16)
    likely, shares = np.zeros((size, few), np.int32), np.zeros((size, few), np.float32)
    for segment, one in enumerate(itertools.chain([first], documents), 1):
        taken = min(len(one.tokens), size - start)
        part = slice(start, start + taken)
        tokens[part], segments[part], positions[part] = one.tokens[:taken], segment, range(taken)
        weights[part] = np.where(np.arange(taken) < one.num_prompt - 1, _PROMPT_WEIGHT, 1.0)
        weights[part.stop - 1] = 0.0  # what follows the end is another document
        likely[part], shares[part] = one.likely[:taken], one.shares[:taken]
        features[part] = one.features[:taken]
        start = part.stop
        if start == size:
            break
    row = Row(tokens, weights[:-1], segments, positions)
    return HeardRow(row, likely[:-1], shares[:-1], features[:-1])
