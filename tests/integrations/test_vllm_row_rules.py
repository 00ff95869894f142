"""What rows keep of their drafts, against plain NumPy; and which rule and budget each row has."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import oracle
import pytest
import scipy.stats

from fly_jax.integrations.vllm_tpu.row_rules import RowRules, sampling_of
from fly_jax.integrations.vllm_tpu.startup import decoding_config
from fly_jax.verification.rules import Budget, Exact, Fly, RuleState, per_row
from fly_jax.verification.rules.loosened import Margin
from fly_jax.verification.sampling import Sampling
from fly_jax.verification.verify import verify_flat

VOCAB, LONGEST, ROWS, TOKENS = 11, 6, 8, 40
WINDOW, THRESHOLD = 1, 0.6
NEVER = 3

Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

kept = jax.jit(verify_flat, static_argnames="max_drafted")


def batch(seed: int) -> Batch:
    """Counts, drafts, logits and bonus tokens of ragged requests; some draft nothing."""
    chance = np.random.default_rng(seed)
    counts = chance.integers(0, LONGEST + 1, ROWS)
    counts[chance.integers(ROWS)] = 0
    logits = chance.normal(0, 1.5, (TOKENS, VOCAB)).astype(np.float32)
    drafts, is_own = chance.integers(0, VOCAB, TOKENS), chance.random(TOKENS) < 0.75
    drafts[is_own] = logits.argmax(-1)[is_own]
    bonus = chance.integers(0, VOCAB, ROWS)
    return counts.astype(np.int32), drafts.astype(np.int32), logits, bonus.astype(np.int32)


def greedy_row(logits: np.ndarray, drafts: np.ndarray, bonus: int, *, loose: bool) -> list[int]:
    """What a request emits, in as many places as it has draft tokens, and then its last place."""
    pairs = [*zip(logits, drafts.tolist(), strict=True)]
    seen = [oracle.greedy_evidence(*pair, "top_k", 3) for pair in pairs]
    accepted, entropies = [one.accepted for one in seen], [one.entropy for one in seen]
    found = oracle.lossless_row(accepted, len(drafts))
    if loose:
        least = math.log(np.finfo(np.float32).tiny)
        never = [
            NEVER in (one.argmax, token) or one.draft_logit - one.log_sum_exp < least
            for one, (_, token) in zip(seen, pairs, strict=True)
        ]
        found = oracle.fly_row(accepted, entropies, never, len(drafts), THRESHOLD, WINDOW)
    tokens = drafts[: found.num_accepted].tolist()
    if found.num_accepted == len(drafts):
        return [*tokens, bonus]
    return [*tokens, seen[found.num_accepted].argmax, *[-1] * (len(drafts) - len(tokens))]


def greedy_rows(inputs: Batch, loose: Sequence[bool]) -> list[list[int]]:
    """What the requests of a batch emit, of which some are decoded with the loosened rule."""
    counts, drafts, logits, bonus = inputs
    ends = np.cumsum(counts)
    own = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    requests = zip(own, bonus.tolist(), loose, strict=True)
    return [greedy_row(logits[at], drafts[at], last, loose=one) for at, last, one in requests]


def rows_of(tokens: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    ends = np.cumsum(counts)
    assert (tokens[ends[-1] : TOKENS] == -1).all()
    return [
        [*tokens[end - count : end].tolist(), int(tokens[TOKENS + row])]
        for row, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def sampled(temperature: np.ndarray, top_k: int) -> Sampling:
    """Of rows with these temperatures, all with the same cuts."""
    cuts = np.full(len(temperature), top_k, np.int32), np.full(len(temperature), 0.9, np.float32)
    return sampling_of(temperature.astype(np.float32), *cuts)


def assert_fits(tokens: np.ndarray, expected: np.ndarray) -> None:
    counts, live = np.bincount(tokens, minlength=len(expected)), expected > 0
    assert counts[~live].sum() == 0
    assert scipy.stats.chisquare(counts[live], expected[live] * len(tokens)).pvalue > 1e-3


@pytest.mark.parametrize("is_mixed", [False, True], ids=["greedy", "mixed"])
def test_greedy_requests_are_the_oracles(is_mixed: bool) -> None:
    rescued, loose = 0, [row % 3 != 0 for row in range(ROWS)]
    fly = Fly(THRESHOLD, WINDOW)
    rule = per_row([fly if one else Exact() for one in loose], like=[fly])
    # Every second request samples, or none.
    sampling = sampled(np.where(np.arange(ROWS) % 2, 0.8, -1.0), 4) if is_mixed else None
    greedy = slice(None, None, 2 if is_mixed else 1)
    given = {"max_drafted": LONGEST, "sampling": sampling, "protected": np.arange(VOCAB) == NEVER}
    for seed in range(12):
        counts, drafts, logits, bonus = inputs = batch(seed)
        found = kept(rule, logits, drafts, counts, bonus, **given, key=jax.random.key(seed))
        tokens = rows_of(np.asarray(found.tokens), counts)
        assert tokens[greedy] == greedy_rows(inputs, loose)[greedy]
        rescued += int(np.sum(found.verdict.num_rescued))
    assert rescued > 5


def test_sampled_requests_have_the_targets_distribution_and_loosened_ones_keep_the_draft() -> None:
    number, draft = 4000, 2
    logits = np.log(np.array([0.35, 0.25, 0.2, 0.1, 0.06, 0.04], np.float32))
    # Half of the requests are exact; the others keep whatever is at most e times less probable.
    rule = per_row([Exact(), Margin(gap=1.0)] * (number // 2))
    drawn = {"sampling": sampled(np.full(number, 1.3), 5), "key": jax.random.key(7)}
    drafts, counts, bonus = (np.full(number, one, np.int32) for one in (draft, 1, 0))
    logits_of_all = np.broadcast_to(logits, (number, 6))
    found = kept(rule, logits_of_all, drafts, counts, bonus, max_drafted=1, **drawn)
    first = np.asarray(found.tokens[:number])
    assert (first[1::2] == draft).all()
    assert_fits(first[::2], oracle.processed_probs(logits, 1.3, 5, 0.9))


def test_a_budget_is_what_earlier_steps_have_left() -> None:
    logits = np.array([[2.0, 1.5, 0.0]] * 4, np.float32)  # regret of token 1: 0.5
    rule = Budget(Margin(gap=1.0), np.full(2, 1.2, np.float32))
    drafts, counts, bonus = (np.array(one, np.int32) for one in ([1] * 4, [2, 2], [7, 8]))
    step = functools.partial(kept, rule, logits, drafts, counts, bonus, max_drafted=2)
    state = RuleState(np.array([1.2, 0.6], np.float32))
    found = step(state=state)
    assert found.tokens.tolist() == [1, 1, 1, 0, 7, -1]
    assert found.verdict.num_rescued.tolist() == [2, 1]
    left = state.after(found.verdict, found.verdict.num_accepted)
    np.testing.assert_allclose(left.budget, [0.2, 0.1], atol=1e-6)
    assert step(state=left).tokens.tolist() == [0, -1, 0, -1, -1, -1]


REQUESTS = {
    "a": None,
    "b": {"fly_jax": {"rule": "exact"}},
    "c": {"fly_jax": {"entropy_threshold": 0.9}},
    "d": {"fly_jax": {"rule": "margin"}},
}


def parameters(name: str) -> Any:
    return SimpleNamespace(extra_args=REQUESTS[name], temperature=0.0)


def same(left: Any, right: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


def test_each_row_has_its_requests_rule(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowRules(decoding_config({"rule": "fly"}, 15), 8)
    step = rows.step(["c", "b", "a", None], "abc", parameters)
    assert same(step.rule, per_row([Fly(0.9), Exact(), Fly(), Fly()], like=[Fly()]))
    moved = rows.step([None, "a", "c"], "ac", parameters)
    assert same(moved.rule, per_row([Fly(), Fly(), Fly(0.9)], like=[Fly()]))
    # The program is the same whoever is in it, and when nobody is.
    assert jax.tree.structure(rows.padding(3)) == jax.tree.structure(moved)
    assert not caplog.text
    wrong = rows.step(["d"], "d", parameters)
    assert same(wrong.rule, per_row([Exact()], like=[Fly()]))
    assert "Request d is decoded with the rule exact" in caplog.text


def test_a_budget_stays_with_its_request() -> None:
    rows = RowRules(decoding_config({"rule": "fly", "risk_budget": 1.0}, 15), 2)
    first = rows.step(["a", None, "b"], "ab", parameters)
    assert first.is_new.tolist() == [True, False, True]
    assert sorted(first.slots[[0, 2]]) == [0, 1]
    assert first.slots[1] == rows.num_slots
    # "a" waits while "b" is decoded; "c" finds no slot, until "b" is done.
    second = rows.step(["c", "b"], "abc", parameters)
    assert second.slots.tolist() == [rows.num_slots, first.slots[2]]
    assert second.is_new.tolist() == [True, False]
    third = rows.step(["a", "b"], "ab", parameters)
    assert third.slots.tolist() == first.slots[[0, 2]].tolist()
    assert not third.is_new.any()
    last = rows.step(["c", "a"], "ac", parameters)
    assert last.slots.tolist() == first.slots[[2, 0]].tolist()
