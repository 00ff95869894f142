"""Figures of decodings side by side, of paired verdicts, and what is chosen for a bound.

Judging recorded rounds gives what decoding gave; and which mismatches each strictness passes.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from refusals import assert_refused
from scipy.stats import binomtest
from tiny_pair import VOCAB_SIZE
from tqdm import tqdm

from fly_jax import Budget, Engine, Fly, Lookup, Margin, Pair, Rule, Typical, Why, generate
from fly_jax.decoding.config import DecodingConfig, load_config
from fly_jax.evaluation.answers import compare_paired, mcnemar, retention
from fly_jax.evaluation.calibration import Candidate, best, upper_bound
from fly_jax.evaluation.compare import Comparison, RuleResult, compare
from fly_jax.evaluation.replay import Rounds, record, replay, tally
from fly_jax.evaluation.strictness import CALIBRATED, as_toml, strictness_of

PROMPTS = ["Ada has 3 apples", "Boris", "Vera's 12"]
FLY = RuleResult("fly", 300, 2.0, 50, 0, 0, 6, num_checked=10, num_correct=6, prefill_seconds=1.0)
PLAIN = RuleResult("autoregressive", 200, 4.0, num_rounds=200, num_checked=10, num_correct=8)
COMPARISON = Comparison((PLAIN, FLY))


def test_figures() -> None:
    assert COMPARISON.retention(FLY) == pytest.approx(0.75)
    figures = {"speed_up": 3, "retention": pytest.approx(0.75), "num_rescued_tokens": 6}
    assert COMPARISON.to_dict()["fly"].items() >= figures.items()
    assert (FLY.tokens_per_second, FLY.mean_accepted_tokens) == (150, 6)
    assert (FLY.rescued_per_100_tokens, FLY.accuracy) == (2, 0.6)
    # Where there is nothing to check.
    unchecked, fly = RuleResult("b"), RuleResult("b", num_checked=3, num_correct=1)
    assert Comparison((RuleResult("a"), unchecked)).retention(unchecked) is None
    hopeless = Comparison((RuleResult("a", num_checked=3), fly))
    assert hopeless.retention(fly) is None
    assert "0/3" in hopeless.table()
    lines = COMPARISON.table().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "autoregressive 50.0 1.00x 50.0 1.00 0 0.0 8/10 100.0%",
        "fly 150.0 3.00x 100.0 6.00 6 2.0 6/10 75.0%",
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


def test_no_turn_knows_the_answers_of_the_one_before(pair: Pair) -> None:
    alone = dataclasses.replace(pair, drafts=())
    given = {"num_speculative_tokens": 4, "prompt_lookup_max": 8, "prompt_lookup_earlier": 64}
    configs = {"exact": DecodingConfig(rule="exact", **given)}
    once, twice = (
        compare(alone, PROMPTS, configs, max_new_tokens=16, turns=turns).results[0]
        for turns in (1, 2)
    )
    assert twice.num_rounds == 2 * once.num_rounds < 2 * once.num_tokens
    configs = {"csd": DecodingConfig(rule="csd", num_speculative_tokens=4, csd_min_count=1)}
    once, twice = (
        compare(pair, [*PROMPTS] * 2, configs, max_new_tokens=16, turns=turns).results[0]
        for turns in (1, 2)
    )
    assert twice.num_rounds == 2 * once.num_rounds
    assert twice.num_rescued_tokens == 2 * once.num_rescued_tokens > 0


def test_the_laxer_the_bound_the_more_is_promised() -> None:
    rng = np.random.default_rng(0)
    found = [Candidate(DecodingConfig(), *rng.random(2)) for _ in range(200)]
    promised = []
    for limit in np.linspace(0, 1, 30):
        chosen, within = best(found, limit), [one for one in found if one.rate <= limit]
        assert chosen in (within or [None])
        if chosen is not None:
            promised.append(chosen.mean_accepted_tokens)
    assert promised == sorted(promised)
    assert len(set(promised)) > 2
    same = [Candidate(DecodingConfig(), rate, 5.0) for rate in (0.3, 0.1, 0.2)]
    assert best(same, 1.0) == same[1]


def test_the_upper_bound_is_that_of_prompts_drawn_anew() -> None:
    tokens = np.full(40, 50)
    assert upper_bound(np.full(40, 2), tokens) == pytest.approx(0.04)
    rescues = np.repeat([0, 4], 20)
    spread = upper_bound(rescues, tokens)
    # Of a mean of 40 draws with standard deviation 2: 1.645 * 2 / sqrt(40) = 0.52 above 2.
    assert spread == pytest.approx((2 + 0.52) / 50, rel=0.03)
    assert upper_bound(rescues, tokens, confidence=0.99) > spread


def test_a_config_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = DecodingConfig(
        rule="typical", typical_delta=1e-5, protect=("\\d", '"'), csd_online=False, memory="ä.npz"
    )
    path = tmp_path / "config.toml"
    path.write_text(as_toml(config, ["typical_delta"], "a command\n\nand two\nlines"))
    assert load_config(path) == config
    assert path.read_text().startswith("# a command\n#\n# and two\n# lines\n")


def _verdicts(both: int, lost: int, gained: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = (both, lost, gained, neither)
    base, other = np.repeat([True, True, False, False], sizes), np.repeat([1, 0, 1, 0], sizes)
    return base, other.astype(bool)


def test_retention() -> None:
    kept, low, high = retention(*_verdicts(70, 10, 5, 15)) or (0.0, 0.0, 0.0)
    assert kept == pytest.approx(75 / 80)
    assert low < kept < high
    assert retention(*_verdicts(0, 0, 3, 3)) is None


def test_mcnemar_and_tango() -> None:
    assert mcnemar(0, 0) == 1
    for gained, lost in ((3, 3), (1, 9), (40, 12)):
        assert mcnemar(gained, lost) == pytest.approx(binomtest(gained, gained + lost).pvalue)
    # With no item changed the limit is z^2 / (n + z^2).
    for number, verdict in ((380, "undecided"), (381, "not worse")):
        assert compare_paired(*_verdicts(number, 0, 0, 0), 1.0)["verdict"] == verdict
    compare_paired(*_verdicts(98, 4, 0, 0), 2.0)  # where rounding makes a square root's number < 0
    assert compare_paired(*_verdicts(50, 50, 0, 0), 1.0)["verdict"] == "worse"


def test_items_to_decide() -> None:
    found = compare_paired(*_verdicts(96, 2, 2, 0), 1.0)
    # The deviation if they are equally good, and the one of shares that fit a loss of the margin.
    deviations = 0.8416 * math.sqrt(0.04) + 1.96 * math.sqrt(0.04217)
    assert found["items_to_decide"] == pytest.approx((deviations / 0.01) ** 2, rel=1e-3)
    many = compare_paired(*_verdicts(9600, 240, 170, 0), 1.0)
    assert many["verdict"] == "undecided"
    assert many["items_to_decide"] > 10_000


APPLES = [f"{name} {number} apples" for name in ("Ada has", "Boris buys") for number in range(5)]
EOS = tuple(range(10, 320, 16))
PROTECTED = np.isin(np.arange(VOCAB_SIZE), EOS)
MAX_NEW_TOKENS = 18


def engine_of(pair: Pair, rule: Rule) -> Engine:
    spec = pair.spec(rule=rule, num_speculative_tokens=6, lookup=None if pair.drafts else Lookup())
    spec = spec.with_static(reports_evidence=True, eos_token_ids=EOS)
    return Engine(pair.target, pair.proposing(spec), spec, num_slots=3, max_length=50, offline=True)


def recorded(pair: Pair, engine: Engine) -> Rounds:
    ids = [pair.tokenizer.encode(prompt) for prompt in APPLES]
    return record(engine, ids, MAX_NEW_TOKENS, tqdm(disable=True))


@pytest.fixture(scope="module")
def exact(pair: Pair) -> Rounds:
    """Lossless decoding with all the evidence there is."""
    return recorded(pair, engine_of(pair, Budget(Fly(0.1, 2) | Typical(), 0.0)))


def test_the_rule_that_decoded_finds_its_own_rounds_again(pair: Pair, exact: Rounds) -> None:
    """With blocks that end where the lookup does, at an end of text, or at the limit."""
    rule = Fly(0.1, 2) | Margin(gap=1.0)
    engine = engine_of(dataclasses.replace(pair, drafts=()), rule)
    rounds = recorded(pair, engine)
    assert len(set(rounds.num_drafted)) > 1
    accounts = engine.generate([pair.tokenizer.encode(one) for one in APPLES], MAX_NEW_TOKENS)
    assert {account.finish_reason for account in accounts} == {"stop", "length"}
    again = replay(rounds, rule, protected=PROTECTED, eos_token_ids=EOS)
    settled = np.arange(rounds.why.shape[1]) < rounds.count[:, None]
    assert again.count.tolist() == rounds.count.tolist()
    assert again.why[settled].tolist() == rounds.why[settled].tolist()
    for found in (tally(rounds), tally(again)):
        assert found.tokens.tolist() == [len(one.token_ids) for one in accounts]
        assert found.rounds.tolist() == [one.num_rounds for one in accounts]
        assert found.rescues.tolist() == [one.num_rescued_tokens for one in accounts]
        assert found.rescues.sum() > 5
        assert (found.regret[found.rescues > 0] > 0).all()
    assert tally(exact).rescues.sum() == 0


@pytest.mark.parametrize("name", CALIBRATED)
def test_a_mismatch_passes_from_its_level_on(name: str, exact: Rounds) -> None:
    config = DecodingConfig(rule=name, num_speculative_tokens=6, window_size=0)
    strictness = strictness_of(config)
    values, levels = strictness.values(exact, 9), strictness.levels(exact)
    assert len(values) > (1 if name == "typical" else 3)  # of which 1 is the most
    laxer_is_smaller, rescues = name != "margin", []
    for value in values:
        rule = config.replace(**{strictness.name: value}).to_rule()
        found = replay(exact, rule, protected=PROTECTED, eos_token_ids=EOS)
        passing = levels >= value if laxer_is_smaller else levels <= value
        close = np.abs(levels - value) < 1e-4 * (1 + abs(value))  # where float32 decides
        assert passing[(found.why == Why.RESCUED) & ~close].all()
        refused = (found.why == Why.REFUSED_GATE) & ~close
        if name == "typical":  # which asks no more than epsilon of anybody
            refused &= levels < 1
        assert not passing[refused].any()
        rescues.append(tally(found).rescues.sum())
    assert max(rescues[0], rescues[-1]) == max(rescues) > 0
    assert (rescues[0] > rescues[-1]) == laxer_is_smaller
