"""What an engine refuses, each in a sentence."""

from __future__ import annotations

import dataclasses

import pytest
from engine_kinds import KINDS, ROUND, Kind, engine_for

from fly_jax import Csd, Fly, FlyJaxError, Margin, Request, Sampling

REFUSED = {
    "autoregressive": {
        "is empty": Request([]),
        "shorten it, or raise max_length": Request([1] * 100),
        "max_new_tokens is 0": Request([1], 0),
        "outside the model's vocabulary": Request([99]),
        "log-probabilities of 0 tokens.*the engine gives none": Request([1], logprobs=0),
        "sampling and for a rule with a memory": Request([1], 1, Csd(), Sampling(0.5)),
        "asks for the rule Margin, of a kind that the engine": Request([1], rule=Margin()),
    },
    "defer": {
        "defers windows, which is for greedy": Request([1], sampling=Sampling(0.5)),
        "with window_size=2 was given to an engine that defers": Request([1], rule=Fly(0.0, 2)),
    },
    "rules and sampling": {"no deferred window of window_size=4": Request([1], rule=Fly(0.5, 4))},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_requests_that_are_refused(kind: str) -> None:
    engine = engine_for(KINDS[kind])
    for words, request in REFUSED[kind].items():
        with pytest.raises(FlyJaxError, match=words):
            engine.submit(request)
        assert engine.is_idle


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind(dataclasses.replace(ROUND, rule=Csd())), "memory"),
        (Kind(ROUND, rules=(Csd(),)), "memory"),
        (Kind(dataclasses.replace(ROUND, sampling=Sampling(0.5))), "each request has its own"),
        (
            Kind(ROUND.with_static(deferred_window=2), rules=(Fly(0, 1),)),
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
