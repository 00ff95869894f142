"""The embedded pair's recipe: its tokenizer and its rows.

Its word problems are right, their splits are disjoint, and their wording is free.
"""

import itertools
import json
import random
import re
from pathlib import Path

import jax
import library_text
import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from pair_rows import batches, token_rows
from pair_tokenizer import train_tokenizer
from word_problems import NAMES, Split, generate_problem, problems, split_of

from fly_jax.evaluation.problems import Problem, built_in_problems, extract_answer, is_correct

BEGIN, END = 1, 2

AWKWARD = ["", " ", "  two leading spaces and two trailing  ", "\tif x:\n\t\treturn  1\n\n\n"]
AWKWARD += ["\r\n windows \r\n", "    " * 9 + "deep", "naïve 日本語 😀 e\u0301 \u00a0"]
AWKWARD += ["<s> and </s>, (?P<s>x), <pad><unk> <0x41>", "=" * 79 + "\n" + "-" * 40]
AWKWARD += ["0123456789 12.5e-3 x86_64"]


class Forms:
    """The two forms of one tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokenizer.model"
        self.model = sentencepiece.SentencePieceProcessor(str(self.path))
        self.fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.fast.encode_special_tokens = True

    def check(self, text: str) -> None:
        """Both forms agree on ``text`` and give it back."""
        ids = self.model.encode(text)
        assert self.fast.encode(text).ids == [self.model.bos_id(), *ids]
        assert self.model.decode(ids) == text
        assert self.fast.decode(ids) == text


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    """Those of a tokenizer trained by the recipe."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(directory)
    return Forms(directory)


def test_awkward_text_and_that_of_training(forms: Forms) -> None:
    for text in (*AWKWARD, *library_text.documents("train")[::10]):
        forms.check(text)
    for problem in itertools.islice(problems(1, "train"), 300):
        forms.check(problem.prompt + problem.solution)


ANY_TEXT = st.text(st.characters(exclude_characters="\u2581\0", exclude_categories=["Cs"]))


@given(ANY_TEXT, st.text(" \t\nab_=0"))
def test_any_text_and_any_layout(forms: Forms, text: str, layout: str) -> None:
    forms.check(text)
    forms.check(layout)


def test_digits_newlines_names_and_marks_are_tokens_of_their_own(forms: Forms) -> None:
    pieces = [forms.model.id_to_piece(index) for index in range(forms.model.get_piece_size())]
    for mark in "0123456789\n":
        assert [one for one in pieces if mark in one and not one.startswith("<0x")] == [mark]
    assert all(len(forms.model.encode(f" {name}")) == 1 for name in NAMES)
    assert pieces[:4] == ["<unk>", "<s>", "</s>", "<pad>"]
    assert [forms.fast.token_to_id(mark) for mark in pieces[:4]] == [0, 1, 2, 3]
    assert forms.fast.get_vocab_size() == forms.model.get_piece_size() == 2048


def test_transformers_reads_it(forms: Forms) -> None:
    transformers = pytest.importorskip("transformers")
    # With a model's configuration beside it, which must not change the class of the tokenizer.
    config = forms.path.with_name("config.json")
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    loaded = transformers.AutoTokenizer.from_pretrained(forms.path.parent)
    config.unlink()
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 3)
    for text in AWKWARD:
        ids = loaded.encode(text)
        assert ids == [1, *forms.model.encode(text)]
        assert loaded.decode(ids, skip_special_tokens=True) == text


def test_rows_are_deterministic_resume_anywhere_and_are_stacked(forms: Forms) -> None:
    given = {"tokenizer_path": forms.path, "row_length": 64}
    rows = list(itertools.islice(token_rows(**given, seed=7), 6))
    later = list(itertools.islice(token_rows(**given, seed=7, start_row=4), 2))
    other = next(token_rows(**given, seed=8))
    jax.tree.map(np.testing.assert_array_equal, rows[4:], later)
    assert [part.dtype for part in other[:4]] == [np.int32, np.float32, np.int32, np.int32]
    assert not np.array_equal(rows[0].tokens, other.tokens)
    assert not np.array_equal(rows[0].tokens, rows[1].tokens)
    batch = next(batches(**given, seed=7, batch_size=3, start_step=1))
    assert batch.tokens.shape == (3, 65)
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *rows[3:])
    jax.tree.map(np.testing.assert_array_equal, batch, stacked)


