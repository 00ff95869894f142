"""What process 0 tells the others; that they then do the same is tested in tests/launch."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fly_jax.engine.request import Request
from fly_jax.serving.lockstep import decoded, encoded
from fly_jax.verification.rules import RULES, Budget, Exact, Fly, Lossy, Margin, Rule
from fly_jax.verification.sampling import Sampling

RULES_ASKED_FOR: list[Rule] = [
    Exact(),
    *(kind() for kind in RULES.values()),
    (Fly(window_size=2) | Margin(gap=1.5)) & Lossy(),
    Budget(Fly(entropy="normalized") & Margin(), total=3.0),
    Margin(gap=np.float32(0.25)),
]


@pytest.mark.parametrize("rule", RULES_ASKED_FOR, ids=lambda rule: type(rule).__name__)
def test_a_request_arrives_as_it_was_sent(rule: Rule) -> None:
    sent = Request(
        [1, 2, 3], 20, rule, Sampling(0.7, top_k=5), 4, ("\n", "é"), protected_token_ids=(5, 6)
    )
    arrived = decoded(json.loads(json.dumps(encoded(sent))))
    assert isinstance(arrived, Request)
    assert arrived == dataclasses.replace(sent, stop=["\n", "é"], protected_token_ids=[5, 6])


def test_nothing_else_is_made_of_a_message() -> None:
    with pytest.raises(KeyError):
        decoded({"Path": {}})
