"""Which rule, sampling and budget each row of a step has."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from fly_jax.integrations.vllm_tpu.row_rules import RowRules, sampling_of
from fly_jax.integrations.vllm_tpu.startup import decoding_config
from fly_jax.verification.rules import Budget, Exact, Fly, RuleState, per_row
from fly_jax.verification.rules.loosened import Margin
from fly_jax.verification.sampling import Sampling
from fly_jax.verification.verify import verify_flat


def same(left: Any, right: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


def test_a_request_that_is_greedy_to_the_engine_has_temperature_0() -> None:
    found = sampling_of(np.float32([-1, 0.8]), np.int32([-1, 4]), np.float32([1, 0.9]))
    assert same(found, Sampling(np.array([0, 0.8], np.float32), np.array([0, 4]), found.top_p))


def test_a_budget_is_what_earlier_steps_have_left() -> None:
    logits = np.array([[2.0, 1.5, 0.0]] * 4, np.float32)  # regret of token 1: 0.5
    rule = Budget(Margin(gap=1.0), np.full(2, 1.2, np.float32))
    drafts, counts, bonus = (np.array(one, np.int32) for one in ([1] * 4, [2, 2], [7, 8]))
    decide = jax.jit(verify_flat, static_argnames="max_drafted")
    step = functools.partial(decide, rule, logits, drafts, counts, bonus, max_drafted=2)
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