def test_documents_are_kept_apart(forms: Forms) -> None:
    for row in itertools.islice(token_rows(forms.path, 1), 30):
        starts = np.flatnonzero(row.tokens == BEGIN)
        assert starts[0] == 0
        np.testing.assert_array_equal(row.positions == 0, row.tokens == BEGIN)
        np.testing.assert_array_equal(row.segments, np.cumsum(row.tokens == BEGIN))
        since = np.arange(len(row.tokens)) - starts[row.segments - 1]
        np.testing.assert_array_equal(row.positions, since)
        assert (row.tokens[starts[1:] - 1] == END).all()
        # Nothing is learnt across documents, and something everywhere else.
        np.testing.assert_array_equal(row.weights == 0, row.tokens[1:] == BEGIN)


def test_library_splits_share_no_document() -> None:
    splits = ("train", "development", "held_out")
    train, development, held_out = map(library_text.documents, splits)
    assert len(train) > 5 * len(held_out) > 5 * len(development) > 0
    assert not set(train) & set(held_out)
    assert max(map(len, train)) <= library_text.CHUNK_CHARACTERS


SPLITS: tuple[Split, ...] = ("train", "development", "held_out")


def take(count: int, seed: int = 0, split: Split = "train") -> list[Problem]:
    return list(itertools.islice(problems(seed, split), count))


def test_every_equation_holds_and_the_answer_is_the_last_thing_computed() -> None:
    for problem in take(3000):
        equations = re.findall(r"\d[\d +*/=-]*=[\d +*/=-]*\d", problem.solution)
        assert equations, problem.solution
        for equation in equations:
            assert len({eval(side) for side in equation.split("=")}) == 1, problem.solution
        ending = f" {problem.answer}.\nAnswer: {problem.answer}"
        assert problem.solution.endswith(ending)
        opening = "the answer to the problem (is|equals|must be|comes to)"
        assert re.search(opening + ending, problem.solution)
        results = re.findall(r"= (\d+) (?:[a-z])", problem.solution)
        assert results[-1] == problem.answer, problem.solution
        assert is_correct(problem, problem.solution)
        assert not is_correct(problem, problem.solution + "0")
        # No number is negative, and no slot is left.
        text = problem.prompt + problem.solution
        assert not re.search(r"[\[\]{}|]", text), text
        assert not re.search(r"-\d|(?<!\d)0|\b1 [a-z]+s\b", text), text


def test_extract_answer() -> None:
    found = [" So it is 7.\nAnswer: 74", "\nAnswer: 74\nand more", "\nAnswer: 74\nAnswer: 8"]
    for text in (*found, "Answer: **74** m"):
        assert extract_answer(text) == "74"
    wrong = ["\nAnswer: 1,074.5", "Answer:\n74", "Answer: .74", "\nAnswer: ", "the Answer: 74", ""]
    for text in wrong:
        assert extract_answer(text) is None


def test_a_seed_gives_the_same_problems_of_its_split() -> None:
    assert take(50, seed=3) == take(50, seed=3)
    assert take(50, seed=3) != take(50, seed=4)
    assert generate_problem(random.Random(5)) == generate_problem(random.Random(5))
    # Splits are disjoint whatever the seed and the process.
    for seed, split in enumerate(SPLITS):
        assert {split_of(problem.prompt) for problem in take(200, seed, split)} == {split}
    # As it was when the embedded pair was trained: another split would leak its held-out problems.
    assert [split_of(key) for key in ("0", "1", "13")] == ["development", "train", "held_out"]
    assert built_in_problems() == take(8, seed=2511, split="held_out")
