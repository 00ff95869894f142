"""A head learns what its teacher expects; a run that was stopped goes on as if it had not."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train as embedded_pair
from golden import FIXTURES, assert_same
from launch_types import Folders, Patch, Ran
from random_pairs import SPECS, batch_engine
from safetensors import safe_open
from tiny_pair import CONFIG, VOCAB_SIZE

import fly_jax
from fly_jax.decoding.pair import Dtype
from fly_jax.models import llama
from fly_jax.models.cache import empty_cache
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.head_config import Eagle3
from fly_jax.models.llama import Llama
from fly_jax.training import expectations, heads
from fly_jax.training.expectations import Document, Expected, batches, continued, expected, laid_out
from fly_jax.training.trainer import Recipe, Row, steps_done, train

DRAFTERS = Path(__file__).parents[2] / "drafters"
LAYERS = heads.layers_read(CONFIG.num_layers)
PROMPTS = [[1, 5, 9], [1, 7], [1, 30, 31, 32]]
# What one of the two heads has and the other one has not.
OF_DSPARK_ALONE = {f"confidence_head.proj.{one}" for one in ("weight", "bias")}
OF_DSPARK_ALONE |= {"embed_tokens.weight"}


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama.random(CONFIG, jax.random.key(1))


def heard() -> list[Expected]:
    """Two documents, in which tokens 3 and 4 are said most."""
    found = []
    for tokens, num_prompt in [([9, 3, 3, 4], 1), ([8, 9, 4, 3, 3], 2)]:
        likely = np.array([[3, 5]] * len(tokens), np.int32)
        shares = np.array([[0.7, 0.2]] * len(tokens), np.float16)
        features = np.array([[one, 1] for one in tokens], np.uint16)
        found.append(Expected(np.array(tokens, np.int32), num_prompt, likely, shares, features))
    return found


def test_a_teacher_goes_on_where_it_was(model: Llama, tmp_path: Path) -> None:
    file = tmp_path / "continuations.jsonl"
    engine = batch_engine(model, None, SPECS["autoregressive"], 2)
    whole = continued(engine, PROMPTS, file, max_new_tokens=5, seed=0)
    alone = engine.generate(PROMPTS, 5)
    assert whole == [Document(ids, one.token_ids) for ids, one in zip(PROMPTS, alone, strict=True)]
    first, second, _ = file.read_text().splitlines()
    file.write_text(first + "\n" + second[:20])  # as a run leaves it that was killed
    assert continued(engine, PROMPTS, file, max_new_tokens=5, seed=0) == whole
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == len(PROMPTS)
    engine.submit = None  # type: ignore[assignment, method-assign]
    assert continued(engine, PROMPTS, file, max_new_tokens=5, seed=0) == whole


def test_what_a_teacher_expects(model: Llama, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(expectations, "_PART_DOCUMENTS", 2)
    documents = [Document([1, 5, 9], [4, 4, 7]), Document([1], [8]), Document([1] * 9, [2, 3])]
    found = expected(model, documents, tmp_path / "parts", length=8, layers=LAYERS)
    assert [len(one.tokens) for one in found] == [6, 2, 8]
    assert [one.num_prompt for one in found] == [3, 1, 6]

    @jax.jit
    def read(text: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = empty_cache(CONFIG, 1, 0, jnp.dtype("float32"))
        hidden, _, inputs = model.hidden_and_inputs(text, cache, LAYERS)
        return jax.nn.softmax(model.logits(hidden)[0]), inputs[0]

    for document, one in zip(documents, found, strict=True):
        text = np.array([[*document.prompt, *document.answer]])
        np.testing.assert_array_equal(one.tokens, text[0, -8:])
        shares, inputs = (np.asarray(found)[-8:] for found in read(text))
        features = one.features.view(jnp.bfloat16).astype(np.float32)
        np.testing.assert_allclose(features, inputs, rtol=0.05, atol=0.05)
        best = -np.sort(-shares, axis=-1)[:, : one.likely.shape[1]]
        # Products of bfloat16, shares as float16.
        for likely in (one.shares, np.take_along_axis(shares, one.likely, axis=-1)):
            np.testing.assert_allclose(likely, best, rtol=0.05, atol=0.003)
    # Parts that were made with another length are not taken.
    shorter = expected(model, documents, tmp_path / "parts", length=4, layers=LAYERS)
    np.testing.assert_array_equal(shorter[0].features, found[0].features[-4:])
    found = expected(model, documents, tmp_path / "parts", length=8, layers=LAYERS)
    monkeypatch.setattr(expectations, "_read_along", None)
    again = expected(model, documents, tmp_path / "parts", length=8, layers=LAYERS)
    jax.tree.map(np.testing.assert_array_equal, found, again)


def test_the_loss_is_that_of_each_slot_by_hand(monkeypatch: Patch) -> None:
    """Of one and two tokens ahead, within a document, of known tokens, at the heaviest slots."""
    ahead, known = (1, 2), [3, 4, 9]
    logits = np.random.default_rng(0).normal(size=(len(ahead), 8, len(known))).astype(np.float32)
    asked: list[np.ndarray] = []

    def scores(*given: Any) -> Iterator[jax.Array]:
        asked.append(np.asarray(given[3][0]))
        yield from jnp.asarray(logits)[:, None, asked[0]]

    kind = heads.Kind(ahead[0], len(ahead), scores, 1e-3)
    monkeypatch.setitem(heads.KINDS, "by hand", kind)
    config = dataclasses.replace(CONFIG, vocab_size=12, draft_vocab_size=1 + len(known))
    rows = jnp.full(12, len(known), jnp.int32).at[jnp.asarray(known)].set(jnp.arange(len(known)))
    row = laid_out(heard(), 8)
    batch = jax.tree.map(lambda one: one[None], row)
    found = heads.loss("by hand", config, {"token_rows": rows}, batch)

    first = np.append(row.row.weights[1:], 0)
    assert (len(asked[0]), len(set(asked[0]))) == (4, 4)
    assert min(first[asked[0]]) >= max(np.delete(first, asked[0]))
    whole = 0.0
    for step, every in zip(ahead, logits, strict=True):
        losses, weights = 0.0, 0.0
        for slot in asked[0]:
            own, place = every[slot], slot + step  # whose next token the teacher expects
            if place > 7 or row.row.segments[place] != row.row.segments[slot]:
                continue
            weight = float(row.row.weights[place])
            weights += weight
            surprise = float(np.log(np.exp(own).sum()) - own[0])
            # Token 3 has a share of 0.7, and token 5 is none that the head knows.
            losses += weight * float(row.shares[place, 0]) * surprise
        whole += 0.8 ** (step - 1) * losses / weights
    assert weights > 1
    assert float(found) == pytest.approx(whole / 1.8, rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_teacher_of_any_type_is_read(tiny_pair: Folders, dtype: Dtype, tmp_path: Path) -> None:
    target = fly_jax.load_pair(tiny_pair[0], dtype=dtype).target
    (found,) = expected(target, [Document([1, 5], [4])], tmp_path, length=8, layers=(1,))
    assert found.shares.shape == found.likely.shape
    assert (found.shares > 0).all()
    assert (found.shares.sum(axis=1) < 1).all()


def test_a_head_begins_alike_where_a_teachers_integers_are_unsigned(
    tiny_pair: Folders, monkeypatch: Patch
) -> None:
    begun = []
    for is_unsigned in (False, True):
        monkeypatch.setattr(llama, "multiplies_unsigned", lambda known=is_unsigned: known)
        teacher = load_llama(tiny_pair[0], int8=True).unstacked()
        known = np.arange(5, 40, dtype=np.int32)
        begun.append(heads.beginning("eagle3", teacher, known, num_layers=2)[1])
    jax.tree.map(np.testing.assert_array_equal, *begun)


def test_the_most_frequent_tokens_are_known() -> None:
    known, share = expectations.frequent_tokens(heard(), 12, 3)
    assert (known.tolist(), share) == ([3, 4, 9], 1.0)  # 9 is in prompts, more often than 8
    known, share = expectations.frequent_tokens(heard(), 12, 1)
    assert (known.tolist(), share) == ([3], pytest.approx(4 / 6))


def test_rows_hold_documents_and_what_is_expected() -> None:
    recipe = dataclasses.replace(RECIPE, batch_size=1, row_length=16)

    def rows_from(step: int) -> Iterator[Any]:
        for batch in batches(heard(), recipe, step):
            yield jax.tree.map(lambda leaf: leaf[0], batch)

    documents = {tuple(one.tokens.tolist()): one.num_prompt for one in heard()}
    rows = list(itertools.islice(rows_from(0), 4))
    jax.tree.map(np.testing.assert_array_equal, rows[3], next(rows_from(3)))
    for row, likely, shares, features in rows:
        assert row.tokens.shape == row.segments.shape == row.positions.shape == (17,)
        assert row.weights.shape == likely.shape[:1] == shares.shape[:1] == (16,)
        for segment in range(1, row.segments[-1]):
            inside = np.flatnonzero(row.segments == segment)
            num_prompt = documents[tuple(row.tokens[inside].tolist())]
            assert row.positions[inside].tolist() == list(range(len(inside)))
            weights = np.ones(len(inside), np.float32)
            weights[: num_prompt - 1], weights[-1] = 0.3, 0
            np.testing.assert_array_equal(row.weights[inside], weights)
        np.testing.assert_array_equal(features[:, 0], row.tokens[:-1])
    short = laid_out(heard()[:1], 16).row
    assert short.segments.tolist() == [1] * 4 + [0] * 13
    assert short.weights[3:].tolist() == [0] * 13


@pytest.fixture(scope="module")
def folders(tiny_pair: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The teacher's folder, and the file of prompts."""
    prompts = tmp_path_factory.mktemp("distil") / "prompts.txt"
    prompts.write_text("Ada has 3 apples\nBoris\nThe sum\n")
    return tiny_pair[0], prompts


