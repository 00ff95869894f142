"""Whatever proposes: the lookup alone, and drafters that the package does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from jaxtyping import Array

from fly_jax import Draft, Drafter, DraftModel, FlyJaxError, Generation, Lookup, Sampling, Verdict
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.state import DecodeState
from fly_jax.engine import engine
from fly_jax.verification.rules import Budget, Exact, Fly

PAIR = 2  # the pair that repeats itself most
K = 5
PROMPTS = [[7, 3, 7], [6, 3, 6, 3, 6, 3], [4], [9, 8, 9, 8, 9], [1, 2, 1, 2]]
SPECS = {
    "fixed": pairs.SPECS["lookup"],
    "depths": pairs.SPECS["lookup"].with_static(depths=(2, K), rounds_per_dispatch=2),
    "defer": RoundSpec(
        Budget(Fly(0.0, 2), 0.0),
        RoundStatic(K, Lookup(), pairs.EOS, deferred_window=2, rounds_per_dispatch=2),
    ),
}


def decode(
    spec: RoundSpec, drafter: Drafter | None = None, prompts: Sequence[Sequence[int]] = PROMPTS,
    limit: int = pairs.MOST_TOKENS,
) -> list[Generation]:  # fmt: skip
    return pairs.batch_engine(pairs.random_target(PAIR), drafter, spec).generate(prompts, limit)


def expected(
    prompts: Sequence[Sequence[int]] = PROMPTS, limit: int = pairs.MOST_TOKENS
) -> list[list[int]]:
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
    num_tokens = 3
    may_fall_short = True

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> Memory:
        return Memory(jnp.tile(self.table, (rows, 1)), jnp.zeros(rows, jnp.int32))

    def propose(
        self, state: Memory, text: Array, length: Array, num_tokens: int, *,
        wanted: Array | None = None, sampling: Sampling | None = None, keys: Array | None = None,
    ) -> tuple[Draft, Memory]:  # fmt: skip
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)[:, 0]
        tokens = [last]
        for _ in range(num_tokens):
            known = jnp.take_along_axis(state.table, jnp.maximum(tokens[-1], 0)[:, None], axis=1)
            tokens.append(jnp.where(tokens[-1] < 0, -1, known[:, 0]))
        drafted = jnp.stack(tokens[1:], axis=1)
        count = jnp.sum(drafted >= 0, axis=1)
        count = count if wanted is None else jnp.minimum(count, wanted)
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
        drafter = DraftModel(draft.parameters(), given, config=pairs.CONFIG, num_tokens=K)
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
    num_tokens = 1
    needs_hidden = True

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> Pieces:
        empty = jnp.zeros((rows, pairs.CONFIG.embed_size), dtype)
        return Pieces(empty, empty, jnp.zeros(rows, jnp.int32))

    def prefill(self, state: Pieces, tokens: Array, start: Array, hidden: Array | None) -> Pieces:
        assert hidden is not None
        assert hidden.shape == (*tokens.shape, pairs.CONFIG.embed_size)
        return state._replace(prompt=state.prompt + jnp.sum(hidden, axis=1))

    def propose(
        self, state: Pieces, text: Array, length: Array, num_tokens: int, **how: Any
    ) -> tuple[Draft, Pieces]:
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        drafted = jnp.broadcast_to(last, (len(length), num_tokens))
        full = jnp.full_like(length, num_tokens)
        return Draft(drafted, None, full, jnp.zeros(0, jnp.int32)), state

    def observe(
        self, state: Pieces, verdict: Verdict, hidden: Array | None, *, draft: Draft, live: Array
    ) -> Pieces:
        rows, num_tokens = draft.tokens.shape
        assert hidden is not None
        assert hidden.shape == (rows, num_tokens + 1, pairs.CONFIG.embed_size)
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
