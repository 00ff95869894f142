"""A row is decoded as if it were alone: its draws, its rule and its sampling are its own."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from fly_jax.decoding.decoder import Decoder
from random_pairs import CAPACITY, EOS, random_draft, random_target

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.generation import Generation
from fly_jax.decoding.spec import RoundSpec
from fly_jax.verification.rules import Budget, Exact, Fly, Margin, Rule, per_row
from fly_jax.verification.sampling import Sampling, sampling_per_row

PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5], [8, 9, 7]]
SEEDS = [11, 5, 3, 2**40]
MAX_NEW_TOKENS = 24
SAMPLED = RoundSpec(Exact(), 4, Lookup(), EOS, sampling=Sampling(0.9, top_p=0.95))


def decoder_for(spec: RoundSpec, rows: int = len(PROMPTS)) -> Decoder:
    return Decoder(random_target(2), random_draft(2, 0.2), spec, capacity=CAPACITY, batch_size=rows)


@functools.cache
def sampled() -> list[list[int]]:
    rows = decoder_for(SAMPLED).decode(PROMPTS, MAX_NEW_TOKENS, seed=SEEDS)
    return [row.token_ids for row in rows]


def test_draws_depend_on_the_prompts_own_seed_alone() -> None:
    decoder = decoder_for(SAMPLED)
    for order in ([3, 0, 2, 1], [1, 3], [0], [1], [2], [3]):
        found = decoder.decode(
            [PROMPTS[row] for row in order], MAX_NEW_TOKENS, seed=[SEEDS[row] for row in order]
        )
        assert [row.token_ids for row in found] == [sampled()[row] for row in order]
    other = decoder.decode(PROMPTS, MAX_NEW_TOKENS, seed=[seed + 1 for seed in SEEDS])
    assert all(row.token_ids != tokens for row, tokens in zip(other, sampled(), strict=True))


def test_equal_prompts_share_no_noise() -> None:
    rows = decoder_for(SAMPLED).generate([[3, 1, 4]] * 8, 8, seed=1)
    assert len({tuple(row.token_ids) for row in rows}) > 4


def test_the_seed_of_a_prompt_is_that_of_its_place() -> None:
    """In whichever batch it is decoded: a long prompt, that has a batch of its own, between."""
    decoder = decoder_for(SAMPLED)
    seven = [*PROMPTS, *PROMPTS[:3]]
    found = decoder.generate(seven, MAX_NEW_TOKENS, seed=20)
    alone = [
        decoder.decode([prompt], MAX_NEW_TOKENS, seed=20 + index)[0]
        for index, prompt in enumerate(seven)
    ]
    assert [row.token_ids for row in found] == [row.token_ids for row in alone]


RULES: list[tuple[Rule, Sampling | None]] = [
    (Exact(), None),
    (Fly(0.2, 2), None),
    (Margin(gap=3.0), Sampling(0.8, top_k=20)),
    (Budget(Fly(0.1, 1) | Margin(gap=1.0), 4.0), Sampling(1.1, top_p=0.9)),
]


def test_each_row_has_a_rule_and_a_sampling_of_its_own() -> None:
    def account(row: Generation) -> tuple[object, ...]:
        return row.token_ids, row.why, row.num_rounds, row.num_rescued_tokens, row.finish_reason

    def spec(rule: Rule, sampling: Sampling | None) -> RoundSpec:
        return RoundSpec(rule, 4, None, EOS, sampling=sampling, rounds_per_dispatch=2)

    rules, samplings = zip(*RULES, strict=True)
    together = decoder_for(spec(per_row(rules), sampling_per_row(samplings)))
    alone = [decoder_for(spec(rule, sampling), rows=1) for rule, sampling in RULES]
    rescued = np.zeros(len(RULES), int)
    for first in (0, 20):
        prompts = [[first + row, *prompt] for row, prompt in enumerate(PROMPTS)]
        seeds = list(range(first, first + len(prompts)))
        found = together.decode(prompts, MAX_NEW_TOKENS, seed=seeds)
        for row, decoder in enumerate(alone):
            (expected,) = decoder.decode([prompts[row]], MAX_NEW_TOKENS, seed=[seeds[row]])
            assert account(found[row]) == account(expected)
            regrets = (found[row].regret, expected.regret)
            assert [one is None for one in regrets] == [row != 3] * 2
            if row == 3:  # a sum, which other shapes round differently
                assert regrets[0] == pytest.approx(regrets[1], rel=1e-5)
            rescued[row] += found[row].num_rescued_tokens
    assert rescued[0] == 0
    assert np.all(rescued[1:] > 0)