@pytest.mark.parametrize("kind", list(heads.KINDS))
def test_a_head_learns_its_teachers_text(
    folders: Folders, tmp_path: Path, kind: str, monkeypatch: Patch, ran: Ran
) -> None:
    """What the teacher said to three prompts is learned, and drafted as was foretold of one."""
    for module in (expectations, heads):
        monkeypatch.setattr(module, "ROW_LENGTH", 64)
    arguments = [
        "train", f"--head={kind}", f"--teacher={folders[0]}", f"--prompts_file={folders[1]}",
        f"--directory={tmp_path}", f"--draft_vocab_size={VOCAB_SIZE // 2}", "--max_new_tokens=24",
        "--batch_size=3", "--num_steps=15", "--tokens_per_step=1024", "--dtype=float32",
    ]  # fmt: skip
    error = ran(*arguments).err
    assert f"{VOCAB_SIZE // 2 - 1} of {VOCAB_SIZE} tokens" in error
    (foretold,) = re.findall(r"Step 15: (.*) mean accepted tokens", error)
    pair = fly_jax.load_pair(folders[0], tmp_path / kind, dtype="float32")
    texts, sizes = folders[1].read_text().splitlines(), {"max_new_tokens": 24, "batch_size": 3}
    exact = fly_jax.generate(pair, texts, rule="exact", num_speculative_tokens=4, **sizes)
    alone = fly_jax.generate(pair, texts, rule="autoregressive", **sizes)
    assert [one.token_ids for one in exact] == [one.token_ids for one in alone]
    assert sum(one.num_accepted_tokens for one in exact) > 20
    # The head is written in bfloat16, so one draft of all may be another.
    rounds = len(exact[0].token_ids) / float(foretold)
    assert exact[0].num_rounds == pytest.approx(rounds, abs=1.01)
    # Started again there is nothing left to do.
    monkeypatch.setattr(expectations, "_read_along", None)
    assert "has had its 15 steps; nothing was left to train" in ran(*arguments).err
    # What another teacher, or this one with other prompts, has said is not mixed with it.
    other = tmp_path / "other.txt"
    other.write_text("Ada\n")
    said = ran(*arguments, f"--prompts_file={other}", status=2).err
    assert "the answers of a run with another --prompts_file (or --chat, --system); give" in said


