from __future__ import annotations

import pytest
from tiny_pair import write_pair

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.engine.batch import generate
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.compare import Comparison, RuleResult, compare
from fly_jax.verification.rules import Fly

PROMPTS = ["Ada has 3 apples", "Boris", "Vera's 12"]


COMPARISON = Comparison(
    (
        RuleResult("autoregressive", num_tokens=200, seconds=4.0, num_rounds=200, num_checked=10,
               num_correct=8),
        RuleResult("fly", num_tokens=300, seconds=2.0, num_rounds=50, num_rescued_tokens=6,
               num_checked=10, num_correct=6),
    )
)  # fmt: skip


def test_figures() -> None:
    base, fly = COMPARISON.results
    assert (COMPARISON.speed_up(base), COMPARISON.speed_up(fly)) == (1, 3)
    assert COMPARISON.retention(fly) == pytest.approx(0.75)
    figures = {"speed_up": 3, "retention": pytest.approx(0.75), "num_rescued_tokens": 6}
    assert COMPARISON.to_dict()["fly"].items() >= figures.items()
    assert (fly.tokens_per_second, fly.mean_accepted_tokens) == (150, 6)
    assert (fly.rescued_per_100_tokens, fly.accuracy) == (2, 0.6)


def test_nothing_to_check() -> None:
    unchecked = Comparison((RuleResult("a"), RuleResult("b")))
    assert unchecked.retention(unchecked.results[1]) is None
    hopeless = Comparison(
        (RuleResult("a", num_checked=3), RuleResult("b", num_checked=3, num_correct=1))
    )
    assert hopeless.retention(hopeless.results[1]) is None
    assert "0/3" in hopeless.table()


def test_table_is_aligned() -> None:
    lines = COMPARISON.table().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "autoregressive 50.0 1.00x 1.00 0 0.0 8/10 100.0%",
        "fly 150.0 3.00x 6.00 6 2.0 6/10 75.0%",
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return load_pair(target, draft, dtype="float32")


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
    accounts = generate(
        pair, PROMPTS, rule=Fly(window_size=2), num_speculative_tokens=4, max_new_tokens=16
    )
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


def test_no_prompt(pair: Pair) -> None:
    with pytest.raises(FlyJaxError, match="at least one"):
        compare(pair, [])
