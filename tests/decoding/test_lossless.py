"""`Exact` is autoregressive decoding: for any draft, batch, K, lookup and dispatch."""

from __future__ import annotations

import pytest
import random_pairs as pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_jax import Exact, FlyJaxError, Generation, Lookup, RequestState, Why
from fly_jax.decoding.config import RoundSpec, RoundStatic

EARLIEST, SHORT = Lookup(match="earliest", num_tokens=3), Lookup(num_tokens=3)
# Specification and rows; what else changes from case to case is not static.
PROGRAMS = {
    "autoregressive": (pairs.SPECS["autoregressive"], 3),
    "one token": (RoundSpec(Exact(), RoundStatic(1, None, pairs.EOS)), 1),
    "five tokens": (pairs.SPECS["exact"], 3),
    "lookup, three rounds": (pairs.SPECS["lookup"].with_static(rounds_per_dispatch=3), 3),
    "lookup, earliest": (RoundSpec(Exact(), RoundStatic(9, EARLIEST, pairs.EOS)), 2),
    "depths": (pairs.SPECS["depths"], 3),
    "depths, lookup": (RoundSpec(Exact(), RoundStatic(6, SHORT, pairs.EOS, depths=(2, 6))), 2),
}
ENDLESS = pairs.SPECS["exact"].with_static(eos_token_ids=())
# A small alphabet repeats itself, so that the lookup finds something.
tokens = st.integers(0, pairs.CONFIG.vocab_size - 1) | st.integers(0, 2)
prompts_lists = st.lists(st.lists(tokens, min_size=1, max_size=16), min_size=1, max_size=5)


def decode(
    program: str, prompts: list[list[int]], limit: int, *, pair: int = 0, noise: float
) -> list[Generation]:
    spec, rows = PROGRAMS[program]
    return pairs.pair_engine(pair, spec, noise, rows=rows).generate(prompts, limit)


@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    pair=st.integers(0, 3),
    noise=st.sampled_from(pairs.NOISES),
    prompts=prompts_lists,
    max_new_tokens=st.integers(1, pairs.MOST_TOKENS),
)
def test_equals_one_token_at_a_time(
    program: str, pair: int, noise: float, prompts: list[list[int]], max_new_tokens: int
) -> None:
    expected = pairs.autoregressive(pairs.random_target(pair), prompts, max_new_tokens)
    generations = decode(program, prompts, max_new_tokens, pair=pair, noise=noise)
    assert [row.token_ids for row in generations] == expected
    for row, prompt in zip(generations, prompts, strict=True):
        assert list(row.prompt_token_ids) == prompt
        assert row.finish_reason == ("stop" if row.token_ids[-1] in pairs.EOS else "length")
        assert not any(token in pairs.EOS for token in row.token_ids[:-1])


@pytest.mark.parametrize("program", ["five tokens", "lookup, three rounds"])
def test_agreement_spans_everything_and_shortens_decoding(program: str) -> None:
    """The cases above mean something: drafts from perfect to useless, and text that differs."""
    prompts = [[token] for token in range(24)]
    mean = []
    for noise in pairs.NOISES:
        rows = decode(program, prompts, pairs.MOST_TOKENS, noise=noise)
        mean.append(sum(len(row.token_ids) for row in rows) / sum(row.num_rounds for row in rows))
        assert len({tuple(row.token_ids) for row in rows}) > 12
    assert mean == sorted(mean, reverse=True)
    assert mean[0] > 3
    assert mean[-1] < 1.3
    assert {row.finish_reason for row in rows} == {"stop", "length"}


def test_end_of_text_inside_a_block_ends_the_row() -> None:
    prompts = [[token, 3, token] for token in range(24)]
    engine = pairs.pair_engine(1, pairs.SPECS["exact"], 0.0)
    inside, done = 0, list[RequestState]()
    for state, settled in engine.run(engine.requests(prompts, pairs.MOST_TOKENS)):
        account = state.generation
        assert state not in done, "a row goes on after its end"
        assert tuple(account.token_ids[-len(settled.token_ids) :]) == settled.token_ids
        if settled.finish_reason is None:
            continue
        done.append(state)
        assert settled.finish_reason == account.finish_reason
        if settled.finish_reason == "stop":
            assert settled.token_ids[-1] in pairs.EOS
            inside += settled.why[-1] == Why.MATCHED
        else:
            assert len(account.token_ids) == pairs.MOST_TOKENS
    assert sorted(list(state.request.prompt) for state in done) == prompts
    assert inside > 0


def test_a_limit_that_cuts_a_block_is_kept() -> None:
    prompts = [[5], [9, 9], [1, 2, 3]]
    engine = pairs.pair_engine(2, ENDLESS, 0.0)
    whole = engine.generate(prompts, 16)
    assert [row.num_rounds for row in whole] == [3, 3, 3]  # 6 tokens a round, the last one cut
    for limit in (1, 5, 7):
        rows = engine.generate(prompts, limit)
        assert [row.token_ids for row in rows] == [row.token_ids[:limit] for row in whole]
        assert {row.finish_reason for row in rows} == {"length"}


def test_a_row_ends_where_the_context_does() -> None:
    context = pairs.CONFIG.max_context
    engine = pairs.pair_engine(2, ENDLESS, 0.0, max_length=context)
    prompt = list(range(40)) * 15
    (row,) = engine.generate([prompt[: context - 3]], 10)
    assert len(row.token_ids) == 3
    assert row.finish_reason == "length"
    with pytest.raises(FlyJaxError, match="context"):
        engine.generate([prompt[:context]], 10)
