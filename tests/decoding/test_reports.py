"""Every token's report equals what the two models' logits say, in passes without a cache."""

import functools
from dataclasses import replace

import numpy as np
import oracle
import pytest
import random_pairs as pairs

from fly_jax import Budget, Entropy, Exact, Fly, Generation, Margin, RoundSpec, Rule, Typical, Why

PROMPTS = [[first, 3, 5] for first in range(8)]
MAX_NEW_TOKENS, PAIR, NOISE = 24, 2, 0.2
FLY = Fly(0.4, 2, entropy="full")
GAP, TOTAL = 1.5, 2.5
EXACT = pairs.SPECS["exact"].with_static(audits=True)
SPECS = {
    "fly": replace(EXACT, rule=FLY).with_static(rounds_per_dispatch=2),
    "budget": replace(EXACT, rule=Budget(Margin(gap=GAP), TOTAL)),
    "deferred": pairs.SPECS["deferred"],
}
MEASURES = {"fly": ("full", 0), "budget": ("top_k", 3), "deferred": ("top_k", 3)}


def decode(spec: RoundSpec) -> list[Generation]:
    return pairs.pair_engine(PAIR, spec, NOISE).generate(PROMPTS, MAX_NEW_TOKENS)


@functools.cache
def audited(name: str) -> list[Generation]:
    return decode(SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_numbers_are_those_of_the_models(name: str) -> None:
    whys = set()
    for row in audited(name):
        models = (pairs.random_target(PAIR), pairs.random_draft(PAIR, NOISE))
        text, first = [*row.prompt_token_ids, *row.token_ids], len(row.prompt_token_ids) - 1
        target, draft = (pairs.logits_after(one, text)[first:] for one in models)
        assert len(row.reports) == len(row.token_ids)
        for at, report in enumerate(row.reports):
            assert (report.token_id, report.why) == (row.token_ids[at], row.why[at])
            drafted = None if report.why is Why.BONUS else int(draft[at].argmax())
            seen = oracle.greedy_evidence(target[at], drafted, *MEASURES[name])
            assert report.choice_id == seen.argmax
            assert report.draft_id == drafted
            best = np.exp(seen.argmax_logit - seen.log_sum_exp)
            assert report.choice_probability == pytest.approx(best, abs=1e-4)
            assert report.entropy == pytest.approx(seen.entropy, abs=1e-4)
            if drafted is None:
                assert (report.draft_probability, report.regret) == (None, None)
            else:
                gap = seen.argmax_logit - seen.draft_logit
                share = np.exp(seen.draft_logit - seen.log_sum_exp)
                assert report.draft_probability == pytest.approx(share, abs=1e-4)
                assert report.regret == pytest.approx(gap, abs=1e-3)
            kept = report.why in (Why.MATCHED, Why.RESCUED)
            assert report.token_id == (drafted if kept else seen.argmax)
            assert (report.refused_by is None) == (report.why is not Why.CORRECTED)
            if not report.deferred and report.why is not Why.CORRECTED:
                assert report.verdict is report.why
            whys.add(report.why)
    assert whys == {Why.MATCHED, Why.RESCUED, Why.CORRECTED, Why.BONUS}


def test_a_budget_refuses_what_it_cannot_pay() -> None:
    found = set()
    for row in audited("budget"):
        spent = 0.0
        for report in row.reports:
            assert report.regret is not None or report.why is Why.BONUS
            if report.why is Why.RESCUED:
                spent += report.regret
            elif report.why is Why.CORRECTED:
                protected = report.draft_id in pairs.EOS or report.choice_id in pairs.EOS
                expected = Why.REFUSED if protected else Why.REFUSED_GATE
                if not protected and report.regret <= GAP:
                    assert spent + report.regret > TOTAL or spent == TOTAL
                    expected = Why.REFUSED_BUDGET
                assert report.refused_by is expected
                found.add(expected)
        assert row.regret == pytest.approx(spent, abs=1e-4)
    assert found >= {Why.REFUSED_GATE, Why.REFUSED_BUDGET}


def test_reports_change_no_token_and_are_not_there_unasked() -> None:
    silent = decode(SPECS["deferred"].with_static(audits=False))
    for one, other in zip(silent, audited("deferred"), strict=True):
        assert one == replace(other, reports=[], seconds=one.seconds)
    # Nor are they a part of the program.
    for spec in SPECS.values():
        plain = spec.with_static(audits=False)
        window = pairs.pair_engine(PAIR, plain, NOISE)._slots().window
        assert window is None or window.reports is None
        assert plain.static.needs(plain.rule) == plain.rule.needs


def test_the_entropy_that_is_reported() -> None:
    measures: dict[Rule, Entropy] = {Exact(): Entropy(), Fly() & Typical(): Entropy()}
    measures |= {Fly(entropy="normalized"): Entropy("normalized"), Typical(): Entropy("full")}
    for rule, measure in measures.items():
        assert EXACT.static.needs(rule).entropy == measure


def test_sampled_corrections_tell_what_was_drafted() -> None:
    rows = decode(pairs.SPECS["sampled"].with_static(audits=True))
    refused = [one for row in rows for one in row.reports if one.why is Why.CORRECTED]
    assert all(one.draft_id not in (None, one.token_id) for one in refused)
    assert {one.refused_by for one in refused} == {Why.REFUSED}