@pytest.mark.parametrize(("kind", "fixture", "beside"), [
    ("eagle3", "eagle3/speculators", set()), ("dspark", "block/speculators", OF_DSPARK_ALONE),
])  # fmt: skip
def test_a_head_is_written_as_speculators_reads_it(
    model: Llama, tmp_path: Path, kind: str, fixture: str, beside: set[str]
) -> None:
    known = np.arange(5, 40, dtype=np.int32)
    own, start = heads.beginning(kind, model, known, num_layers=2, intermediate_size=24)
    loudness = np.linalg.norm(model.parameters()["down"][-1], axis=1)
    kept = np.linalg.norm(start.trained["down"][-1], axis=1)
    np.testing.assert_array_equal(np.sort(kept), np.sort(loudness)[-24:])
    save_hf(Llama(own, start.trained | start.frozen), tmp_path, jnp.float32)
    folders = (FIXTURES / fixture, tmp_path)
    theirs, ours = (json.loads((one / "config.json").read_text()) for one in folders)
    assert theirs.keys() - ours.keys() <= {"auto_map", "transformers_version"}
    assert list(LAYERS) in ours.values()
    types = []
    for folder in folders:
        with safe_open(folder / "model.safetensors", "np") as file:
            types.append({one: file.get_slice(one).get_dtype() for one in file.keys()})  # noqa: SIM118
    assert types[0].keys() ^ types[1].keys() == beside
    assert types[0] | types[1] == types[1] | types[0]
    read = load_llama(tmp_path)
    assert own.head == read.config.head
    for name, values in read.parameters().items():
        np.testing.assert_array_equal(values, (start.trained | start.frozen)[name], err_msg=name)


