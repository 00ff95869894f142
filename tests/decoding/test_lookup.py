"""The lookup against loops, and what it costs and changes in drafting."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

from fly_jax import Draft, DraftModel, FlyJaxError, KVCache, Sampling
from fly_jax.decoding.drafters.lookup import Lookup, look_up

CAPACITY = 32
ROWS = 3
LOOKUPS = [
    Lookup(),
    Lookup(match="earliest"),
    Lookup(max_ngram=3, min_ngram=2, num_tokens=2, match="earliest"),
    Lookup(max_ngram=1, num_tokens=40),
]
DRAFTED = 5
VARIED = 3  # the pair that repeats itself least
REPETITIVE = 2  # and the one that does most

find = jax.jit(look_up, static_argnums=(0, 3))


def looked_up(lookup: Lookup, text: Sequence[int]) -> list[int]:
    """Prompt lookup, from its definition: sizes downwards, then places in order."""
    for size in range(lookup.max_ngram, lookup.min_ngram - 1, -1):
        if size > len(text):
            continue
        places = range(len(text) - size)
        for place in places if lookup.match == "earliest" else reversed(places):
            if text[place : place + size] == text[-size:]:
                return list(text[place + size :][: lookup.num_tokens])
    return []


@pytest.mark.parametrize("lookup", LOOKUPS)
@settings(max_examples=80, deadline=None)
@given(
    rows=st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=CAPACITY)] * ROWS),
    stale=st.integers(0, 3),
)
def test_equals_its_definition(lookup: Lookup, rows: tuple[list[int], ...], stale: int) -> None:
    text, lengths = pairs.padded(rows, CAPACITY)
    text[np.arange(CAPACITY) >= lengths[:, None]] = stale
    tokens, found = find(lookup, text, lengths, lookup.num_tokens)
    tokens, found = np.asarray(tokens), np.asarray(found)
    assert tokens.shape == (ROWS, lookup.num_tokens)
    for index, row in enumerate(rows):
        assert tokens[index, : int(found[index])].tolist() == looked_up(lookup, row)


@pytest.mark.parametrize(("match", "expected"), [("earliest", [5, 1, 2]), ("latest", [6, 9, 1])])
def test_cases_by_name(match: str, expected: list[int]) -> None:
    lookup = Lookup(max_ngram=2, num_tokens=3, match=match)

    def proposal(*text: int) -> list[int]:
        tokens, found = find(lookup, *pairs.padded([text], CAPACITY), lookup.num_tokens)
        return tokens[0, : int(found[0])].tolist()

    assert proposal(1, 2, 5, 1, 2, 6, 9, 1, 2) == expected
    assert proposal(8, 1, 3, 8, 2, 4, 2, 8, 1) == [3, 8, 2]  # two tokens before one
    assert proposal(4, 4) == [4]  # cut at the end of the row
    assert proposal(1, 2, 3) == []
    assert proposal(0) == []


@pytest.mark.parametrize("wrong", [{"min_ngram": 0}, {"min_ngram": 5}, {"num_tokens": 0}])
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(FlyJaxError):
        Lookup(**wrong)


@jax.jit
def drafted(
    drafter: DraftModel, text: Array, length: Array, keys: Array, sampling: Sampling | None = None
) -> tuple[Draft, KVCache]:
    # Nothing of the future, so that what a pass writes can be seen.
    state = pairs.state_after(drafter, text, [length - 1], beyond=0.0)
    draft, state = drafter.propose(state, text, length, DRAFTED, sampling=sampling, keys=keys)
    return draft, state.cache


def draft(
    prompts: Sequence[Sequence[int]], lookup: Lookup | None, sampling: Sampling | None = None,
    seed: int = 0, pair: int = 0,
) -> tuple[Draft, KVCache]:  # fmt: skip
    assert len(prompts) == ROWS
    model = pairs.random_target(pair)
    drafter = DraftModel(model.parameters(), lookup, config=pairs.CONFIG, num_tokens=DRAFTED)
    return drafted(drafter, *pairs.padded(prompts, 64), pairs.keys_from(seed, ROWS), sampling)


def without_repeats() -> list[list[int]]:
    """Prompts that go on, in the model's own words, without a token that was there before."""
    prompts = [[token, (7 * token + 5) % 48] for token in range(pairs.CONFIG.vocab_size)]
    said = pairs.greedy(pairs.random_target(VARIED), prompts, DRAFTED)
    begun = zip(prompts, said, strict=True)
    return [prompt for prompt, new in begun if len({*prompt, *new}) == 2 + DRAFTED][:ROWS]


def positions_written(cache: KVCache) -> list[int]:
    written = np.any(np.asarray(cache.keys) != 0, axis=(0, 2, 4))
    return [int(np.flatnonzero(row)[-1]) + 1 for row in written]


def test_a_lookup_that_finds_nothing_costs_nothing() -> None:
    prompts = without_repeats()
    plain, plain_cache = draft(prompts, None, pair=VARIED)
    looked, cache = draft(prompts, Lookup(), pair=VARIED)
    assert int(looked.num_passes[0]) == int(plain.num_passes[0]) == DRAFTED
    assert looked.tokens.tolist() == plain.tokens.tolist()
    # No pass fed more than the one token that it had to.
    assert positions_written(cache) == positions_written(plain_cache) == [DRAFTED + 1] * ROWS


def test_a_lookup_that_is_right_saves_passes() -> None:
    """A model that has begun to repeat itself: the lookup knows what it says next."""
    prompts = [[7, 3, 7], [6, 3, 6], [4, 3, 4]]
    said = pairs.greedy(pairs.random_target(REPETITIVE), prompts, 12)
    prompts = [[*prompt, *new] for prompt, new in zip(prompts, said, strict=True)]
    looked, cache = draft(prompts, Lookup(), pair=REPETITIVE)
    assert looked.tokens.tolist() == pairs.greedy(pairs.random_target(REPETITIVE), prompts, DRAFTED)
    assert int(looked.num_passes[0]) < DRAFTED
    assert min(positions_written(cache)) > len(prompts[0]) + DRAFTED - 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    prompts=st.tuples(
        *[st.lists(st.integers(0, 2) | st.integers(0, 47), min_size=1, max_size=24)] * ROWS
    ),
    pair=st.integers(0, 3),
)
def test_lookup_changes_no_draft_token(prompts: tuple[list[int], ...], pair: int) -> None:
    looked, _ = draft(prompts, Lookup(), pair=pair)
    assert looked.tokens.tolist() == pairs.greedy(pairs.random_target(pair), prompts, DRAFTED)
    assert 1 <= int(looked.num_passes[0]) <= DRAFTED


@pytest.mark.parametrize("lookup", [None, Lookup(max_ngram=1, num_tokens=3)])
def test_logits_are_those_the_draft_was_drawn_from(lookup: Lookup | None) -> None:
    """Also for rows that are ahead of others: acceptance divides by these probabilities."""
    prompts = [[1] * 20, [2, 3] * 8, [5, 6, 9, 11]]
    widened = False
    for seed in range(4):
        seen, cache = draft(prompts, lookup, Sampling(0.25), seed)
        assert seen.logits is not None
        widened |= positions_written(cache) != [len(prompt) + DRAFTED - 1 for prompt in prompts]
        for row, prompt in enumerate(prompts):
            text = [*prompt, *seen.tokens[row].tolist()]
            expected = pairs.logits_after(pairs.random_target(0), text)[len(prompt) - 1 : -1]
            np.testing.assert_allclose(seen.logits[row], expected, rtol=1e-4, atol=1e-4)
    assert widened == (lookup is not None)
