"""lm-eval's model `fly_jax`: its requests are answered as `generate` answers them."""

from types import SimpleNamespace
from typing import Any

import pytest
from refusals import assert_refused

import fly_jax
from fly_jax.evaluation.problems import built_in_problems

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

PROMPTS = [one.prompt for one in built_in_problems()[:3]]


def asked(prompt: str, **wanted: Any) -> Any:
    return SimpleNamespace(args=(prompt, wanted))


def test_requests_are_answered_with_their_own_limits_and_stops() -> None:
    from lm_eval_model import FlyJaxLM

    model = FlyJaxLM(batch_size="2", max_gen_toks=24, rule="exact")
    limits = [asked(PROMPTS[0]), asked(PROMPTS[1], max_gen_toks=8), asked(PROMPTS[2], until="\n")]
    answers = model.generate_until(limits)

    pair = fly_jax.load_pair()
    plain = fly_jax.generate(pair, PROMPTS, max_new_tokens=24, rule="autoregressive")
    texts = [pair.tokenizer.decode(one.token_ids, continues=True) for one in plain]
    assert answers[0] == texts[0]
    assert answers[1] == pair.tokenizer.decode(plain[1].token_ids[:8], continues=True)
    assert answers[2] == texts[2].partition("\n")[0]
    drawn = asked(PROMPTS[0], do_sample=True, temperature=1.5)
    assert_refused("temperature=1.5 in --model_args", model.generate_until, [drawn])
    hot = FlyJaxLM(rule="sampled", num_speculative_tokens=3, temperature=1.5, max_gen_toks=8)
    assert len(set(hot.generate_until([drawn] * 3))) > 1

    assert_refused("only generates", model.loglikelihood, [])
    assert_refused("begins the assistant's answer", model.apply_chat_template, [], False)
    for wrong in ({"rule": "flie"}, {"batch_size": "auto"}, {"rule": "fly"} | {"window_size": 99}):
        assert_refused("rules are|whole number|draft at least", FlyJaxLM, **wrong)
