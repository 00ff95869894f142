"""Pairs whose vocabularies differ: one has fewer tokens of its own, or is padded.

A drafter that knows some of its target's tokens drafts those, and sees the others as one. Models
of a family pad one vocabulary to sizes of their own: the pair decodes without padding.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_pair import CONFIG, VOCAB_SIZE, write_pair

import fly_jax
from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.load import load_llama, open_checkpoint, save_hf
from fly_jax.models.llama import Llama

PROMPTS = ["Ada has 3 apples", "Boris"]
# The target's own matrices, so that drafts are accepted wherever the drafter knows the tokens.
KNOWN = np.arange(0, VOCAB_SIZE, 2)
ROWS = len(KNOWN) + 1


def narrowed(target: Llama) -> Llama:
    """The target with every second row of its embedding, and the mean of the others."""
    parameters = target.parameters()
    embedding = np.asarray(parameters["embedding"])
    rows = np.concatenate([embedding[KNOWN], embedding[1::2].mean(axis=0, keepdims=True)])
    table = np.full(VOCAB_SIZE, len(KNOWN), np.int32)
    table[KNOWN] = np.arange(len(KNOWN))
    config = dataclasses.replace(target.config, draft_vocab_size=ROWS)
    more = {"embedding": jnp.asarray(rows), "token_rows": jnp.asarray(table)}
    return Llama(config, parameters | more)


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
    save_hf(narrowed(load_llama(target)), root / "narrow", jnp.float32)
    shutil.copy(target / "tokenizer.model", root / "narrow")
    return {
        "target": target,
        "draft": draft,
        "narrow": root / "narrow",
        "wide target": padded(target, root / "wide_target", 3),
        "wide draft": padded(draft, root / "wide_draft", 2),
        "other": padded(draft, root / "other", 40),
    }


def test_logits_are_those_of_the_known_tokens() -> None:
    whole = Llama.random(CONFIG, jax.random.key(0))
    narrow = narrowed(whole)
    tokens = jnp.asarray([[0, 3, 8, 5]])
    positions, visible = jnp.arange(4)[None], jnp.tril(jnp.ones((1, 4, 4), bool))
    hidden = narrow.hidden_uncached(tokens, positions, visible)
    logits = np.asarray(narrow.logits(hidden))
    assert logits.shape == (1, 4, VOCAB_SIZE)
    unknown = np.setdiff1d(np.arange(VOCAB_SIZE), KNOWN)
    assert (logits[..., unknown] == -np.inf).all()
    np.testing.assert_allclose(
        logits[..., KNOWN], np.asarray(whole.logits(hidden))[..., KNOWN], rtol=1e-5, atol=1e-6
    )
    # Tokens that it does not know are all the same to it.
    other = narrow.hidden_uncached(jnp.asarray([[0, 7, 8, 1]]), positions, visible)
    np.testing.assert_array_equal(hidden, other)


@pytest.mark.parametrize("where", [{}, {"dtype": "int8"}, {"mesh": "2x2"}], ids=str)
def test_text_is_the_targets(folders: dict[str, Path], where: dict[str, str]) -> None:
    given = {"dtype": "float32", **where}
    pair = fly_jax.load_pair(folders["target"], folders["narrow"], **given)
    assert pair.drafts[0].parameters()["token_rows"].dtype == jnp.int32
    greedy = {"num_speculative_tokens": 4, "max_new_tokens": 24, "batch_size": 2}
    alone = fly_jax.generate(pair, PROMPTS, rule="autoregressive", max_new_tokens=24, batch_size=2)
    exact = fly_jax.generate(pair, PROMPTS, rule="exact", **greedy)
    assert [one.token_ids for one in exact] == [one.token_ids for one in alone]
    accepted = [one.num_accepted_tokens for one in exact]
    assert sum(accepted) > 0
    for one in exact:  # what stands there as the draft has proposed it, it knows
        drafted = [token for token, why in zip(one.token_ids, one.why, strict=True)
                   if why is fly_jax.Why.MATCHED]  # fmt: skip
        assert set(drafted) <= set(KNOWN.tolist())


def test_sampling_knows_nothing_of_it(folders: dict[str, Path]) -> None:
    pair = fly_jax.load_pair(folders["target"], folders["narrow"], dtype="float32")
    sampled = fly_jax.generate(
        pair, PROMPTS, rule="sampled", temperature=1.0, top_k=20, num_speculative_tokens=4,
        max_new_tokens=40, batch_size=2,
    )  # fmt: skip
    assert all(0 <= token < VOCAB_SIZE for one in sampled for token in one.token_ids)
    drafted, accepted = (
        sum(getattr(one, name) for one in sampled)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert 0 < accepted < drafted
    # Half of the tokens can only be the target's own.
    assert any(token % 2 for one in sampled for token in one.token_ids)


def test_a_number_of_rows_that_cannot_be(folders: dict[str, Path], tmp_path: Path) -> None:
    target, folder = folders["target"], tmp_path / "wrong"
    shutil.copytree(folders["narrow"], folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == ROWS
    for rows in (1, VOCAB_SIZE + 1):
        (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": rows}))
        with pytest.raises(FlyJaxError, match=f"draft_vocab_size={rows} and vocab_size"):
            fly_jax.load_pair(target, folder)
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": ROWS - 1}))
    with pytest.raises(FlyJaxError, match="has shape"):
        fly_jax.load_pair(target, folder)


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_that_the_embedding_does_not_have(
    folders: dict[str, Path], tmp_path: Path, row: int
) -> None:
    shutil.copytree(folders["narrow"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["token_rows"][5] = row
    save_file(tensors, file)
    with pytest.raises(FlyJaxError, match=f"token_rows.* each must be from 0 to {ROWS - 1}"):
        load_llama(tmp_path)


def test_the_drafter_that_is_here() -> None:
    """It loads, is small, and has an idea of what its target answers."""
    folder = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct"
    opened, model = open_checkpoint(folder), load_llama(folder)
    assert sum(one.size for one in jax.tree.leaves(model.parameters())) < 12_000_000
    assert model.config.draft_vocab_size is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = opened.tokenizer.apply_chat_template(question)
    answer = opened.tokenizer.encode("The capital of France is Paris.")
    ids = [*prompt, *answer]
    visible = jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))
    hidden = model.hidden_uncached(jnp.asarray([ids]), jnp.arange(len(ids))[None], visible)
    told = jax.nn.log_softmax(model.logits(hidden)[0, len(prompt) - 1 : -1])
    loss = -np.mean(np.take_along_axis(np.asarray(told), np.asarray(answer)[:, None], 1))
    assert loss < math.log(model.config.draft_vocab_size) / 2


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
