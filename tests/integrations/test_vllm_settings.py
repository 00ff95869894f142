"""What the plugin for vLLM is asked for, and what is said about a wrong question."""

from __future__ import annotations

from typing import Any

import pytest

from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.startup import (
    asked_for,
    decoding_config,
    request_rule,
)
from fly_jax.verification.rules import Budget, Exact, Fly, Margin
from fly_jax.verification.rules.rule import Either


def test_nothing_is_asked_for_unless_something_is() -> None:
    assert asked_for(None, {}) is None
    assert asked_for(None, {"FLY_JAX_WINDOW_SIZE": "3", "FLY_JAX_COMPILATION_CACHE": "off"}) is None
    assert asked_for({}, {}) == {}
    assert decoding_config({}, 15).to_rule() == Fly()


def test_environment_variables_have_the_same_names() -> None:
    environment = {
        "FLY_JAX_RULE": "fly | margin",
        "FLY_JAX_ENTROPY_THRESHOLD": "0.25",
        "FLY_JAX_WINDOW_SIZE": "3",
        "FLY_JAX_RISK_BUDGET": "2",
        "FLY_JAX_PROTECT": r"\d",
        "FLY_JAX_ANY_VERSION": "true",
    }
    asked = asked_for(None, environment)
    assert asked is not None
    assert asked["any_version"] is True
    config = decoding_config(asked, 10)
    assert config.to_rule() == Budget(Either(Fly(0.25, 3), Margin()), 2)
    assert config.protect == (r"\d",)
    assert asked_for({"window_size": 4}, environment)["window_size"] == 4
    assert asked_for({"fly_window_size": 4}, environment)["window_size"] == 4


def test_vllms_names_of_flys_numbers_are_ours() -> None:
    given = {
        "rejection_sample_method": "fly", "fly_window_size": 4,
        "fly_entropy_threshold": 0.5, "fly_entropy_top_k": 5,
    }  # fmt: skip
    config = decoding_config(asked_for(given, {}) or {}, 15)
    assert config.to_rule() == Fly(0.5, 4, entropy_top_k=5)
    assert request_rule(config, {"fly_window_size": 3}, 0.0) == Fly(0.5, 3, entropy_top_k=5)


@pytest.mark.parametrize(
    ("given", "k", "words"),
    [
        ({"rule": "flie"}, 15, "no rule 'flie'"),
        ({"window_size": 6}, 6, "draft at least 7 tokens"),
        ({"window": "tiny"}, 15, "'paper' or 'reference'"),
        ({"num_speculative_tokens": 5}, 15, "unknown"),
        ({"temperature": 0.5}, 15, "unknown"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, 15, "correct the two"),
        ({"entropy_threshold": "high"}, 15, "a number"),
        ({"protect": ["("]}, 15, "no regular expression"),
        ("fly", 15, "give an object"),
        ({"window_size": 3, "fly_window_size": 4}, 15, "window_size is 3 and 4"),
        ({"fly_entropy_top_k": 0}, 15, "entropy_top_k is 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(given: Any, k: int, words: str) -> None:
    with pytest.raises(FlyJaxError, match=words) as error:
        decoding_config(asked_for(given, {}) or {}, k)
    assert "additional_config" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_request_may_have_other_numbers_or_decode_exactly() -> None:
    config = decoding_config({"rule": "fly"}, 15)
    assert request_rule(config, None, 0.0) == Fly()
    assert request_rule(config, {"rule": "exact"}, 0.0) == Exact()
    assert request_rule(config, {"entropy_threshold": 0.7}, 1.0) == Fly(0.7)
    assert request_rule(config, '{"entropy_threshold": 0.7}', 1.0) == Fly(0.7)
    for override, words in (
        ({"rule": "margin"}, "other conditions"),
        ({"entropy": "full"}, "different entropies"),
        ({"risk_budget": 1.0}, "other conditions"),
        ({"fly_entropy_top_k": 4}, "different entropies"),
        ({"window_size": 15}, "draft at least 16"),
        ({"protect": ["x"]}, "unknown"),
        ({"prompt_lookup_max": 4}, "unknown"),
        ("exact", "give an object"),
    ):
        with pytest.raises(FlyJaxError, match=words):
            request_rule(config, override, 0.0)


def test_requests_that_sample_are_decoded_exactly_with_csd() -> None:
    config = decoding_config({"rule": "csd | fly"}, 15)
    assert request_rule(config, None, 0.7) == Exact()
    assert request_rule(config, None, 0.0) == config.to_rule()
