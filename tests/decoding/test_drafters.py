"""Whatever proposes: the lookup, against loops and alone, and drafters that nobody knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array

import fly_jax
from fly_jax import (
    Draft,
    Drafter,
    DraftModel,
    FlyJaxError,
    Generation,
    Lookup,
    Sampling,
    Terms,
    Verdict,
)
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.lookup import look_up
from fly_jax.decoding.state import DecodeState
from fly_jax.engine import engine
from fly_jax.verification.rules import Budget, Exact, Fly

PAIR, VARIED = 2, 3  # the pair that repeats itself most, and the one that does least
ROWS, CAPACITY = 3, 32
K = 5
LIMIT = pairs.MOST_TOKENS
Texts = Sequence[Sequence[int]]
PROMPTS = [[7, 3, 7], [6, 3, 6, 3, 6, 3], [4], [9, 8, 9, 8, 9], [1, 2, 1, 2]]
SPECS = {
    "fixed": pairs.SPECS["lookup"],
    "depths": pairs.SPECS["lookup"].with_static(depths=(2, K), rounds_per_dispatch=2),
    "defer": RoundSpec(
        Budget(Fly(0.0, 2), 0.0),
        RoundStatic(K, Lookup(), pairs.EOS, deferred_window=2, rounds_per_dispatch=2),
    ),
}


LOOKUPS = [
    Lookup(),
    Lookup(match="earliest"),
    Lookup(max_ngram=3, min_ngram=2, num_speculative_tokens=2, match="earliest"),
    Lookup(max_ngram=1, num_speculative_tokens=40),
]
find = jax.jit(look_up, static_argnums=(0, 3))


def looked_up(lookup: Lookup, text: Sequence[int]) -> list[int]:
    """Prompt lookup, from its definition: sizes downwards, then places in order."""
    for size in range(lookup.max_ngram, lookup.min_ngram - 1, -1):
        if size > len(text):
            continue
        places = range(len(text) - size)
        for place in places if lookup.match == "earliest" else reversed(places):
            if text[place : place + size] == text[-size:]:
                return list(text[place + size :][: lookup.num_speculative_tokens])
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
    tokens, found = find(lookup, text, lengths, lookup.num_speculative_tokens)
    tokens, found = np.asarray(tokens), np.asarray(found)
    assert tokens.shape == (ROWS, lookup.num_speculative_tokens)
    for index, row in enumerate(rows):
        assert tokens[index, : int(found[index])].tolist() == looked_up(lookup, row)


@pytest.mark.parametrize(
    "wrong", [{"min_ngram": 0}, {"min_ngram": 5}, {"num_speculative_tokens": 0}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(FlyJaxError):
        Lookup(**wrong)


@jax.jit
def drafted(
    drafter: DraftModel, text: Array, length: Array, keys: Array, sampling: Sampling | None = None
) -> tuple[Draft, fly_jax.KVCache]:
    # Nothing of the future, so that what a pass writes can be seen.
    state = pairs.state_after(drafter, text, [length - 1], beyond=0.0)
    draft, state = drafter.propose(state, text, length, K, Terms(None, sampling, keys))
    return draft, state.cache


def draft(
    pair: int, texts: Texts, lookup: Lookup | None, sampling: Sampling | None = None, seed: int = 0
) -> tuple[Draft, fly_jax.KVCache]:
    assert len(texts) == ROWS
    model = pairs.random_target(pair)
    drafter = DraftModel(model.parameters(), lookup, config=pairs.CONFIG, num_speculative_tokens=K)
    return drafted(drafter, *pairs.padded(texts, 64), pairs.keys_from(seed, ROWS), sampling)


def without_repeats() -> list[list[int]]:
    """Prompts that go on, in the model's own words, without a token that was there before."""
    prompts = [[token, (7 * token + 5) % 48] for token in range(pairs.CONFIG.vocab_size)]
    said = pairs.greedy(pairs.random_target(VARIED), prompts, K)
    begun = zip(prompts, said, strict=True)
    return [prompt for prompt, new in begun if len({*prompt, *new}) == 2 + K][:ROWS]


def positions_written(cache: fly_jax.KVCache) -> list[int]:
    written = np.any(np.asarray(cache.keys) != 0, axis=(0, 2, 4))
    return [int(np.flatnonzero(row)[-1]) + 1 for row in written]


