"""Rows are functions of seed and index, and say what to learn where."""

import itertools
import operator
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece

from fly_jax.training import library_text
from fly_jax.training.dataset import Row, batches, token_rows
from fly_jax.training.problems import SUBJECTS, extract_answer

BEGIN, END = 1, 2


@pytest.fixture(scope="session")
def tokenizer_path(tokenizer_directory: Path) -> Path:
    return tokenizer_directory / "tokenizer.model"


def assert_same(left: Row, right: Row) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_are_deterministic_and_resume_anywhere(tokenizer_path: Path) -> None:
    rows = list(itertools.islice(token_rows(tokenizer_path, 7), 6))
    later = list(itertools.islice(token_rows(tokenizer_path, 7, start_row=4), 2))
    other = next(token_rows(tokenizer_path, 8))
    assert_same(rows[4], later[0])
    assert_same(rows[5], later[1])
    assert not np.array_equal(rows[0].tokens, other.tokens)
    assert not np.array_equal(rows[0].tokens, rows[1].tokens)


def test_batches_stack_rows(tokenizer_path: Path) -> None:
    rows = list(itertools.islice(token_rows(tokenizer_path, 7, row_length=64), 6))
    batch = next(batches(tokenizer_path, 7, batch_size=3, start_step=1, row_length=64))
    assert batch.tokens.shape == batch.segments.shape == batch.positions.shape == (3, 65)
    assert batch.weights.shape == (3, 64)
    for index in range(3):
        assert_same(rows[3 + index], jax.tree.map(operator.itemgetter(index), batch))


def test_documents_are_kept_apart(tokenizer_path: Path) -> None:
    for row in itertools.islice(token_rows(tokenizer_path, 1), 30):
        starts = np.flatnonzero(row.tokens == BEGIN)
        assert starts[0] == 0
        np.testing.assert_array_equal(row.positions == 0, row.tokens == BEGIN)
        np.testing.assert_array_equal(row.segments, np.cumsum(row.tokens == BEGIN))
        np.testing.assert_array_equal(
            row.positions, np.arange(len(row.tokens)) - starts[row.segments - 1]
        )
        assert (row.tokens[starts[1:] - 1] == END).all()
        # Nothing is learnt across documents, and something everywhere else.
        np.testing.assert_array_equal(row.weights == 0, row.tokens[1:] == BEGIN)


def test_dtypes(tokenizer_path: Path) -> None:
    row = next(token_rows(tokenizer_path, 0))
    assert [part.dtype for part in row[:4]] == [np.int32, np.float32, np.int32, np.int32]


def test_weights_of_a_problem(tokenizer_path: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    rows = token_rows(tokenizer_path, 2, problem_share=1.0)
    for row in itertools.islice(rows, 20):
        for segment in range(1, row.segments[-1]):
            inside = np.flatnonzero(row.segments == segment)[1:]
            text = [model.id_to_piece(int(token)) for token in row.tokens[inside]]
            if text[0] != "Problem":
                continue
            weights = row.weights[inside - 1]
            solution = text.index("Solution") + 2
            answer = text.index("Answer") + 2
            assert set(weights[:solution].tolist()) == {np.float32(0.3)}
            assert weights[-1] == 1.0
            assert text[-1] == "</s>"
            assert all(piece.isdigit() for piece in text[answer + 1 : -1])
            assert (weights[answer + 1 : -1] == 3.0).all()
            for piece, weight in zip(text[solution:answer], weights[solution:answer], strict=True):
                copied = piece.isdigit() or piece.lstrip("\u2581") in SUBJECTS
                assert weight == (2.5 if copied else 1.0), piece


def test_a_share_of_the_rows_starts_with_problems(tokenizer_path: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    rows = itertools.islice(token_rows(tokenizer_path, 3, problem_share=0.7), 600)
    problem = [model.decode(row.tokens[1:4].tolist()).startswith("Problem:") for row in rows]
    assert np.mean(problem) == pytest.approx(0.7, abs=0.06)


def test_no_problem_is_cut(tokenizer_path: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    for row in itertools.islice(token_rows(tokenizer_path, 4, problem_share=1.0), 100):
        documents = [row.tokens[row.segments == index] for index in range(1, row.segments[-1] + 1)]
        texts = [model.decode(document.tolist()) for document in documents]
        worded = [text.startswith("Problem: ") for text in texts]
        assert worded[0]
        for is_problem, text, document in zip(worded, texts, documents, strict=True):
            if is_problem:
                assert document[-1] == END
                assert extract_answer(text) is not None


def test_library_splits_share_no_document() -> None:
    train, development, held_out = (
        library_text.documents(split) for split in ("train", "development", "held_out")
    )
    assert len(train) > 5 * len(held_out) > 5 * len(development) > 0
    assert not set(train) & set(held_out)
    assert max(map(len, train)) <= library_text.CHUNK_CHARACTERS
