from __future__ import annotations

import pytest
from refusals import assert_refused

from fly_jax import DecodingConfig, Pair, generate
from fly_jax.evaluation.compare import Comparison, RuleResult, compare

PROMPTS = ["Ada has 3 apples", "Boris", "Vera's 12"]


FLY = RuleResult("fly", 300, 2.0, 50, num_rescued_tokens=6, num_checked=10, num_correct=6)
PLAIN = RuleResult("autoregressive", 200, 4.0, num_rounds=200, num_checked=10, num_correct=8)
COMPARISON = Comparison((PLAIN, FLY))


def test_figures() -> None:
    assert (COMPARISON.speed_up(PLAIN), COMPARISON.speed_up(FLY)) == (1, 3)
    assert COMPARISON.retention(FLY) == pytest.approx(0.75)
    figures = {"speed_up": 3, "retention": pytest.approx(0.75), "num_rescued_tokens": 6}
    assert COMPARISON.to_dict()["fly"].items() >= figures.items()
    assert (FLY.tokens_per_second, FLY.mean_accepted_tokens) == (150, 6)
    assert (FLY.rescued_per_100_tokens, FLY.accuracy) == (2, 0.6)


def test_nothing_to_check() -> None:
    unchecked, fly = RuleResult("b"), RuleResult("b", num_checked=3, num_correct=1)
    assert Comparison((RuleResult("a"), unchecked)).retention(unchecked) is None
    hopeless = Comparison((RuleResult("a", num_checked=3), fly))
    assert hopeless.retention(fly) is None
    assert "0/3" in hopeless.table()


def test_table_is_aligned() -> None:
    lines = COMPARISON.table().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "autoregressive 50.0 1.00x 1.00 0 0.0 8/10 100.0%",
        "fly 150.0 3.00x 6.00 6 2.0 6/10 75.0%",
    ]


def test_rules_decode_the_same_prompts(pair: Pair) -> None:
    asked: list[tuple[int, str]] = []

    def check(index: int, text: str) -> bool | None:
        asked.append((index, text))
        return None if index == 2 else index == 0

    config = DecodingConfig(rule="fly", window_size=2, num_speculative_tokens=4)
    configs = {one.rule: one for one in config.side_by_side()}
    comparison = compare(pair, PROMPTS, configs, max_new_tokens=16, batch_size=2, check=check)
    plain, exact, fly = comparison.results
    assert plain.texts == exact.texts
    accounts = generate(pair, PROMPTS, config=config, max_new_tokens=16)
    assert fly.texts == tuple(pair.tokenizer.decode(one.token_ids) for one in accounts)
    assert fly.num_tokens == sum(len(one.token_ids) for one in accounts)
    assert fly.num_rounds == sum(one.num_rounds for one in accounts)
    assert fly.num_rescued_tokens == sum(one.num_rescued_tokens for one in accounts)
    assert plain.num_rounds == plain.num_tokens
    assert exact.num_rounds < exact.num_tokens
    assert [index for index, _ in asked] == [0, 1, 2] * 3
    for one in comparison.results:
        assert (one.num_correct, one.num_checked) == (1, 2)
        assert one.seconds > 0
        assert comparison.retention(one) == 1
    assert_refused("at least one", compare, pair, [])