def test_a_lookup_that_finds_nothing_costs_nothing() -> None:
    prompts = without_repeats()
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
@given(
    prompts=st.tuples(
        *[st.lists(st.integers(0, 2) | st.integers(0, 47), min_size=1, max_size=24)] * ROWS
    ),
    pair=st.integers(0, 3),
)
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


def decode(
    spec: RoundSpec, drafter: Drafter | None = None, prompts: Texts = PROMPTS, limit: int = LIMIT
) -> list[Generation]:
    return pairs.batch_engine(pairs.random_target(PAIR), drafter, spec).generate(prompts, limit)


def expected(prompts: Texts = PROMPTS, limit: int = LIMIT) -> Texts:
    return pairs.autoregressive(pairs.random_target(PAIR), prompts, limit)


@pytest.mark.parametrize("name", SPECS)
def test_a_lookup_alone_is_plain_decoding(name: str) -> None:
    rows = decode(SPECS[name])
    assert [row.token_ids for row in rows] == expected()
    tokens = sum(len(row.token_ids) for row in rows)
    assert tokens / sum(row.num_rounds for row in rows) > 1.2
    assert all(row.num_draft_passes == 0 for row in rows)
    drafted = sum(row.num_draft_tokens for row in rows)
    assert 0 < sum(row.num_accepted_tokens for row in rows) < drafted


def test_where_nothing_is_found_nothing_is_drafted() -> None:
    prompts = [[1, 2, 3], [9], [4, 5]]
    rows = decode(SPECS["fixed"], None, prompts, 1)
    assert [row.token_ids for row in rows] == expected(prompts, 1)
    assert [(row.num_rounds, row.num_draft_tokens) for row in rows] == [(1, 0)] * 3
    (found,) = decode(SPECS["fixed"], None, [[1, 2, 3, 1]], 1)
    assert found.num_draft_tokens == 3


def test_nothing_that_proposes_is_refused() -> None:
    with pytest.raises(FlyJaxError, match="without a draft model or a lookup"):
        pairs.batch_engine(pairs.random_target(PAIR), None, RoundSpec(Exact(), RoundStatic(K)), 1)


class Memory(NamedTuple):
    """What `Table` has learnt of each row, and the token that its last draft followed."""

    table: Array
    last: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table(Drafter):
    """Proposes what stands in a table of next tokens, -1 for unknown; learns every correction."""

    table: Array
    num_speculative_tokens = 3
    may_fall_short = True

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> Memory:
        return Memory(jnp.tile(self.table, (rows, 1)), jnp.zeros(rows, jnp.int32))

    def propose(
        self, state: Memory, text: Array, length: Array, num_speculative_tokens: int, terms: Terms
    ) -> tuple[Draft, Memory]:
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)[:, 0]
        tokens = [last]
        for _ in range(num_speculative_tokens):
            known = jnp.take_along_axis(state.table, jnp.maximum(tokens[-1], 0)[:, None], axis=1)
            tokens.append(jnp.where(tokens[-1] < 0, -1, known[:, 0]))
        drafted = jnp.stack(tokens[1:], axis=1)
        count = jnp.minimum(
            jnp.sum(drafted >= 0, axis=1), terms.of_each(length, num_speculative_tokens)
        )
        draft = Draft(jnp.maximum(drafted, 0), None, count, jnp.zeros(0, jnp.int32))
        return draft, Memory(state.table, last)

    def observe(
        self, state: Memory, verdict: Verdict, hidden: Array | None, *, draft: Draft, live: Array
    ) -> Memory:
        block = jnp.concatenate((state.last[:, None], draft.tokens), axis=1)
        before = jnp.take_along_axis(block, verdict.num_accepted[:, None], axis=1)[:, 0]
        rows = jnp.arange(len(before))
        learnt = state.table.at[rows, before].set(verdict.next_token)
        return Memory(jnp.where(live[:, None], learnt, state.table), state.last)


