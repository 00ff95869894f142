"""Whatever proposes: lookups, drafters that nobody knows, and draft models below another."""

import dataclasses
import functools
import itertools
from operator import mul
from typing import Any

import jax
import numpy as np
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array
from random_pairs import Texts
from refusals import assert_refused

from fly_jax import Draft, Drafter, KVCache, Lookup, Sampling, Terms
from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.drafters.lookup import _RATES, _RATES_OF_EARLIER, look_up
from fly_jax.decoding.drafters.model import ParallelDraft
from fly_jax.decoding.pair import drafter_of
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.depth_costs import DepthCosts
from fly_jax.models.llama import Llama

PAIR, VARIED = 2, 3  # the pair that repeats itself most, and the one that does least
ROWS, CAPACITY = 3, 32
K, LIMIT = 5, pairs.MOST_TOKENS
ROUND = pairs.SPECS["exact"]
PROMPTS = [[7, 3, 7], [6, 3, 6, 3, 6, 3], [4], [9, 8, 9, 8, 9], [1, 2, 1, 2]]
LOOKUPS = [Lookup(), Lookup(match="earliest")]
LOOKUPS += [Lookup(max_ngram=3, min_ngram=2, num_speculative_tokens=2, match="earliest")]
LOOKUPS += [Lookup(max_ngram=1, num_speculative_tokens=40)]
find = jax.jit(look_up, static_argnums=(0, 3))
tokens = st.lists(st.integers(0, 2) | st.integers(0, 47), min_size=1, max_size=24)


@pytest.mark.parametrize("lookup", LOOKUPS)
@settings(max_examples=80, deadline=None)
@given(
    rows=st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=CAPACITY)] * ROWS),
    stale=st.integers(0, 3),
)
def test_equals_its_definition(lookup: Lookup, rows: tuple[list[int], ...], stale: int) -> None:
    text, lengths = pairs.padded(rows, CAPACITY)
    text[np.arange(CAPACITY) >= lengths[:, None]] = stale
    given = find(lookup, text, lengths, lookup.num_speculative_tokens)
    tokens, found, matching, place = (np.asarray(one) for one in given)
    assert tokens.shape == (ROWS, lookup.num_speculative_tokens)
    for index, row in enumerate(rows):
        proposed = tokens[index, : int(found[index])].tolist()
        *expected, end = pairs.looked_up(lookup, row)
        assert [proposed, matching[index]] == expected
        assert place[index] == end or not proposed


