"""Packed rows of the pair's text, with what to learn from each token.

Row `i` is a function of the seed and ``i` alone, so a run resumes at any row at no cost.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import library_text
import numpy as np
import sentencepiece
from jaxtyping import Float32
from word_problems import SUBJECTS, Split, draw_problem

from fly_jax.evaluation.problems import Problem
from fly_jax.training.trainer import Row, stacked

ROW_LENGTH = 256
PROBLEM_SHARE = 0.9

# What a prompt says is random, but how prompts are worded is worth knowing. What a solution copies
# or computes is what comes late in training and what answers hang on.
_PROMPT_WEIGHT = 0.3
_COPIED_WEIGHT = 2.5
_ANSWER_WEIGHT = 3.0

_WORD = re.compile(r"[A-Za-z]+|\d+")


class _Encoder:
    """Turns documents into tokens and the weight of each token."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
        pieces = [self._model.id_to_piece(index) for index in range(len(self._model))]
        self._piece_lengths = np.array([len(piece) for piece in pieces])

    def library(self, text: str) -> tuple[list[int], Float32[np.ndarray, " length"]]:
        """A document of which every token counts the same."""
        tokens = [self._model.bos_id(), *self._model.encode(text), self._model.eos_id()]
        return tokens, np.ones(len(tokens), np.float32)

    def problem(self, problem: Problem) -> tuple[list[int], Float32[np.ndarray, " length"]]:
        """A document of which the copied and the computed tokens count most."""
        text = self._model.encode(problem.prompt + problem.solution)
        # A token weighs what its heaviest character does. Problems are of plain characters, so
        # that the lengths of the pieces tell where each token starts.
        starts = np.cumsum(self._piece_lengths[text]) - self._piece_lengths[text]
        weights = np.maximum.reduceat(_character_weights(problem), starts)
        tokens = [self._model.bos_id(), *text, self._model.eos_id()]
        return tokens, np.concatenate([[0.0], weights, [1.0]]).astype(np.float32)


def _character_weights(problem: Problem) -> Float32[np.ndarray, " length"]:
    """The weight of every character of the problem's text."""
    start, end = len(problem.prompt), len(problem.prompt) + len(problem.solution)
    weights = np.ones(end, np.float32)
    weights[:start] = _PROMPT_WEIGHT
    for word in _WORD.finditer(problem.solution):
        if word[0].isdigit() or word[0] in SUBJECTS:
            weights[start + word.start() : start + word.end()] = _COPIED_WEIGHT
    weights[end - len(problem.answer) :] = _ANSWER_WEIGHT
    return weights


Document = tuple[list[int], Float32[np.ndarray, " length"]]


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
    """The endless rows of a split: some begin with whole problems, library text fills the rest.

    Args:
      tokenizer_path: a SentencePiece model.
      seed: of all rows.
      row_length: tokens to predict in a row.
      problem_share: how probably a row begins with problems.
      split: what the text is drawn from.
      start_row: the first of the rows.
      taste: style of the solutions; None if every wording is as likely as the others.
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
    """`token_rows` by the batch, from a step on; every array has a leading batch axis."""
    start = start_step * batch_size
    return stacked(
        token_rows(tokenizer_path, seed, row_length, problem_share, split, start, taste), batch_size
    )
