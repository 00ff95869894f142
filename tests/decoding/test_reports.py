"""Every token's report equals what the two models' logits say, in passes without a cache."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import oracle
import pytest
import random_pairs as pairs

from fly_jax import Budget, Entropy, Exact, Fly, Generation, Margin, Rule, Typical, Why
from fly_jax.decoding.config import RoundSpec

PROMPTS = [[first, 3, 5] for first in range(8)]
DRAFTED, MAX_NEW_TOKENS, PAIR, NOISE = 5, 24, 2, 0.2
FLY = Fly(entropy_threshold=0.4, window_size=2)
GAP, TOTAL = 1.5, 2.5
EXACT = pairs.SPECS["exact"].with_static(audits=True)
SPECS = {
    "exact": EXACT,
    "fly": replace(EXACT, rule=FLY).with_static(rounds_per_dispatch=2),
    "budget": replace(EXACT, rule=Budget(Margin(gap=GAP), TOTAL)),
    "typical": replace(EXACT, rule=Typical()),
    "deferred": pairs.SPECS["deferred"],
}
MEASURES = {name: ("full", 0) if name == "typical" else ("top_k", 3) for name in SPECS}


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
    assert whys >= {Why.MATCHED, Why.CORRECTED, Why.BONUS}
    assert (Why.RESCUED in whys) == (name != "exact")


def test_refusals_by_the_rule_are_those_of_its_oracle() -> None:
    """Each block is drafted and judged anew, from the text before it."""
    found = set()
    for row in audited("fly"):
        ends = [at for at, why in enumerate(row.why) if why in (Why.CORRECTED, Why.BONUS)]
        for start, end in zip([0, *(at + 1 for at in ends)], ends, strict=False):
            before = [*row.prompt_token_ids, *row.token_ids[:start]]
            _, _, decided = pairs.fly_block(FLY, PAIR, NOISE, before, DRAFTED)
            if row.why[end] is Why.CORRECTED:
                found.add(row.reports[end].refused_by)
                assert row.reports[end].refused_by is Why[decided.why[end - start]]
    assert found >= {Why.REFUSED_GATE, Why.REFUSED_WINDOW, Why.REFUSED_BOUNDARY}


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


def test_windows_that_were_deferred_tell_how_they_ended() -> None:
    rows = audited("deferred")
    for row in rows:
        deferred = [report for report in row.reports if report.deferred]
        assert all(report.verdict is Why.REFUSED_BOUNDARY for report in deferred)
        failed = [report for report in deferred if report.why is Why.CORRECTED]
        assert all(report.refused_by is Why.REFUSED_WINDOW for report in failed)
        assert len(failed) == row.num_rollbacks
        # With K = W none fits into its block.
        assert len(deferred) - len(failed) == row.num_rescued_tokens
        assert {report.why for report in deferred} <= {Why.CORRECTED, Why.RESCUED}
    assert sum(row.num_rollbacks for row in rows) > 0
    assert sum(row.num_rescued_tokens for row in rows) > 0


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


@pytest.mark.parametrize(
    ("rule", "measure"),
    [
        (Exact(), Entropy()),
        (Fly(entropy="normalized"), Entropy("normalized")),
        (Typical(), Entropy("full")),
        (Fly() & Typical(), Entropy()),
    ],
)
def test_the_entropy_that_is_reported(rule: Rule, measure: Entropy) -> None:
    assert EXACT.static.needs(rule).entropy == measure


def test_sampled_corrections_tell_what_was_drafted() -> None:
    rows = decode(pairs.SPECS["sampled"].with_static(audits=True))
    refused = [one for row in rows for one in row.reports if one.why is Why.CORRECTED]
    assert all(one.draft_id not in (None, one.token_id) for one in refused)
    assert {one.refused_by for one in refused} == {Why.REFUSED}
