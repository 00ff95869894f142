"""The tokenizer gives back what it is given, and its two forms agree."""

import itertools
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fly_jax.training import library_text
from fly_jax.training.problems import NAMES, problems
from fly_jax.training.tokenizer import train_tokenizer

AWKWARD = [
    "",
    " ",
    "  two leading spaces and two trailing  ",
    "\tif x:\n\t\treturn  1\n\n\n",
    "\r\n windows \r\n",
    "    " * 9 + "deep",
    "naïve 日本語 😀 e\u0301 \u00a0",
    "<s> and </s>, (?P<s>x), <pad><unk> <0x41>",
    "=" * 79 + "\n" + "-" * 40,
    "0123456789 12.5e-3 x86_64",
]


class Pair:
    """The two forms of one tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.model = sentencepiece.SentencePieceProcessor(
            model_file=str(directory / "tokenizer.model")
        )
        self.fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.fast.encode_special_tokens = True

    def check(self, text: str) -> None:
        """Both forms agree on ``text`` and give it back."""
        ids = self.model.encode(text)
        assert self.fast.encode(text).ids == [self.model.bos_id(), *ids]
        assert self.model.decode(ids) == text
        assert self.fast.decode(ids) == text


@pytest.fixture(scope="session")
def pair(tokenizer_directory: Path) -> Pair:
    return Pair(tokenizer_directory)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text(pair: Pair, text: str) -> None:
    pair.check(text)


def test_training_text(pair: Pair) -> None:
    for text in library_text.documents("train")[::10]:
        pair.check(text)
    for problem in itertools.islice(problems(1, "train"), 300):
        pair.check(problem.prompt + problem.solution)


@given(st.text(st.characters(exclude_characters="\u2581\0", exclude_categories=["Cs"])))
def test_any_text(pair: Pair, text: str) -> None:
    pair.check(text)


@given(st.text(" \t\nab_=0"))
def test_any_layout(pair: Pair, text: str) -> None:
    pair.check(text)


def test_digits_and_newlines_are_tokens_of_their_own(pair: Pair) -> None:
    pieces = [pair.model.id_to_piece(index) for index in range(pair.model.get_piece_size())]
    for mark in "0123456789\n":
        holders = [piece for piece in pieces if mark in piece and not piece.startswith("<0x")]
        assert holders == [mark]


def test_names_are_one_token(pair: Pair) -> None:
    assert all(len(pair.model.encode(f" {name}")) == 1 for name in NAMES)


def test_marks(pair: Pair) -> None:
    marks = [pair.model.id_to_piece(index) for index in range(4)]
    assert marks == ["<unk>", "<s>", "</s>", "<pad>"]
    assert [pair.fast.token_to_id(mark) for mark in marks] == [0, 1, 2, 3]
    assert pair.fast.get_vocab_size() == pair.model.get_piece_size() == 2048


def test_transformers_reads_it(tokenizer_directory: Path, pair: Pair) -> None:
    transformers = pytest.importorskip("transformers")
    # With a model's configuration beside it, which must not change the class of the tokenizer.
    config = tokenizer_directory / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer_directory)
    config.unlink()
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 3)
    for text in AWKWARD:
        ids = loaded.encode(text)
        assert ids == [1, *pair.model.encode(text)]
        assert loaded.decode(ids, skip_special_tokens=True) == text


def test_training_is_reproducible(tokenizer_directory: Path, tmp_path: Path) -> None:
    train_tokenizer(tmp_path)
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (tokenizer_directory / name).read_bytes()
