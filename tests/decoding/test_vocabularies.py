"""Pairs whose vocabularies differ: the drafter knows some of the tokens, or one is padded."""

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
from random_pairs import logits_after
from refusals import assert_refused
from safetensors.numpy import load_file, save_file
from tiny_pair import CONFIG, VOCAB_SIZE, write_pair

import fly_jax
from fly_jax import FlyJaxError
from fly_jax.models.checkpoints.load import load_llama, open_checkpoint
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama

PROMPTS, DTYPE = ["Ada has 3 apples", "Boris"], {"dtype": "float32"}
GIVEN = {"max_new_tokens": 24, "batch_size": 2}
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


def padded(folder: Path, to: Path, rows: int) -> None:
    """The model with that many rows more, which would win every time if they were kept."""
    model = load_llama(folder)
    embedding = np.asarray(model.parameters()["embedding"])
    more = 50 * np.ones((rows, CONFIG.embed_size), np.float32)
    parameters = model.parameters() | {"embedding": jnp.asarray(np.concatenate((embedding, more)))}
    config = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE + rows)
    save_hf(Llama(config, parameters), to)
    shutil.copy(folder / "tokenizer.model", to)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folders are the models."""
    root = tmp_path_factory.mktemp("pair")
    target, draft = write_pair(root)
    save_hf(narrowed(load_llama(target)), root / "narrow", jnp.float32)
    shutil.copy(target / "tokenizer.model", root / "narrow")
    padded(target, root / "wide_target", 3)
    padded(draft, root / "wide_draft", 2)
    padded(draft, root / "other", 40)
    return root


def test_logits_are_those_of_the_known_tokens() -> None:
    whole = Llama.random(CONFIG, jax.random.key(0))
    narrow = narrowed(whole)
    tokens = jnp.asarray([[0, 3, 8, 5]])
    positions, visible = jnp.arange(4)[None], jnp.tril(jnp.ones((1, 4, 4), bool))
    hidden = narrow.uncached_and_inputs(tokens, positions, visible)[0]
    logits = np.asarray(narrow.logits(hidden))
    assert logits.shape == (1, 4, VOCAB_SIZE)
    unknown = np.setdiff1d(np.arange(VOCAB_SIZE), KNOWN)
    assert (logits[..., unknown] == -np.inf).all()
    np.testing.assert_allclose(
        logits[..., KNOWN], np.asarray(whole.logits(hidden))[..., KNOWN], rtol=1e-5, atol=1e-6
    )
    # Tokens that it does not know are all the same to it.
    other = narrow.uncached_and_inputs(jnp.asarray([[0, 7, 8, 1]]), positions, visible)[0]
    np.testing.assert_array_equal(hidden, other)


@pytest.mark.parametrize("where", [{}, {"dtype": "int8"}, {"mesh": "2x2"}], ids=str)
def test_text_is_the_targets(root: Path, where: dict[str, str]) -> None:
    pair = fly_jax.load_pair(root / "target", root / "narrow", **DTYPE | where)
    assert pair.drafts[0].parameters()["token_rows"].dtype == jnp.int32
    alone = fly_jax.generate(pair, PROMPTS, rule="autoregressive", **GIVEN)
    exact = fly_jax.generate(pair, PROMPTS, rule="exact", num_speculative_tokens=4, **GIVEN)
    assert [one.token_ids for one in exact] == [one.token_ids for one in alone]
    assert sum(one.num_accepted_tokens for one in exact) > 0
    for one in exact:  # what stands there as the draft has proposed it, it knows
        for token, why in zip(one.token_ids, one.why, strict=True):
            assert token in KNOWN or why is not fly_jax.Why.MATCHED


def test_sampling_knows_nothing_of_it(root: Path) -> None:
    pair = fly_jax.load_pair(root / "target", root / "narrow", **DTYPE)
    given = {"rule": "sampled", "temperature": 1.0, "top_k": 20, "num_speculative_tokens": 4}
    sampled = fly_jax.generate(pair, PROMPTS, **GIVEN | given)
    tokens = [token for one in sampled for token in one.token_ids]
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    drafted = sum(one.num_draft_tokens for one in sampled)
    assert 0 < sum(one.num_accepted_tokens for one in sampled) < drafted
    assert any(token % 2 for token in tokens), "half of them can only be the target's own"


def test_a_number_of_rows_that_cannot_be(root: Path, tmp_path: Path) -> None:
    target, folder = root / "target", tmp_path / "wrong"
    shutil.copytree(root / "narrow", folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == ROWS
    for rows in (1, VOCAB_SIZE + 1):
        (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": rows}))
        assert_refused(f"draft_vocab_size={rows} and vocab_size", fly_jax.load_pair, target, folder)
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": ROWS - 1}))
    assert_refused("has shape", fly_jax.load_pair, target, folder)


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_that_the_embedding_does_not_have(root: Path, tmp_path: Path, row: int) -> None:
    shutil.copytree(root / "narrow", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["token_rows"][5] = row
    save_file(tensors, file)
    assert_refused(f"token_rows.* each must be from 0 to {ROWS - 1}", load_llama, tmp_path)


def test_the_drafter_that_is_here() -> None:
    """It loads, is small, and has an idea of what its target answers."""
    folder = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct"
    opened, model = open_checkpoint(folder), load_llama(folder)
    assert sum(one.size for one in jax.tree.leaves(model.parameters())) < 12_000_000
    assert model.config.draft_vocab_size is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = opened.tokenizer.apply_chat_template(question)
    answer = opened.tokenizer.encode("The capital of France is Paris.")
    told = jax.nn.log_softmax(logits_after(model, [*prompt, *answer])[len(prompt) - 1 : -1])
    loss = -np.mean(told[np.arange(len(answer)), np.asarray(answer)])
    assert loss < math.log(model.config.draft_vocab_size) / 2


def decoded(target: Path, draft: Path, **where: str) -> list[list[int]]:
    pair = fly_jax.load_pair(target, draft, **DTYPE | where)
    assert pair.target.config.vocab_size == VOCAB_SIZE
    given = {"rule": "fly", "num_speculative_tokens": 4, "window_size": 2}
    return [one.token_ids for one in fly_jax.generate(pair, PROMPTS, **GIVEN | given)]


@pytest.mark.parametrize("where", [{}, {"dtype": "int8"}, {"mesh": "2x2"}], ids=str)
def test_what_pads_is_cut(root: Path, where: dict[str, str]) -> None:
    expected = decoded(root / "target", root / "draft", **where)
    assert decoded(root / "wide_target", root / "draft", **where) == expected
    assert decoded(root / "target", root / "wide_draft", **where) == expected


def test_more_than_padding_is_another_vocabulary(root: Path) -> None:
    with pytest.raises(FlyJaxError, match=r"320 tokens and the draft one of 360"):
        fly_jax.load_pair(root / "target", root / "other")
