"""What an engine refuses, each in a sentence."""

from __future__ import annotations

import dataclasses

import pytest
from engine_kinds import KINDS, ROUND, Kind, engine_for

from fly_jax.engine.request import Request
from fly_jax.errors import FlyJaxError
from fly_jax.verification.rules import Csd, Fly, Margin
from fly_jax.verification.sampling import Sampling


@pytest.mark.parametrize(
    ("kind", "request_", "words"),
    [
        ("autoregressive", Request([]), "is empty"),
        ("autoregressive", Request([1] * 100), "shorten it, or raise max_length"),
        ("autoregressive", Request([1], 0), "max_new_tokens is 0"),
        ("autoregressive", Request([99]), "outside the model's vocabulary"),
        (
            "autoregressive",
            Request([1], logprobs=0),
            "log-probabilities of 0 tokens.*the engine gives none",
        ),
        (
            "autoregressive",
            Request([1], rule=Csd(), sampling=Sampling(0.5)),
            "sampling and for a rule with a memory",
        ),
        (
            "autoregressive",
            Request([1], rule=Margin()),
            "asks for the rule Margin, of a kind that the engine",
        ),
        ("defer", Request([1], sampling=Sampling(0.5)), "defers windows, which is for greedy"),
        (
            "defer",
            Request([1], rule=Fly(0.0, 2)),
            "with window_size=2 was given to an engine that defers",
        ),
        (
            "rules and sampling",
            Request([1], rule=Fly(0.5, 4)),
            "no deferred window of window_size=4",
        ),
    ],
)
def test_requests_that_are_refused(kind: str, request_: Request, words: str) -> None:
    engine = engine_for(KINDS[kind])
    with pytest.raises(FlyJaxError, match=words):
        engine.submit(request_)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind(dataclasses.replace(ROUND, rule=Csd())), "memory"),
        (Kind(ROUND, rules=(Csd(),)), "memory"),
        (Kind(dataclasses.replace(ROUND, sampling=Sampling(0.5))), "each request has its own"),
        (
            Kind(ROUND.with_static(deferred_window=2), rules=(Fly(0.0, 1),)),
            "which must be of one size",
        ),
    ],
)
def test_engines_that_are_refused(kind: Kind, words: str) -> None:
    with pytest.raises(FlyJaxError, match=words):
        engine_for(kind)


@pytest.mark.parametrize("sizes", [{"num_slots": 0}, {"max_length": 1}, {"max_length": 601}])
def test_sizes_that_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(FlyJaxError, match="at least"):
        engine_for(KINDS["autoregressive"], **sizes)
