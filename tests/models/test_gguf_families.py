"""GGUF files of the families, and what only they have: paddings, ends, windows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import byte_level_writer, tensors_of, write, write_sized
from test_gguf import same
from tokenizer_makers import HARD, MAKERS, llama3_json

from fly_jax.models.checkpoints.load import load_llama, open_checkpoint
from fly_jax.models.llama import Llama

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_families(tmp_path: Path, family: str) -> None:
    """No two biases or norms of these models are the same."""
    model = load_llama(GOLDEN / family)
    # The layers without positions are not in the file; llama.cpp, too, takes every fourth.
    unrotated = tuple(range(3, model.config.num_layers, 4)) if family == "smollm3" else ()
    config = dataclasses.replace(model.config, unrotated_layers=unrotated)
    path = write(tmp_path / "model.gguf", tensors_of(model), config=config, architecture=family)
    found = load_llama(path)
    assert dataclasses.replace(found.config, max_context=config.max_context) == config
    same(found, model)


def test_smollm3_is_cut_as_llama_3_and_nothing_is_put_before(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    made = MAKERS["Llama 3"]()
    put = byte_level_writer(made, "smaug-bpe", adds_bos=None)
    path = write_sized(tmp_path / "model.gguf", tensors, made.get_vocab_size(), put)
    found = open_checkpoint(path).tokenizer
    for text in HARD:
        assert found.encode(text) == made.encode(text, add_special_tokens=False).ids


def test_what_pads_a_vocabulary_is_no_token(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    made = MAKERS["Qwen 2.5 and 3"]()
    put = byte_level_writer(made, "qwen2", adds_bos=False, padding=3)
    path = write_sized(tmp_path / "model.gguf", tensors, made.get_vocab_size() + 3, put)
    opened = open_checkpoint(path)
    assert len(opened.tokenizer.vocabulary.names) == made.get_vocab_size()
    assert opened.config.vocab_size == made.get_vocab_size() + 3


def test_ends_are_known_by_their_text_too(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A file names one end of each kind, and a Qwen has two."""
    made = llama3_json()
    assert made.token_to_id("<unk>") == 0
    put = byte_level_writer(made, "gpt-2", adds_bos=False, renamed={"<unk>": "<|endoftext|>"})
    path = write_sized(tmp_path / "model.gguf", tensors, made.get_vocab_size(), put)
    assert set(open_checkpoint(path).config.eos_token_ids) == {0, 2, 3}


@pytest.mark.parametrize(("window", "family"), [(8, "mistral"), (0, "llama")])
def test_a_window_makes_a_llama_a_mistral(
    tmp_path: Path, model: Llama, tensors: dict[str, np.ndarray], window: int, family: str
) -> None:
    def put(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(window)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    found = load_llama(write(tmp_path / "model.gguf", tensors, tokenizer=put))
    assert (found.config.architecture, found.config.sliding_window) == (family, window or None)
    same(found, model)