@pytest.mark.parametrize("below", [False, True])
def test_a_drafter_of_ones_own(below: bool) -> None:
    """Alone or below a draft model, it changes how long decoding takes, and nothing else."""
    drafter: Drafter = Table(jnp.full(pairs.CONFIG.vocab_size, -1, jnp.int32))
    if below:
        draft = pairs.random_draft(PAIR, 0.2)
        given = dataclasses.replace(drafter, table=_next_tokens())  # type: ignore[call-arg]
        drafter = DraftModel(
            draft.parameters(), given, config=pairs.CONFIG, num_speculative_tokens=K
        )
    spec = RoundSpec(Exact(), RoundStatic(K, None, pairs.EOS))
    rows = decode(spec, drafter)
    assert [row.token_ids for row in rows] == expected()
    assert sum(row.num_accepted_tokens for row in rows) > 0
    drafted = sum(row.num_draft_tokens for row in rows)
    if below:
        assert drafted == K * sum(row.num_rounds for row in rows)
        assert sum(row.num_draft_passes for row in rows) < drafted
    else:
        assert 0 < drafted < K * sum(row.num_rounds for row in rows)


def _next_tokens() -> Array:
    """The last token that the target has said after each, in texts after the prompts."""
    table = np.full(pairs.CONFIG.vocab_size, -1, np.int32)
    for prompt, new in zip(PROMPTS, expected(), strict=True):
        text = [*prompt, *new]
        table[text[:-1]] = text[1:]
    return jnp.asarray(table)


class Pieces(NamedTuple):
    """What `Echo` has been given."""

    prompt: Array  # the sum of the prompt's hidden states
    hidden: Array  # that of the token that the last verdict ended the draft after
    wrong: Array  # rounds in which the target would not have said the next token after that state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Echo(Drafter):
    """Reads the next token off the target's own hidden state, and proposes it again and again."""

    unembedding: Array
    num_speculative_tokens = 1
    needs_hidden = True

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> Pieces:
        empty = jnp.zeros((rows, pairs.CONFIG.embed_size), dtype)
        return Pieces(empty, empty, jnp.zeros(rows, jnp.int32))

    def prefill(self, state: Pieces, tokens: Array, start: Array, hidden: Array | None) -> Pieces:
        assert hidden is not None
        assert hidden.shape == (*tokens.shape, pairs.CONFIG.embed_size)
        return state._replace(prompt=state.prompt + jnp.sum(hidden, axis=1))

    def propose(
        self, state: Pieces, text: Array, length: Array, num_speculative_tokens: int, terms: Terms
    ) -> tuple[Draft, Pieces]:
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        drafted = jnp.broadcast_to(last, (len(length), num_speculative_tokens))
        full = jnp.full_like(length, num_speculative_tokens)
        return Draft(drafted, None, full, jnp.zeros(0, jnp.int32)), state

    def observe(
        self, state: Pieces, verdict: Verdict, hidden: Array | None, *, draft: Draft, live: Array
    ) -> Pieces:
        rows, num_speculative_tokens = draft.tokens.shape
        assert hidden is not None
        assert hidden.shape == (rows, num_speculative_tokens + 1, pairs.CONFIG.embed_size)
        own = jnp.take_along_axis(hidden, verdict.num_accepted[:, None, None], axis=1)[:, 0]
        wrong = jnp.argmax(own @ self.unembedding, axis=-1) != verdict.next_token
        return Pieces(state.prompt, own, state.wrong + (wrong & live))


def test_a_drafter_is_given_the_targets_hidden_states(
    monkeypatch: pytest.MonkeyPatch, dispatches: list[tuple[DecodeState, DecodeState]]
) -> None:
    """Those of prompts, of all pieces, and of each block."""
    monkeypatch.setattr(engine, "OFFLINE_PREFILL_TOKENS", 16)
    target = pairs.random_target(PAIR)
    drafter = Echo(target.parameters()["unembedding"])
    prompts = [*PROMPTS[:2], [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3]
    spec = RoundSpec(Exact(), RoundStatic(3, None, pairs.EOS))
    rows = decode(spec, drafter, prompts)
    assert [row.token_ids for row in rows] == expected(prompts)
    assert len(dispatches) > 5
    last = jax.device_get(dispatches[-1][1].drafter)
    assert not np.any(last.wrong)  # in any round
    assert np.any(last.hidden != 0)
    assert np.all(np.any(last.prompt != 0, axis=1))