@pytest.mark.parametrize("folder", sorted(DRAFTERS.iterdir()), ids=lambda one: one.name)
def test_heads_in_the_repository_open_without_a_copy_of_the_targets_embedding(folder: Path) -> None:
    own = open_weights(folder).config
    assert isinstance(own.head, Eagle3)
    assert own.head.has_unembedding > own.head.has_embedding
    assert f"{own.draft_vocab_size:,}" in (folder / "README.md").read_text()
    assert f"MLP {own.ffw_size}" in (folder / "README.md").read_text()


def test_an_interrupted_run_says_how_to_go_on(
    folders: Folders, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    monkeypatch.setattr(expectations, "continued", Mock(side_effect=KeyboardInterrupt))
    target, prompts = folders
    given = f"train --teacher={target} --prompts_file={prompts} --directory={tmp_path}"
    assert f"python -m fly_jax.launch {given}" in ran(*given.split(), status=130).err
    claim = tmp_path / "answers_to.json"
    for content, word in (('{"seed": 1}', "another --teacher"), ("", "is damaged")):
        claim.write_text(content)
        assert word in ran(*given.split(), status=2).err
        assert claim.read_text() == content


RECIPE = Recipe(
    config=CONFIG, num_steps=9, batch_size=2, row_length=12, learning_rate=1e-2, warmup_steps=2,
    seed=0, loss=embedded_pair.next_token_loss,
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
    assert_same(resumed, whole)


@pytest.mark.parametrize("best", [1, 2])
def test_it_ends_where_nothing_is_gained(tmp_path: Path, best: int) -> None:
    """The best model, of equals the first, is kept, and the run ends five measures behind it."""
    seen: list[dict[str, np.ndarray]] = []

    def measured(model: Llama) -> float:
        seen.append(jax.tree.map(np.array, model.parameters()))
        return float(min(len(seen), best))

    for _ in range(2):  # the second time it has ended already
        made = train(RECIPE, rows, tmp_path, measured=measured, steps_per_checkpoint=1)
        assert len(seen) == best + 5
        jax.tree.map(np.testing.assert_array_equal, made.parameters(), seen[best - 1])
