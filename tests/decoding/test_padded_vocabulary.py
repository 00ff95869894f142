"""Models of a family pad one vocabulary to sizes of their own: the pair decodes without padding."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_pair import CONFIG, VOCAB_SIZE, write_pair

import fly_jax
from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.load import load_llama, save_hf
from fly_jax.models.llama import Llama

PROMPTS = ["Ada has 3 apples", "Boris"]


def padded(folder: Path, to: Path, rows: int) -> Path:
    """The model with that many rows more, which would win every time if they were kept."""
    model = load_llama(folder)
    embedding = np.asarray(model.parameters()["embedding"])
    more = 50 * np.ones((rows, CONFIG.embed_size), np.float32)
    parameters = model.parameters() | {"embedding": jnp.asarray(np.concatenate((embedding, more)))}
    config = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE + rows)
    save_hf(Llama(config, parameters), to)
    shutil.copy(folder / "tokenizer.model", to)
    return to


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pair")
    target, draft = write_pair(root)
    return {
        "target": target,
        "draft": draft,
        "wide target": padded(target, root / "wide_target", 3),
        "wide draft": padded(draft, root / "wide_draft", 2),
        "other": padded(draft, root / "other", 40),
    }


def decoded(target: Path, draft: Path, **where: str) -> list[list[int]]:
    pair = fly_jax.load_pair(target, draft, **{"dtype": "float32", **where})
    assert pair.target.config.vocab_size == VOCAB_SIZE
    found = fly_jax.generate(
        pair, PROMPTS, rule="fly", num_speculative_tokens=4, window_size=2, max_new_tokens=12,
        batch_size=2,
    )  # fmt: skip
    return [one.token_ids for one in found]


@pytest.mark.parametrize("where", [{}, {"dtype": "int8"}, {"mesh": "2x2"}], ids=str)
def test_what_pads_is_cut(folders: dict[str, Path], where: dict[str, str]) -> None:
    expected = decoded(folders["target"], folders["draft"], **where)
    assert decoded(folders["wide target"], folders["draft"], **where) == expected
    assert decoded(folders["target"], folders["wide draft"], **where) == expected


def test_more_than_padding_is_another_vocabulary(folders: dict[str, Path]) -> None:
    with pytest.raises(FlyJaxError, match=r"320 tokens and the draft one of 360"):
        fly_jax.load_pair(folders["target"], folders["other"])