@pytest.mark.parametrize("num_earlier", [0, 20])
def test_k_follows_from_the_length_of_the_match(
    num_earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind more tokens that match each one is likelier to be kept, and more are drafted.

    Earlier answers, if some are kept, are looked up in as if the text went on from them.
    """
    depths, seconds, lookup = (0, 1, K), (1.0, 1.2, 1.7), Lookup(num_earlier_tokens=num_earlier)
    costs = np.array([seconds, [1.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3], np.float32)
    monkeypatch.setattr(DepthCosts, "next", lambda *_, may_vary: costs)
    spec, rounds = pairs.rounds(K, depths=depths, lookup=lookup), list[RoundOutput]()
    made = pairs.pair_engine(PAIR, spec, rows=1, listener=lambda one, _: rounds.append(one))
    seen, places, answers = list[int](), list[int](), [-1] * num_earlier
    for prompt in ([1, 2, 3, 1, 2, 3, 1, 2, 3, 1], *PROMPTS):
        rounds.clear()
        earlier = answers[len(answers) - num_earlier :]
        (found,) = made.generate([prompt], LIMIT)
        answers += found.token_ids
        text, left = list(prompt), LIMIT
        for one in rounds:
            proposed, matching, place = pairs.looked_up(lookup, [*earlier, *text])
            places += [place] if proposed else []
            table = _RATES_OF_EARLIER if place < num_earlier else _RATES
            rates = [table[min(matching + at, len(table)) - 1] for at in range(len(proposed))]
            each = [min(1 + sum(itertools.accumulate(rates[:k], mul)), left) for k in depths]
            best = int(np.argmax([some / taken for some, taken in zip(each, seconds, strict=True)]))
            assert one.depth is not None
            assert one.depth.tolist() == [depths[best]]
            assert one.num_drafted.tolist() == [[min(depths[best], len(proposed), left - 1)]]
            text += one.tokens[0, 0, : one.count[0, 0]].tolist()
            left -= int(one.count[0, 0])
            seen.append(depths[best])
        assert text == [*prompt, *found.token_ids]
        assert [found.token_ids] == pairs.autoregressive(pairs.random_target(PAIR), [prompt])
    assert set(seen) == set(depths)
    assert any(place < num_earlier for place in places) == (num_earlier > 0)


@functools.partial(jax.jit, static_argnames="beyond")
def drafted(
    drafter: Drafter, text: Array, length: Array, known: list[Array], terms: Terms, beyond: float
) -> tuple[Draft, KVCache]:
    """What is drafted when each of the models has seen so much, and the cache of the first one."""
    state = pairs.state_after(drafter, text, known, beyond)
    draft, state = drafter.propose(state, text, length, drafter.num_speculative_tokens, terms)
    return draft, state.cache


def draft(
    pair: int, texts: Texts, lookup: Lookup | None, sampling: Sampling | None = None, seed: int = 0
) -> tuple[Draft, KVCache]:
    assert len(texts) == ROWS
    drafter = pairs.model_drafter(pairs.random_target(pair), lookup)
    text, length = pairs.padded(texts, 64)
    terms = Terms(None, sampling, pairs.keys_from(seed, ROWS))
    # Nothing of the future, so that what a pass writes can be seen.
    return drafted(drafter, text, length, [length - 1], terms, beyond=0.0)


def positions_written(cache: KVCache) -> list[int]:
    written = np.any(np.asarray(cache.keys) != 0, axis=(0, 2, 4))
    return [int(np.flatnonzero(row)[-1]) + 1 for row in written]


def test_a_row_that_is_not_asked_for_takes_nothing_in() -> None:
    """Until it is: a finished row that was left out costs the others no pass."""
    target = pairs.random_target(VARIED)
    drafter = dataclasses.replace(pairs.model_drafter(target, None), rests=True)
    prompts = [[3, 1, 4, 1, 5] * 8, [9], [2, 6, 5]]
    text, length = pairs.padded(prompts, 64)
    known, said = np.array([5, 0, 2]), pairs.greedy(target, prompts, K)
    for first, second, num_passes in ((0, K, K), (K, K, K + 3), (K, 0, K + 3)):
        wanted = np.array([first, second, K])
        terms = Terms(wanted)
        draft, cache = drafted(drafter, text, length, [known], terms, beyond=1e4)
        assert draft.num_passes.tolist() == [num_passes]
        assert cache.length.tolist() == [44 if first else 5, second, K + 2]
        np.testing.assert_array_equal(draft.tokens[wanted > 0], np.array(said)[wanted > 0])


@pytest.mark.parametrize("asked", [[0, 0, 0], [1, 0, 1]])
def test_a_parallel_draft_that_is_not_asked_for_makes_no_pass(asked: list[int]) -> None:
    config = dataclasses.replace(pairs.CONFIG, pard_token=5)
    given = {"config": config, "num_speculative_tokens": K}
    drafter = ParallelDraft(pairs.random_target(VARIED).parameters(), **given)
    text, length = pairs.padded([[3, 1, 4, 1, 5] * 8, [9], [2, 6, 5]], 64)
    known, is_asked = np.array([5, 0, 2]), np.array(asked) > 0
    draft, cache = drafted(
        dataclasses.replace(drafter, rests=True), text, length, [known],
        Terms(np.where(is_asked, K, 0)), beyond=1e4,
    )  # fmt: skip
    width = K + 1
    assert draft.num_passes.tolist() == [any(asked) and 1 + -(-(40 - width - 5) // width)]
    assert cache.length.tolist() == np.where(is_asked, length, known).tolist()
    all_known = drafted(drafter, text, length, [length - 1], Terms(), beyond=0.0)[0]
    np.testing.assert_array_equal(draft.tokens[is_asked], all_known.tokens[is_asked])


def test_a_lookup_that_finds_nothing_costs_nothing() -> None:
    """Behind prompts that go on without a token that was there before."""
    prompts = [[token, (7 * token + 5) % 48] for token in range(48)]
    said = pairs.greedy(pairs.random_target(VARIED), prompts, K)
    begun = zip(prompts, said, strict=True)
    prompts = [prompt for prompt, new in begun if len({*prompt, *new}) == 2 + K][:ROWS]
    plain, plain_cache = draft(VARIED, prompts, None)
    looked, cache = draft(VARIED, prompts, Lookup())
    assert int(looked.num_passes[0]) == int(plain.num_passes[0]) == K
    assert looked.tokens.tolist() == plain.tokens.tolist()
    # No pass fed more than the one token that it had to.
    assert positions_written(cache) == positions_written(plain_cache) == [K + 1] * ROWS


def test_a_lookup_that_is_right_saves_passes() -> None:
    """A model that has begun to repeat itself: the lookup knows what it says next."""
    prompts = [[7, 3, 7], [6, 3, 6], [4, 3, 4]]
    said = pairs.greedy(pairs.random_target(PAIR), prompts, 12)
    prompts = [[*prompt, *new] for prompt, new in zip(prompts, said, strict=True)]
    looked, cache = draft(PAIR, prompts, Lookup())
    assert looked.tokens.tolist() == pairs.greedy(pairs.random_target(PAIR), prompts, K)
    assert int(looked.num_passes[0]) < K
    assert min(positions_written(cache)) > len(prompts[0]) + K - 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(prompts=st.tuples(*[tokens] * ROWS), pair=st.integers(0, 3))
def test_lookup_changes_no_draft_token(prompts: tuple[list[int], ...], pair: int) -> None:
    looked, _ = draft(pair, prompts, Lookup())
    assert looked.tokens.tolist() == pairs.greedy(pairs.random_target(pair), prompts, K)
    assert 1 <= int(looked.num_passes[0]) <= K


@pytest.mark.parametrize("lookup", [None, Lookup(max_ngram=1, num_speculative_tokens=3)])
def test_logits_are_those_the_draft_was_drawn_from(lookup: Lookup | None) -> None:
    """Also for rows that are ahead of others: acceptance divides by these probabilities."""
    prompts = [[1] * 20, [2, 3] * 8, [5, 6, 9, 11]]
    widened = False
    for seed in range(4):
        seen, cache = draft(0, prompts, lookup, Sampling(0.25), seed)
        assert seen.logits is not None
        widened |= positions_written(cache) != [len(prompt) + K - 1 for prompt in prompts]
        for row, prompt in enumerate(prompts):
            text = [*prompt, *seen.tokens[row].tolist()]
            expected = pairs.logits_after(pairs.random_target(0), text)[len(prompt) - 1 : -1]
            np.testing.assert_allclose(seen.logits[row], expected, rtol=1e-4, atol=1e-4)
    assert widened == (lookup is not None)


TEXT = [[int(x) for x in np.random.default_rng(row).integers(0, 48, 20 + row)] for row in range(3)]
PADDED, LENGTH = pairs.padded(TEXT, 64)
COUNT = 10
TOP, NEAR, USELESS = 0.2, 0.6, 10.0  # noises of drafts
SIZES = (4, 2)  # of what the levels below propose


def levels_draft(
    *noises: float, valid: Array = LENGTH, sampling: Sampling | None = None, margin: float = 0.0
) -> Draft:
    """What is drafted when the levels below have seen no more than `valid` tokens of each row."""
    models = [pairs.random_draft(1, noise) for noise in noises]
    sizes = SIZES[: len(noises) - 1]
    static = RoundStatic(COUNT, level_speculative_tokens=sizes, level_margin=margin)
    known = [LENGTH, *[valid] * len(sizes)]
    terms = Terms(None, sampling, pairs.keys_from(3, ROWS))
    return drafted(drafter_of(models, static), PADDED, LENGTH, known, terms, beyond=7.0)[0]


@pytest.mark.parametrize("sampling", [None, Sampling(np.full(ROWS, 0.9, np.float32))])
def test_agreeing_levels_save_passes_and_noise_changes_nothing(sampling: Sampling | None) -> None:
    """K = 10 takes one pass to catch up, and one for every four that are confirmed and one more."""
    alone = levels_draft(TOP, sampling=sampling)
    if sampling is None:
        assert alone.tokens.tolist() == pairs.greedy(pairs.random_draft(1, TOP), TEXT, 10)
    perfect, noise = (levels_draft(TOP, below, sampling=sampling) for below in (TOP, USELESS))
    assert alone.tokens.tolist() == perfect.tokens.tolist() == noise.tokens.tolist()
    # Four passes for four tokens, three for the three that are left to propose.
    assert [alone.num_passes.tolist(), perfect.num_passes.tolist()] == [[10], [3, 4 + 3]]
    assert int(noise.num_passes[0]) > 6


@pytest.mark.parametrize("seen", [0, 5, 18])
def test_a_level_that_was_not_asked_for_long_catches_up(seen: int) -> None:
    """And is as good as one that was, or the level above would confirm nothing."""
    found = levels_draft(TOP, TOP, TOP, valid=np.minimum(seen, LENGTH))
    assert found.tokens.tolist() == pairs.greedy(pairs.random_draft(1, TOP), TEXT, COUNT)
    assert int(found.num_passes[0]) == 3


def test_a_level_below_that_rests_forgets_what_was_refused() -> None:
    """Whatever it had read of padding, or of drafts, is no text when it is asked again."""
    static = RoundStatic(COUNT, level_speculative_tokens=(4,))
    drafter = drafter_of([pairs.random_draft(1, TOP), pairs.random_draft(1, NEAR)], static)
    rest = Terms(np.zeros(ROWS, int))

    @jax.jit
    def rested() -> Any:
        state = pairs.state_after(drafter, PADDED, [LENGTH, LENGTH + 9], 0.0)
        return drafter.propose(state, PADDED, LENGTH, COUNT, rest)[1]

    state = rested()
    np.testing.assert_array_equal(state.below.cache.length, LENGTH - 1)


def by_hand(text: list[int], margin: float) -> list[int]:
    """What two levels draft with a margin, one token at a time."""
    top, below = (pairs.random_draft(1, noise) for noise in (TOP, NEAR))

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


def test_a_margin_drafts_what_a_level_below_proposes_nearly_as_well() -> None:
    found, own = levels_draft(TOP, NEAR, margin=4.0), levels_draft(TOP, NEAR)
    assert found.tokens.tolist() == [by_hand(text, 4.0) for text in TEXT] != own.tokens.tolist()
    assert int(found.num_passes[0]) < int(own.num_passes[0])


def test_a_margin_leaves_drawn_rows_alone() -> None:
    mixed = Sampling(np.float32([0.0, 0.9, 0.9]))
    expected, found, greedy = (
        levels_draft(TOP, NEAR, sampling=sampling, margin=margin).tokens.tolist()
        for sampling, margin in ((mixed, 0.0), (mixed, 4.0), (None, 4.0))
    )
    assert found[1:] == expected[1:]
    assert found[0] == greedy[0] != expected[0]


def test_what_is_refused() -> None:
    """What proposes nothing, wrong numbers of levels, and wrong depths."""
    assert_refused("prompt_lookup_min is 0", Lookup, min_ngram=0)
    assert_refused("n-grams of 9 to 8 tokens", Lookup, min_ngram=9)
    assert_refused("prompt_lookup_tokens is 0", Lookup, num_speculative_tokens=0)
    assert_refused("without a draft model or a lookup", pairs.pair_engine, PAIR, ROUND, rows=1)
    spec = pairs.rounds(4)
    assert_refused("2 draft models were given", pairs.pair_engine, 1, spec, TOP, TOP)
    assert_refused("at least 1 token", spec.with_static, level_speculative_tokens=(4, 0))
    other = Llama.random(dataclasses.replace(pairs.CONFIG, vocab_size=50), jax.random.key(0))
    spec = spec.with_static(level_speculative_tokens=(4,))
    assert_refused("A draft model has 50 tokens", pairs.pair_engine, 1, spec, TOP, other)
    for depths in ((3, 2), (2, 2, 6), (-1, 6), (2, 4)):
        assert_refused("depths", RoundStatic, 6, depths=depths)
