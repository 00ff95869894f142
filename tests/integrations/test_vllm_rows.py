"""Every request's own rule and budget, whichever row it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from fly_jax.integrations.vllm_tpu.row_rules import RowRules
from fly_jax.integrations.vllm_tpu.startup import decoding_config
from fly_jax.verification.rules import Exact, Fly, per_row

REQUESTS = {
    "a": None,
    "b": {"fly_jax": {"rule": "exact"}},
    "c": {"fly_jax": {"entropy_threshold": 0.9}},
    "d": {"fly_jax": {"rule": "margin"}},
}


def parameters(name: str) -> Any:
    return SimpleNamespace(extra_args=REQUESTS[name], temperature=0.0)


def same(left: Any, right: Any) -> bool:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def test_each_row_has_its_requests_rule() -> None:
    rows = RowRules(decoding_config({"rule": "fly"}, 15), 8)
    step = rows.step(["c", "b", "a", None], "abc", parameters)
    assert same(step.rule, per_row([Fly(0.9), Exact(), Fly(), Fly()], like=[Fly()]))
    moved = rows.step([None, "a", "c"], "ac", parameters)
    assert same(moved.rule, per_row([Fly(), Fly(), Fly(0.9)], like=[Fly()]))
    # The program is the same whoever is in it, and when nobody is.
    assert jax.tree.structure(rows.padding(3)) == jax.tree.structure(moved)


def test_a_wrong_rule_is_decoded_exactly_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowRules(decoding_config({"rule": "fly"}, 15), 8)
    step = rows.step(["d"], "d", parameters)
    assert same(step.rule, per_row([Exact()], like=[Fly()]))
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
    assert rows.step(["c", "a"], "ac", parameters).slots.tolist() == [
        first.slots[2],
        first.slots[0],
    ]
