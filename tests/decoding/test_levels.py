"""Draft models below a draft model: other passes, the same tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

from fly_jax import Draft, Exact, FlyJaxError, Generation, Lookup, Sampling
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.chain import drafter_of
from fly_jax.models.llama import Llama

PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9, 2, 6]]
LOOKUP = Lookup(num_tokens=3)
ROUND = pairs.SPECS["exact"]
# What is decoded with, how many tokens each level below proposes, the last level, and the rows.
CASES = {
    "fly, four levels": (pairs.SPECS["fly"], (3, 2), LOOKUP, 1),
    "defer": (pairs.SPECS["deferred"], (2,), LOOKUP, 3),
    "sampled": (pairs.SPECS["sampled"], (3,), LOOKUP, 3),
}


def chain(pair: int, noise: float, below: Sequence[float]) -> tuple[Llama, ...]:
    """The draft of this noise, and others of the same pair that propose to it."""
    return tuple(pairs.random_draft(pair, one) for one in (noise, *below))


def decode(
    spec: RoundSpec,
    sizes: tuple[int, ...],
    drafts: Sequence[Llama],
    prompts: list[list[int]],
    *,
    pair: int,
    rows: int = pairs.ROWS,
    limit: int = pairs.MOST_TOKENS,
) -> list[Generation]:
    spec = spec.with_static(level_speculative_tokens=sizes)
    engine = pairs.batch_engine(pairs.random_target(pair), drafts, spec, rows)
    return engine.generate(prompts, limit, seed=pair)


def without_cost(row: Generation) -> Generation:
    return dataclasses.replace(row, num_draft_passes=0, seconds=0.0)


@pytest.mark.parametrize("name", CASES)
def test_levels_change_no_token(name: str) -> None:
    """Nor why it stands there: whether the lower levels are good or useless."""
    spec, sizes, lookup, rows = CASES[name]
    with_lookup, plain = spec.with_static(lookup=lookup), list[Generation]()
    for pair, below in ((1, (0.25, 0.2)), (2, (10.0, 0.3))):
        drafts = chain(pair, 0.2, below[: len(sizes)])
        expected = decode(spec, (), drafts[:1], PROMPTS, pair=pair, rows=rows)
        found = decode(with_lookup, sizes, drafts, PROMPTS, pair=pair, rows=rows)
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
    lookup: Lookup | None,
    pair: int,
    noise: float,
    below: float,
    prompts: list[list[int]],
    limit: int,
) -> None:
    drafts = chain(pair, noise, (below,))
    spec = ROUND.with_static(lookup=lookup)
    rows = decode(spec, (2,), drafts, prompts, pair=pair, limit=limit)
    assert [row.token_ids for row in rows] == pairs.autoregressive(
        pairs.random_target(pair), prompts, limit
    )


@functools.partial(jax.jit, static_argnames=("count", "sizes"))
def drafted(
    models: tuple[Llama, ...],
    text: Array,
    length: Array,
    valid: Array,
    count: int,
    sizes: tuple[int, ...],
    sampling: Sampling | None = None,
) -> Draft:
    """What is drafted when the levels below have seen no more than `valid` tokens of each row."""
    drafter = drafter_of(models, RoundStatic(count, level_speculative_tokens=sizes))
    assert drafter is not None
    known = [length] + [valid] * (len(models) - 1)
    state = pairs.state_after(drafter, text, known, beyond=7.0)
    keys = pairs.keys_from(3, len(length))
    return drafter.propose(state, text, length, count, sampling=sampling, keys=keys)[0]


TEXT = [[int(x) for x in np.random.default_rng(row).integers(0, 48, 20 + row)] for row in range(3)]


def padded() -> tuple[Array, Array]:
    text = np.zeros((3, 64), np.int32)
    for row, one in enumerate(TEXT):
        text[row, : len(one)] = one
    return jnp.asarray(text), jnp.asarray([len(one) for one in TEXT], jnp.int32)


@pytest.mark.parametrize("sampling", [None, Sampling(0.9, top_k=20)])
def test_a_level_that_agrees_saves_passes_and_noise_changes_nothing(
    sampling: Sampling | None,
) -> None:
    """K = 10 takes one pass to catch up, and one for every four that are confirmed and one more."""
    text, length = padded()
    top = pairs.random_draft(1, 0.2)
    alone = drafted((top,), text, length, length, 10, (), sampling)
    if sampling is None:
        assert alone.tokens.tolist() == pairs.greedy(top, TEXT, 10)
    perfect = drafted((top, top), text, length, length, 10, (4,), sampling)
    assert perfect.tokens.tolist() == alone.tokens.tolist()
    assert [alone.num_passes.tolist(), perfect.num_passes.tolist()[:1]] == [[10], [3]]
    # Four passes for four tokens, three for the three that are left to propose.
    assert perfect.num_passes.tolist()[1] == 4 + 3
    noise = drafted((top, pairs.random_draft(1, 10.0)), text, length, length, 10, (4,), sampling)
    assert noise.tokens.tolist() == alone.tokens.tolist()
    assert int(noise.num_passes[0]) > 6


@pytest.mark.parametrize("seen", [0, 5, 18])
def test_a_level_that_was_not_asked_for_long_catches_up(seen: int) -> None:
    """And is as good as one that was, or the level above would confirm nothing."""
    text, length = padded()
    top, models = pairs.random_draft(1, 0.2), (pairs.random_draft(1, 0.2),) * 3
    valid = jnp.minimum(jnp.full(3, seen), length)
    found = drafted(models, text, length, valid, 10, (4, 2))
    assert found.tokens.tolist() == pairs.greedy(top, TEXT, 10)
    assert int(found.num_passes[0]) == 3


def test_a_lower_level_that_agrees_halves_the_passes_of_decoding() -> None:
    """Over many rounds, with a draft that is often refused: the caches below stay right."""
    drafts = chain(1, 0.2, (0.2, 0.2))
    alone = decode(ROUND, (), drafts[:1], PROMPTS, pair=1)
    helped = decode(ROUND, (4, 2), drafts, PROMPTS, pair=1)
    assert sum(row.num_rounds for row in alone) > 12
    for before, after in zip(alone, helped, strict=True):
        assert before.num_draft_passes == 5 * before.num_rounds
        assert after.num_draft_passes == 2 * after.num_rounds  # one to catch up, one for the rest


@pytest.mark.parametrize("sampling", [None, Sampling(0.8)])
def test_a_wrong_number_of_levels_is_refused(sampling: Sampling | None) -> None:
    drafts = chain(1, 0.2, (0.2,))
    with pytest.raises(FlyJaxError, match="2 draft models were given"):
        pairs.batch_engine(
            pairs.random_target(1), drafts, RoundSpec(Exact(), RoundStatic(4), sampling), 1
        )
    with pytest.raises(FlyJaxError, match="at least 1 token"):
        RoundSpec(Exact(), RoundStatic(4, level_speculative_tokens=(4, 0)), sampling)
    other = Llama.random(dataclasses.replace(pairs.CONFIG, vocab_size=50), jax.random.key(0))
    spec = RoundSpec(Exact(), RoundStatic(4, level_speculative_tokens=(2,)), sampling)
    with pytest.raises(FlyJaxError, match="A draft model has 50 tokens"):
        pairs.batch_engine(pairs.random_target(1), (drafts[0], other), spec, 1)
