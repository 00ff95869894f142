"""Judging recorded rounds gives what decoding gave; and which mismatches each strictness passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tiny_pair import VOCAB_SIZE
from tqdm import tqdm

from fly_jax import Budget, DecodingConfig, Engine, Fly, Lookup, Margin, Pair, Rule, Typical, Why
from fly_jax.evaluation.replay import Rounds, record, replay, tally
from fly_jax.evaluation.strictness import CALIBRATED, strictness_of

PROMPTS = [f"{name} {number} apples" for name in ("Ada has", "Boris buys") for number in range(5)]
EOS = tuple(range(10, 320, 16))
PROTECTED = np.isin(np.arange(VOCAB_SIZE), EOS)
MAX_NEW_TOKENS = 18


def engine_of(pair: Pair, rule: Rule) -> Engine:
    spec = pair.spec(rule=rule, num_speculative_tokens=6, lookup=None if pair.drafts else Lookup())
    spec = spec.with_static(reports_evidence=True, eos_token_ids=EOS)
    return Engine(pair.target, pair.proposing(spec), spec, num_slots=3, max_length=50, offline=True)


def recorded(pair: Pair, engine: Engine) -> Rounds:
    ids = [pair.tokenizer.encode(prompt) for prompt in PROMPTS]
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
    accounts = engine.generate([pair.tokenizer.encode(one) for one in PROMPTS], MAX_NEW_TOKENS)
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
