"""Draft models below another, and those that draft in one pass (PARD): the same tokens."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array
from tiny_pair import write_pair

from fly_jax import (
    Draft,
    Engine,
    Exact,
    FlyJaxError,
    Generation,
    Lookup,
    Sampling,
    generate,
    load_pair,
)
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.drafter import Terms
from fly_jax.decoding.drafters.parallel import ParallelDraft
from fly_jax.decoding.pair import drafter_of, open_pair
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.llama import Llama

Texts = list[list[int]]
PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9, 2, 6]]
LOOKUP = Lookup(num_speculative_tokens=3)
ROUND = pairs.SPECS["exact"]
# What is decoded with, how many tokens each level below proposes, the last level, and the rows.
CASES = {
    "fly, four levels": (pairs.SPECS["fly"], (3, 2), LOOKUP, 1),
    "defer": (pairs.SPECS["deferred"], (2,), LOOKUP, 3),
    "sampled": (pairs.SPECS["sampled"], (3,), LOOKUP, 3),
}


def engine_of(
    spec: RoundSpec, sizes: tuple[int, ...], pair: int, *noises: float, rows: int = pairs.ROWS
) -> Engine:
    """With the draft of the first noise, and others of the same pair that propose to it."""
    spec = spec.with_static(level_speculative_tokens=sizes)
    return pairs.pair_engine(pair, spec, *noises, rows=rows)


def without_cost(row: Generation) -> Generation:
    return dataclasses.replace(row, num_draft_passes=0, seconds=0.0)


@pytest.mark.parametrize("name", CASES)
def test_levels_change_no_token(name: str) -> None:
    """Nor why it stands there: whether the lower levels are good or useless."""
    spec, sizes, lookup, rows = CASES[name]
    with_lookup, plain = spec.with_static(lookup=lookup), list[Generation]()
    for pair, below in ((1, (0.25, 0.2)), (2, (10.0, 0.3))):
        noises, given = below[: len(sizes)], (PROMPTS, pairs.MOST_TOKENS)
        alone = engine_of(spec, (), pair, 0.2, rows=rows)
        expected = alone.generate(*given, seed=pair)
        helped = engine_of(with_lookup, sizes, pair, 0.2, *noises, rows=rows)
        found = helped.generate(*given, seed=pair)
        assert [without_cost(row) for row in found] == [without_cost(row) for row in expected]
        plain += expected
    if name != "sampled":
        seen = "num_rollbacks" if name == "defer" else "num_rescued_tokens"
        assert sum(getattr(row, seen) for row in plain) > 0, "the case proves nothing"


tokens = st.integers(0, pairs.CONFIG.vocab_size - 1) | st.integers(0, 2)


@pytest.mark.parametrize("lookup", [None, LOOKUP])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    pair=st.integers(0, 3),
    noise=st.sampled_from(pairs.NOISES),
    below=st.sampled_from(pairs.NOISES),
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=16), min_size=1, max_size=4),
    limit=st.integers(1, pairs.MOST_TOKENS),
)
def test_three_levels_equal_one_token_at_a_time(
    lookup: Lookup | None, pair: int, noise: float, below: float, prompts: Texts, limit: int
) -> None:
    engine = engine_of(ROUND.with_static(lookup=lookup), (2,), pair, noise, below)
    rows = engine.generate(prompts, limit)
    expected = pairs.autoregressive(pairs.random_target(pair), prompts, limit)
    assert [row.token_ids for row in rows] == expected


TEXT = [[int(x) for x in np.random.default_rng(row).integers(0, 48, 20 + row)] for row in range(3)]
PADDED, LENGTH = pairs.padded(TEXT, 64)
COUNT = 10


@functools.partial(jax.jit, static_argnames=("sizes", "margin"))
def drafted(
    models: tuple[Llama, ...],
    sizes: tuple[int, ...],
    valid: Array,
    sampling: Sampling | None,
    margin: float = 0.0,
) -> Draft:
    """What is drafted when the levels below have seen no more than `valid` tokens of each row."""
    drafter = drafter_of(
        models, RoundStatic(COUNT, level_speculative_tokens=sizes, level_margin=margin)
    )
    assert drafter is not None
    text, length = jnp.asarray(PADDED), jnp.asarray(LENGTH)
    state = pairs.state_after(drafter, text, [length, *[valid] * len(sizes)], beyond=7.0)
    keys = pairs.keys_from(3, len(LENGTH))
    return drafter.propose(state, text, length, COUNT, Terms(None, sampling, keys))[0]


@pytest.mark.parametrize("sampling", [None, Sampling(0.9, top_k=20)])
def test_a_level_that_agrees_saves_passes_and_noise_changes_nothing(
    sampling: Sampling | None,
) -> None:
    """K = 10 takes one pass to catch up, and one for every four that are confirmed and one more."""
    top = pairs.random_draft(1, 0.2)
    alone = drafted((top,), (), LENGTH, sampling)
    if sampling is None:
        assert alone.tokens.tolist() == pairs.greedy(top, TEXT, 10)
    perfect = drafted((top, top), (4,), LENGTH, sampling)
    assert perfect.tokens.tolist() == alone.tokens.tolist()
    assert [alone.num_passes.tolist(), perfect.num_passes.tolist()[:1]] == [[10], [3]]
    # Four passes for four tokens, three for the three that are left to propose.
    assert perfect.num_passes.tolist()[1] == 4 + 3
    noise = drafted((top, pairs.random_draft(1, 10.0)), (4,), LENGTH, sampling)
    assert noise.tokens.tolist() == alone.tokens.tolist()
    assert int(noise.num_passes[0]) > 6


@pytest.mark.parametrize("seen", [0, 5, 18])
def test_a_level_that_was_not_asked_for_long_catches_up(seen: int) -> None:
    """And is as good as one that was, or the level above would confirm nothing."""
    top = pairs.random_draft(1, 0.2)
    found = drafted((top, top, top), (4, 2), np.minimum(seen, LENGTH), None)
    assert found.tokens.tolist() == pairs.greedy(top, TEXT, COUNT)
    assert int(found.num_passes[0]) == 3


def by_hand(top: Llama, below: Llama, text: list[int], margin: float) -> list[int]:
    """What two levels draft with a margin, one token at a time."""

    def logits(tokens: list[int]) -> np.ndarray:
        return pairs.logits_after(top, tokens)[-1]

    drafted = [int(logits(text).argmax())]
    while len(drafted) < COUNT:
        useful = min(4, COUNT - len(drafted) - 1)
        for token in pairs.greedy(below, [text + drafted], max(useful, 1))[0][:useful]:
            scores = logits(text + drafted)
            if scores[token] < scores.max() - margin:
                break
            drafted.append(token)
        drafted.append(int(logits(text + drafted).argmax()))
    return drafted[:COUNT]


@pytest.mark.parametrize("margin", [4.0, 1e9])
def test_a_margin_drafts_what_a_level_below_proposes_where_it_is_nearly_the_choice(
    margin: float,
) -> None:
    top, below = pairs.random_draft(1, 0.2), pairs.random_draft(1, 0.6)
    found = drafted((top, below), (4,), LENGTH, None, margin)
    expected = [by_hand(top, below, text, margin) for text in TEXT]
    assert found.tokens.tolist() == expected
    own = drafted((top, below), (4,), LENGTH, None)
    assert expected != own.tokens.tolist()
    assert int(found.num_passes[0]) < int(own.num_passes[0])


def test_a_margin_leaves_drawn_rows_alone_and_loses_nothing() -> None:
    top, below = pairs.random_draft(1, 0.2), pairs.random_draft(1, 0.6)
    mixed = Sampling(np.float32([0.0, 0.9, 0.9]))
    expected = drafted((top, below), (4,), LENGTH, mixed)
    found = drafted((top, below), (4,), LENGTH, mixed, 4.0)
    assert found.tokens[1:].tolist() == expected.tokens[1:].tolist()
    greedy = drafted((top, below), (4,), LENGTH, None, 4.0)
    assert found.tokens[0].tolist() == greedy.tokens[0].tolist() != expected.tokens[0].tolist()
    spec = ROUND.with_static(level_margin=2.0)
    rows = engine_of(spec, (4,), 1, 0.2, 0.6).generate(PROMPTS, pairs.MOST_TOKENS)
    plain = pairs.autoregressive(pairs.random_target(1), PROMPTS, pairs.MOST_TOKENS)
    assert [row.token_ids for row in rows] == plain


def test_a_lower_level_that_agrees_halves_the_passes_of_decoding() -> None:
    """Over many rounds, with a draft that is often refused: the caches below stay right."""
    alone = engine_of(ROUND, (), 1, 0.2).generate(PROMPTS, pairs.MOST_TOKENS)
    helped = engine_of(ROUND, (4, 2), 1, 0.2, 0.2, 0.2).generate(PROMPTS, pairs.MOST_TOKENS)
    assert sum(row.num_rounds for row in alone) > 12
    for before, after in zip(alone, helped, strict=True):
        assert before.num_draft_passes == 5 * before.num_rounds
        assert after.num_draft_passes == 2 * after.num_rounds  # one to catch up, one for the rest


@pytest.mark.parametrize("sampling", [None, Sampling(0.8)])
def test_a_wrong_number_of_levels_is_refused(sampling: Sampling | None) -> None:
    with pytest.raises(FlyJaxError, match="2 draft models were given"):
        pairs.pair_engine(1, RoundSpec(Exact(), RoundStatic(4), sampling), 0.2, 0.2)
    with pytest.raises(FlyJaxError, match="at least 1 token"):
        RoundSpec(Exact(), RoundStatic(4, level_speculative_tokens=(4, 0)), sampling)
    other = Llama.random(dataclasses.replace(pairs.CONFIG, vocab_size=50), jax.random.key(0))
    spec = RoundSpec(Exact(), RoundStatic(4, level_speculative_tokens=(2,)), sampling)
    with pytest.raises(FlyJaxError, match="A draft model has 50 tokens"):
        pairs.batch_engine(pairs.random_target(1), (pairs.random_draft(1, 0.2), other), spec)


PARD = 5
CONFIG = dataclasses.replace(pairs.CONFIG, pard_token=PARD)
GOLDEN = Path(__file__).parents[1] / "fixtures" / "pard"


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
    drafter = ParallelDraft(model.parameters(), config=model.config, num_speculative_tokens=k)
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
