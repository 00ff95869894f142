"""A drafter learns what its teacher expects; a run that was stopped goes on as if it had not."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch_types import Captured, Patch
from tiny_pair import CONFIG, VOCAB_SIZE, write_pair

import fly_jax
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.pair import Dtype
from fly_jax.engine.engine import Engine
from fly_jax.launch.__main__ import main
from fly_jax.models.llama import Llama
from fly_jax.training import distillation
from fly_jax.training.distillation import (
    Document,
    Expected,
    OwnTokens,
    batches,
    continued,
    drafter_recipe,
    expected,
    first_embedding,
    frequent_tokens,
)
from fly_jax.training.trainer import Recipe, Row, steps_done, train, weighted_loss

PROMPTS = [[1, 5, 9], [1, 7], [1, 30, 31, 32]]


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama.random(CONFIG, jax.random.key(1))


def heard() -> list[Expected]:
    """Two documents, in which tokens 3 and 4 are said most."""
    found = []
    for tokens, num_prompt in [([9, 3, 3, 4], 1), ([8, 9, 4, 3, 3], 2)]:
        likely = np.array([[3, 5]] * len(tokens), np.int32)
        shares = np.array([[0.7, 0.2]] * len(tokens), np.float16)
        found.append(Expected(np.array(tokens, np.int32), num_prompt, likely, shares))
    return found


def test_a_teacher_goes_on_where_it_was(model: Llama, tmp_path: Path) -> None:
    file = tmp_path / "continuations.jsonl"
    spec = RoundSpec(fly_jax.Exact(), RoundStatic(0))
    engine = Engine(model, None, spec, num_slots=2, offline=True)
    whole = continued(engine, PROMPTS, file, max_new_tokens=5, seed=0)
    alone = engine.generate(PROMPTS, 5)
    assert whole == [Document(ids, one.token_ids) for ids, one in zip(PROMPTS, alone, strict=True)]
    lines = file.read_text().splitlines()
    file.write_text(lines[0] + "\n" + lines[1][:20])  # as a run leaves it that was killed
    assert continued(engine, PROMPTS, file, max_new_tokens=5, seed=0) == whole
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == len(PROMPTS)
    engine.submit = None  # type: ignore[assignment, method-assign]
    assert continued(engine, PROMPTS, file, max_new_tokens=5, seed=0) == whole


def test_what_a_teacher_expects(model: Llama, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(distillation, "_PART_DOCUMENTS", 2)
    documents = [Document([1, 5, 9], [4, 4, 7]), Document([1], [8]), Document([1] * 9, [2, 3])]
    found = expected(model, documents, tmp_path / "parts", length=8)
    assert [len(one.tokens) for one in found] == [6, 2, 8]
    assert [one.num_prompt for one in found] == [3, 1, 6]

    @jax.jit
    def probabilities(text: jax.Array) -> jax.Array:
        length = text.shape[1]
        before = jnp.tril(jnp.ones((1, length, length), bool))
        hidden = model.hidden_uncached(text, jnp.arange(length)[None], before)
        return jax.nn.softmax(model.logits(hidden)[0])

    for document, one in zip(documents, found, strict=True):
        text = np.array([[*document.prompt, *document.answer]])
        np.testing.assert_array_equal(one.tokens, text[0, -8:])
        shares = np.asarray(probabilities(text))[-8:]
        best = -np.sort(-shares, axis=-1)[:, : one.likely.shape[1]]
        # Products of bfloat16, shares as float16.
        for likely in (one.shares, np.take_along_axis(shares, one.likely, axis=-1)):
            np.testing.assert_allclose(likely, best, rtol=0.05, atol=0.003)
    monkeypatch.setattr(distillation, "_read_along", None)
    again = expected(model, documents, tmp_path / "parts", length=8)
    jax.tree.map(np.testing.assert_array_equal, found, again)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_teacher_of_any_type_is_read(
    folders: tuple[Path, Path], dtype: Dtype, tmp_path: Path
) -> None:
    target = fly_jax.load_pair(folders[0], dtype=dtype).target
    (found,) = expected(target, [Document([1, 5], [4])], tmp_path, length=8)
    assert found.shares.shape == found.likely.shape
    assert (found.shares > 0).all()
    assert (found.shares.sum(axis=1) < 1).all()


def test_the_most_frequent_tokens_are_known() -> None:
    own, share = frequent_tokens(heard(), 12, 4)
    assert own.known.tolist() == [3, 4, 9]  # 9 is only in prompts, more often than 8
    assert own.rows.tolist() == [3, 3, 3, 0, 1, 3, 3, 3, 3, 2, 3, 3]
    assert (own.num_rows, share) == (4, 1.0)
    own, share = frequent_tokens(heard(), 12, 2)
    assert (own.known.tolist(), own.num_rows, share) == ([3], 2, pytest.approx(4 / 6))
    everything, _ = frequent_tokens(heard(), 12, 12)
    assert (everything.rows.tolist(), everything.num_rows) == ([*range(12)], 12)


def recipe_of(own: OwnTokens) -> Recipe:
    return drafter_recipe(CONFIG, own, embed_size=128, num_layers=1, num_steps=1, seed=3)


def test_rows_hold_what_is_expected_in_own_tokens(monkeypatch: Patch) -> None:
    monkeypatch.setattr(distillation, "ROW_LENGTH", 16)
    own, _ = frequent_tokens(heard(), 12, 4)
    recipe = dataclasses.replace(recipe_of(own), batch_size=1)

    def rows_from(step: int) -> Iterator[Any]:
        for batch in batches(heard(), own, recipe, step):
            yield jax.tree.map(lambda leaf: leaf[0], batch)

    rows = list(itertools.islice(rows_from(0), 4))
    jax.tree.map(np.testing.assert_array_equal, rows[3], next(rows_from(3)))
    for row in rows:
        assert row.tokens.shape == row.segments.shape == row.positions.shape == (17,)
        assert row.weights.shape == row.likely.shape[:1] == row.shares.shape[:1] == (16,)
        documents = {(2, 0, 0, 1): 1, (3, 2, 1, 0, 0): 2}
        for segment in range(1, row.segments[-1]):
            inside = np.flatnonzero(row.segments == segment)
            num_prompt = documents[tuple(row.tokens[inside].tolist())]
            assert row.positions[inside].tolist() == list(range(len(inside)))
            weights = np.ones(len(inside), np.float32)
            weights[: num_prompt - 1], weights[-1] = 0.3, 0
            np.testing.assert_array_equal(row.weights[inside], weights)
        assert row.likely.tolist() == [[0, 3]] * 16
        # Token 5 is none that it knows.
        np.testing.assert_allclose(row.shares, [[0.7, 0]] * 16, atol=1e-3)


def test_the_loss_is_the_cross_entropy_of_what_is_expected() -> None:
    config = recipe_of(OwnTokens(np.arange(12), np.arange(12))).config
    model = Llama.random(config, jax.random.key(0))
    tokens = jnp.asarray([[1, 2, 3, 4]])
    segments, positions = jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None]
    weights = jnp.asarray([[1.0, 0.5, 2.0]])

    @jax.jit
    def loss(*expected: jax.Array) -> jax.Array:
        return weighted_loss(model, Row(tokens, weights, segments, positions, *expected))

    hard = loss()
    ones = tokens[:, 1:, None], jnp.ones((1, 3, 1))
    assert loss(*ones) == pytest.approx(float(hard), rel=1e-5)
    likely, shares = jnp.asarray([[[1, 2]] * 3]), jnp.asarray([[[0.6, 0.1]] * 3])
    soft = loss(likely, shares)
    losses = [loss(jnp.full((1, 3, 1), one), ones[1]) for one in (1, 2)]
    assert float(soft) == pytest.approx(float(0.6 * losses[0] + 0.1 * losses[1]), rel=1e-5)


def test_the_first_embedding_keeps_what_tokens_have_in_common(model: Llama) -> None:
    own, _ = frequent_tokens(heard(), VOCAB_SIZE, 20)
    rows = first_embedding(model, own, 128)
    assert rows.shape == (20, 128)
    assert np.sqrt(np.mean(rows**2) * 128) == pytest.approx(1, rel=1e-4)
    embedding = np.asarray(model.parameters()["embedding"])
    mean = embedding[own.rows == 19].mean(axis=0)
    known = np.concatenate([embedding[own.known], mean[None]])
    product = known @ known.T
    scaled = product * (rows[0] @ rows[0]) / product[0, 0]
    np.testing.assert_allclose(rows @ rows.T, scaled, atol=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("distil")
    (root / "prompts.txt").write_text("Ada has 3 apples\nBoris\nThe sum\n")
    return write_pair(root)[0], root / "prompts.txt"


def test_a_drafter_learns_its_teachers_text(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """What the teacher said to three prompts is learned by heart, with half of its tokens."""
    monkeypatch.setattr(distillation, "ROW_LENGTH", 48)
    target, prompts = folders
    directory = tmp_path / "run"
    arguments = [
        "train", f"--teacher={target}", f"--prompts_file={prompts}", f"--directory={directory}",
        "--embed_size=128", "--num_layers=1", f"--draft_vocab_size={VOCAB_SIZE // 2}",
        "--max_new_tokens=24", "--batch_size=3", "--num_steps=40", "--dtype=float32",
    ]  # fmt: skip
    assert main(arguments) == 0
    assert f"of {VOCAB_SIZE} tokens" in capsys.readouterr().err
    pair = fly_jax.load_pair(target, directory, dtype="float32")
    texts, sizes = prompts.read_text().splitlines(), {"max_new_tokens": 24, "batch_size": 3}
    exact = fly_jax.generate(pair, texts, rule="exact", num_speculative_tokens=4, **sizes)
    alone = fly_jax.generate(pair, texts, rule="autoregressive", **sizes)
    assert [one.token_ids for one in exact] == [one.token_ids for one in alone]
    assert sum(one.num_accepted_tokens for one in exact) > 20
    # Started again there is nothing left to do.
    monkeypatch.setattr(distillation, "_read_along", None)
    assert "nothing was left" not in capsys.readouterr().err
    assert main(arguments) == 0
    assert "has had its 40 steps; nothing was left to train" in capsys.readouterr().err
    # What another teacher, or this one with other prompts, has said is not mixed with it.
    prompts.write_text("Ada\n")
    assert main(arguments) == 2
    assert "the answers of a run with another --prompts_file; give" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr(distillation, "continued", Mock(side_effect=KeyboardInterrupt))
    target, prompts = folders
    arguments = [f"--teacher={target}", f"--prompts_file={prompts}", f"--directory={tmp_path}"]
    assert main(["train", *arguments]) == 130
    assert "python -m fly_jax.launch train " + " ".join(arguments) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--teacher={}"], "--prompts_file"),
        (["--teacher={}", "--prompts_file=x", "--embed_size=100"], "multiple of 128"),
        (["--teacher={}", "--prompts_file=x", "--temperature=-1"], "--temperature is -1"),
        (["--teacher={}", "--prompts_file=/nowhere"], "/nowhere"),
        (["--prompts_file=x"], "--teacher"),
        (["--teacher={}", "--prompts_file=x", "--model=target"], "--model"),
    ],
)
def test_what_is_refused(
    folders: tuple[Path, Path], arguments: list[str], word: str, capsys: Captured
) -> None:
    assert main(["train", *(one.format(folders[0]) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1


RECIPE = Recipe(
    config=CONFIG, num_steps=9, batch_size=2, row_length=12, learning_rate=1e-2, warmup_steps=2,
    seed=0,
)  # fmt: skip


def rows(start: int, *, stop: int | None = None) -> Iterator[Row]:
    """Those of each step, from one on; Ctrl-C before another."""
    for step in range(start, RECIPE.num_steps):
        if step == stop:
            raise KeyboardInterrupt
        size = (RECIPE.batch_size, RECIPE.row_length + 1)
        tokens = np.random.default_rng(step).integers(4, CONFIG.vocab_size, size, np.int32)
        positions = np.broadcast_to(np.arange(size[1], dtype=np.int32), size)
        ones = np.ones((size[0], size[1] - 1), np.float32)
        yield Row(tokens, ones, np.ones(size, np.int32), positions)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train(RECIPE, rows, tmp_path / "whole", steps_per_checkpoint=4)
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, lambda start: rows(start, stop=6), stopped, steps_per_checkpoint=4)
    assert steps_done(stopped) == 4
    again = Mock(wraps=rows)
    resumed = train(RECIPE, again, stopped, steps_per_checkpoint=4)
    again.assert_called_once_with(4)
    assert steps_done(stopped) == RECIPE.num_steps
    for name, values in whole.parameters().items():
        np.testing.assert_array_equal(resumed.parameters()[name], values, err_msg=name)
