"""Packed rows of tokens, with what to learn from each of them.

Row ``i`` is a function of the seed and ``i`` alone, so a run resumes at any row at no cost.
"""

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import sentencepiece
from numpy.typing import NDArray

from fly_jax.training import library_text
from fly_jax.training.problems import SUBJECTS, Problem, Split, draw_problem

ROW_LENGTH = 256
PROBLEM_SHARE = 0.9

# What a prompt says is random, but how prompts are worded is worth knowing. What a solution copies
# or computes is what comes late in training and what answers hang on.
_PROMPT_WEIGHT = 0.3
_COPIED_WEIGHT = 2.5
_ANSWER_WEIGHT = 3.0

_WORD = re.compile(r"[A-Za-z]+|\d+")


class Row(NamedTuple):
    """A row of packed documents (or, with a leading axis, a batch of them).

    ``weights[t]`` is the loss weight of predicting ``tokens[t + 1]``; zero from one document to
    the next. ``segments`` numbers the documents of the row from 1, and ``positions`` counts from
    zero in each. Where a teacher has said what it expects instead of ``tokens[t + 1]``, these are
    the tokens ``likely[t]`` with the probabilities ``shares[t]``.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    segments: NDArray[np.int32]
    positions: NDArray[np.int32]
    likely: NDArray[np.int32] | None = None
    shares: NDArray[np.float32] | None = None


class _Encoder:
    """Turns documents into tokens and the weight of each token."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
        pieces = [self._model.id_to_piece(index) for index in range(len(self._model))]
        self._piece_lengths = np.array([len(piece) for piece in pieces])

    def library(self, text: str) -> tuple[list[int], NDArray[np.float32]]:
        """A document of which every token counts the same."""
        tokens = [self._model.bos_id(), *self._model.encode(text), self._model.eos_id()]
        return tokens, np.ones(len(tokens), np.float32)

    def problem(self, problem: Problem) -> tuple[list[int], NDArray[np.float32]]:
        """A document of which the copied and the computed tokens count most."""
        text = self._model.encode(problem.prompt + problem.solution)
        # A token weighs what its heaviest character does. Problems are of plain characters, so
        # that the lengths of the pieces tell where each token starts.
        starts = np.cumsum(self._piece_lengths[text]) - self._piece_lengths[text]
        weights = np.maximum.reduceat(_character_weights(problem), starts)
        tokens = [self._model.bos_id(), *text, self._model.eos_id()]
        return tokens, np.concatenate([[0.0], weights, [1.0]]).astype(np.float32)


def _character_weights(problem: Problem) -> NDArray[np.float32]:
    """The weight of every character of the problem's text."""
    start, end = len(problem.prompt), len(problem.prompt) + len(problem.solution)
    weights = np.ones(end, np.float32)
    weights[:start] = _PROMPT_WEIGHT
    for word in _WORD.finditer(problem.solution):
        if word[0].isdigit() or word[0] in SUBJECTS:
            weights[start + word.start() : start + word.end()] = _COPIED_WEIGHT
    weights[end - len(problem.answer) :] = _ANSWER_WEIGHT
    return weights


Document = tuple[list[int], NDArray[np.float32]]


def _pack(documents: Iterable[Document], row_length: int) -> Row:
    """Documents one after the other until the row is full; the last of them is cut."""
    size = row_length + 1
    row = Row(
        tokens=np.zeros(size, np.int32),
        weights=np.zeros(size, np.float32),
        segments=np.zeros(size, np.int32),
        positions=np.zeros(size, np.int32),
    )
    start = 0
    for segment, (tokens, weights) in enumerate(documents, 1):
        part = slice(start, start + len(tokens))
        room = len(row.tokens[part])
        row.tokens[part] = tokens[:room]
        row.weights[part] = weights[:room]
        row.weights[start] = 0.0
        row.segments[part] = segment
        row.positions[part] = np.arange(room)
        start += room
        if start == size:
            break
    return row._replace(weights=row.weights[1:])


def _whole_problems(
    encoder: _Encoder, rng: random.Random, split: Split, room: int, taste: int | None
) -> list[Document]:
    """Problems until one does not fit: a solution that is cut would not teach how it ends."""
    fitting: list[Document] = []
    while True:
        document = encoder.problem(draw_problem(rng, split, taste))
        room -= len(document[0])
        if room < 0:
            return fitting
        fitting.append(document)


def token_rows(
    tokenizer_path: Path,
    seed: int,
    row_length: int = ROW_LENGTH,
    problem_share: float = PROBLEM_SHARE,
    split: Split = "train",
    start_row: int = 0,
    taste: int | None = None,
) -> Iterator[Row]:
    """The endless rows of ``split`` from ``start_row`` on.

    A row starts with whole problems, with probability ``problem_share``, and library text fills
    the rest of it. ``taste`` is the style of the solutions (see ``generate_problem``).
    """
    encoder = _Encoder(tokenizer_path)
    library = library_text.documents(split)
    for index in itertools.count(start_row):
        rng = random.Random(f"{seed}/{index}")
        worded: list[Document] = []
        if rng.random() < problem_share:
            worded = _whole_problems(encoder, rng, split, row_length + 1, taste)
        rest = (encoder.library(rng.choice(library)) for _ in itertools.count())
        yield _pack(itertools.chain(worded, rest), row_length)


def batches(
    tokenizer_path: Path,
    seed: int,
    batch_size: int,
    start_step: int = 0,
    row_length: int = ROW_LENGTH,
    problem_share: float = PROBLEM_SHARE,
    split: Split = "train",
    taste: int | None = None,
) -> Iterator[Row]:
    """The rows by the batch, from batch ``start_step`` on; every array has a leading batch axis."""
    start = start_step * batch_size
    return stacked(
        token_rows(tokenizer_path, seed, row_length, problem_share, split, start, taste), batch_size
    )


def stacked(rows: Iterator[Row], batch_size: int) -> Iterator[Row]:
    """Endless rows by the batch."""
    while True:
        batch = list(itertools.islice(rows, batch_size))
        yield jax.tree.map(lambda *parts: np.stack(parts), *batch)
