"""A draft model that drafts in one pass (PARD): its drafts, and what they change."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from tiny_pair import write_pair

from fly_jax import FlyJaxError, Lookup, generate, load_pair
from fly_jax.decoding.drafters.chain import drafter_of
from fly_jax.decoding.drafters.parallel import ParallelDraft
from fly_jax.decoding.pair import open_pair
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.llama import Llama

PARD = 5
CONFIG = dataclasses.replace(pairs.CONFIG, pard_token=PARD)
GOLDEN = Path(__file__).parents[1] / "fixtures" / "pard"
PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9, 2, 6]]


@functools.cache
def parallel_draft(seed: int, noise: float) -> Llama:
    """The random draft, taken for one that drafts in one pass."""
    return Llama(CONFIG, pairs.random_draft(seed, noise).parameters())


def test_drafts_are_those_of_the_published_code() -> None:
    """Round after round, with acceptances of every length and the caches that they leave."""
    with np.load(GOLDEN / "rounds.npz") as file:
        recorded = dict(file)
    model = load_llama(GOLDEN / "draft")
    k = recorded["drafts"].shape[1]
    drafter = ParallelDraft(model.parameters(), config=model.config, num_tokens=k)
    tokens, lengths = recorded["tokens"], recorded["lengths"]
    text = np.zeros((1, len(tokens) + 2 * k + 2), np.int32)
    text[0, : len(tokens)] = tokens
    state = drafter.init(1, text.shape[1], jnp.dtype("float32"))
    state = drafter.prefill(state, text[:, : lengths[0]], jnp.int32(0), None)
    propose = jax.jit(lambda state, text, length: drafter.propose(state, text, length, k))
    assert len(set(np.diff(lengths).tolist())) >= 3
    for length, expected in zip(lengths, recorded["drafts"], strict=True):
        unknown = text.copy()
        unknown[0, length:] = 1  # of what comes it must know nothing
        draft, state = propose(state, unknown, jnp.asarray([length]))
        np.testing.assert_array_equal(draft.tokens[0], expected)
        assert draft.num_passes.tolist() == [1]


@pytest.mark.parametrize("name", ["exact", "sampled", "depths", "deferred"])
def test_lossless_and_one_pass_a_round(name: str) -> None:
    spec, given = pairs.SPECS[name], (PROMPTS, pairs.MOST_TOKENS)
    engine = pairs.batch_engine(pairs.random_target(1), parallel_draft(1, 0.05), spec)
    found = engine.generate(*given, seed=1)
    assert all(one.num_draft_passes == one.num_rounds for one in found)
    if name in ("exact", "depths"):
        target = pairs.random_target(1)
        for one, prompt in zip(found, PROMPTS, strict=True):
            (expected,) = pairs.greedy(target, [prompt], len(one.token_ids))
            assert one.token_ids == expected
    again = engine.generate(*given, seed=1)
    assert [one.token_ids for one in again] == [one.token_ids for one in found]


def test_draws_are_the_targets() -> None:
    """Over many seeds the first tokens are distributed as without a draft."""
    spec = pairs.SPECS["sampled"]
    target, prompts = pairs.random_target(2), [PROMPTS[0]] * 3
    counts = {}
    for drafts in ((), parallel_draft(2, 0.2)):
        some = spec if drafts else spec.with_static(num_speculative_tokens=0)
        engine = pairs.batch_engine(target, drafts, some)
        seen = [
            tuple(one.token_ids[:2])
            for seed in range(0, 600, 3)
            for one in engine.generate(prompts, 3, seed=seed)
        ]
        counts[bool(drafts)] = np.bincount([pair[-1] for pair in seen], minlength=48)
    distance = np.abs(counts[True] - counts[False]).sum() / 2 / 600
    assert distance < 0.12


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_below_a_draft_model_no_token_changes(noise: float) -> None:
    spec, given = pairs.SPECS["fly"], (PROMPTS, pairs.MOST_TOKENS)
    alone = pairs.pair_engine(1, spec, 0.2).generate(*given)
    below = spec.with_static(level_speculative_tokens=(3,))
    models = [pairs.random_draft(1, 0.2), parallel_draft(1, noise)]
    found = pairs.batch_engine(pairs.random_target(1), models, below).generate(*given)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert [one.why for one in found] == [one.why for one in alone]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and the draft with a token of its own."""
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": PARD}))
    return target, draft


def test_it_is_recognised_by_its_config(folders: tuple[Path, Path]) -> None:
    pair = load_pair(*folders, dtype="float32")
    (found,) = generate(pair, ["Ada has 3"], rule="exact", num_speculative_tokens=4)
    (plain,) = generate(pair, ["Ada has 3"], rule="autoregressive")
    assert found.token_ids == plain.token_ids
    assert found.num_draft_passes == found.num_rounds < plain.num_rounds


def test_its_token_can_be_given(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = folders
    given = shutil.copytree(draft, tmp_path / "draft")
    fields = json.loads((draft / "config.json").read_text())
    del fields["pard_token"]
    (given / "config.json").write_text(json.dumps(fields))
    rounds = {"rule": "fly", "num_speculative_tokens": 8}
    pairs_of = (open_pair(target, given, draft_parallel=PARD), open_pair(target, draft))
    found, expected = (
        generate(load_pair(one, dtype="float32"), ["Ada has 3"], **rounds)[0] for one in pairs_of
    )
    assert found.token_ids == expected.token_ids
    assert found.num_draft_passes == found.num_rounds
    with pytest.raises(FlyJaxError, match="there is no draft model"):
        open_pair(target, draft_parallel=PARD)
    with pytest.raises(FlyJaxError, match="pard_token=100000 "):
        open_pair(target, given, draft_parallel=100_000)


def test_it_is_the_last_draft(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    with pytest.raises(FlyJaxError, match="last --draft"):
        open_pair(target, [draft, target])


def test_nothing_stands_below_it() -> None:
    static = pairs.SPECS["exact"].static
    with pytest.raises(FlyJaxError, match="last --draft"):
        drafter_of([parallel_draft(1, 0.2)], dataclasses.replace(static, lookup=Lookup()))


def test_its_token_is_in_the_vocabulary() -> None:
    with pytest.raises(FlyJaxError, match="pard_token=48"):
        dataclasses.replace(CONFIG, pard_token=48)
