"""Which fields of a request are refused, and which are passed over."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from refusals import assert_refused

from fly_jax.decoding.config import default_config
from fly_jax.serving.http import protocol
from fly_jax.serving.http.protocol import ApiError, ChatRequest, CompletionRequest
from fly_jax.serving.http.request_builder import RequestBuilder

HELLO = [{"role": "user", "content": "Hello"}]
# Of other servers, and with values that say nothing.
HARMLESS: dict[str, Any] = {
    "user": "Ada", "metadata": {"a": "b"}, "store": False, "priority": 3, "request_id": "x",
    "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
    "echo": False, "suffix": None, "logit_bias": {}, "tools": None, "tool_choice": "auto",
    "response_format": {"type": "text"}, "skip_special_tokens": True, "best_of": 1,
    "stop_token_ids": [], "guided_json": None, "logprobs": None, "tfs_z": 1, "max_tokens": 4,
    "max_completion_tokens": 4,
}  # fmt: skip


def test_what_changes_nothing_is_passed_over() -> None:
    CompletionRequest.model_validate({"prompt": "a"} | HARMLESS)
    # As clients keep what they were told.
    said = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": [], "audio": None}
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    asked = {"role": "user", "name": "Ada", "content": [part]}
    given = ChatRequest.model_validate({"messages": [asked, said, *HELLO]} | HARMLESS)
    assert given.messages[0].as_template == HELLO[0]
    assert given.limit == CompletionRequest(prompt="a", max_completion_tokens=4).limit == 4
    two = protocol.Message(role="user", content=[part, part])
    assert two.as_template["content"] == "Hello\nHello"


BOTH, TEXT, CHAT = (CompletionRequest, ChatRequest), (CompletionRequest,), (ChatRequest,)


@pytest.mark.parametrize(("kinds", "given", "words"), [
    (BOTH, {"max_tokens": 0}, "max_tokens"), (BOTH, {"stop": ""}, "stop"),
    (BOTH, {"temprature": 1}, "no field 'temprature'; write 'temperature'"),
    (BOTH, {"presence_penalty": 0.5}, "presence_penalty is 0.5"),
    (BOTH, {"repetition_penalty": 0}, "repetition_penalty is 0"),
    (BOTH, {"repeat_penalty": 1.3}, "repeat_penalty is 1.3"),
    (BOTH, {"logit_bias": {"3": 1}}, "logit_bias"),
    (BOTH, {"skip_special_tokens": False}, "skip_special_tokens is False"),
    (BOTH, {"guided_regex": "a+"}, "guided_regex is 'a+'"),
    (BOTH, {"response_format": {"type": "json_object"}}, "json_object"),
    (BOTH, {"tools": [{}]}, "tools"), (BOTH, {"echo": True}, "echo is True"),
    (BOTH, {"fly_window_size": 3}, "give it within"),
    (BOTH, {"rule": "exact"}, "rule stands beside the field fly"),
    (TEXT, {"logprobs": 6}, "less than or equal to 5"), (TEXT, {"logprobs": True}, "valid integer"),
    (TEXT, {"best_of": 3}, "best_of is 3"), (BOTH, {"stop_regex": "a"}, "stop_regex is 'a'"),
    (TEXT, {"top_logprobs": 3}, "top_logprobs is 3"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
    (CHAT, {"top_logprobs": 2}, "give logprobs=true"),
    (BOTH, {"max_tokens": 1, "max_completion_tokens": 2}, "one of them"),
    (CHAT, {"messages": [{"role": "a", "content": "b", "tool_calls": [1]}]}, "tool_calls"),
    (TEXT, {"stop": [""]}, "stop.0: String should have at least 1 character."),
    (TEXT, {"stop": ["a", 3]}, "stop.1: Input should be a valid string."),
    (TEXT, {"prompt": 3, **dict.fromkeys(map(str, range(80)), 0)},
     "The body: there are 82 fields; send at most 81."),
    (TEXT, {"stop": ["a"] * 17},
     "stop: List should have at most 16 items after validation, not 17."),
    (TEXT, {"prompt": 3}, "prompt: Input should be a valid string."),
    (TEXT, {"fly": {"rule": 3}}, "fly.rule: Input should be a valid string."),
    (TEXT, {"fly": {"window_size": 3, "fly_window_size": 4}},
     "fly: window_size is 3 and 4, once by vLLM's name; give it once."),
])  # fmt: skip
def test_what_changes_the_answer_is_refused(kinds: tuple[Any, ...], given: Any, words: str) -> None:
    """The sentence that ends with a full stop here names the field and no type of pydantic."""
    for kind in kinds:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({"prompt": "a", "messages": HELLO} | given)
        within = [error | {"loc": ("body", *error["loc"])} for error in caught.value.errors()]
        sentence = str(protocol.of_validation(within))
        assert sentence == words if words.endswith(".") else words in sentence


def test_an_error_has_at_most_two_thousand_characters() -> None:
    for number in (1999, 2000, 2001, 9000):
        assert len(str(ApiError(400, "a" * number))) == min(number, 2000)


def test_vllms_names_of_flys_numbers_are_ours() -> None:
    numbers = {"window_size": 2, "entropy_threshold": 0.5, "entropy_top_k": 5}
    theirs = {f"fly_{name}": number for name, number in numbers.items()}
    given = theirs | {"rejection_sample_method": "fly", "window_size": 2}
    fly = CompletionRequest.model_validate({"prompt": "a", "fly": given}).fly
    assert fly.model_dump(exclude_unset=True) == {"rule": "fly", **numbers}


def test_how_many_alternatives_are_asked_for() -> None:
    assert CompletionRequest(prompt="a").num_logprobs is None
    assert CompletionRequest(prompt="a", logprobs=0).num_logprobs == 0
    chat = partial(ChatRequest, messages=HELLO)
    assert chat().num_logprobs is None
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3


def test_rules_that_do_not_fit_the_servers_k_or_have_no_draft_are_not_offered() -> None:
    """A real model's server drafts three tokens; FLy's window of six fits into no such block."""
    real = default_config(is_embedded=False)
    assert RequestBuilder.of(real).rules == ("margin",)
    assert RequestBuilder.of(real.replace(rule="fly")).rules == ("fly", "margin")
    assert_refused("num_speculative_tokens=3", RequestBuilder.of, real, ["fly"])
    unread = CompletionRequest(prompt=[1], fly={"margin_gap": 1})
    with pytest.raises(ApiError, match="margin_gap was given, and the rule exact does not"):
        RequestBuilder.of(real).requests(unread, [[1]], Mock(), tuple)
    alone = RequestBuilder.of(real.without_draft())
    asked, engine = CompletionRequest(prompt=[1], fly={"rule": "margin"}), Mock()
    with pytest.raises(ApiError, match=r"has autoregressive alone.*start it with a --draft"):
        alone.requests(asked, [[1]], engine, tuple)
    nothing = "--rules was given and nothing is drafted"
    assert_refused(nothing, RequestBuilder.of, real.without_draft(), ["margin"])
    deferring = real.replace(boundary="defer", window_size=2)
    assert_refused("has no window to defer", RequestBuilder.of, deferring)


def test_a_server_that_draws_offers_its_rules_all_the_same() -> None:
    drawn = {"temperature": 0.7, "top_p": 0.9, "num_speculative_tokens": 15}
    builder = RequestBuilder.of(default_config(is_embedded=False).replace(rule="fly", **drawn))
    assert (builder.rules, len(builder.kinds)) == (("fly", "margin"), 4)
    lossy = builder.config.replace(rule="lossy", lossy_threshold=0.6)
    assert RequestBuilder.of(lossy).rules == ("lossy", "fly", "margin")
    for name, value in (("entropy_top_k", 5), ("window", "reference")):
        asked = CompletionRequest(prompt=[1], fly={"rule": "fly", name: value})
        with pytest.raises(ApiError, match=f"fly.{name} is .* programs were compiled for"):
            builder.requests(asked, [[1]], Mock(), tuple)


def test_what_is_drawn_without_a_seed_need_not_come_again() -> None:
    """So K may follow the load while it is decoded."""
    builder = RequestBuilder.of(default_config(is_embedded=True))
    for seed in (None, -1, 0, 7):
        asked = CompletionRequest(prompt=[1], temperature=0.5, seed=seed, n=2)
        made = builder.requests(asked, [[1]], Mock(max_length=64), tuple)
        assert [one.repeats for one in made] == [seed not in (None, -1)] * 2
    asked = CompletionRequest(prompt=[1], fly={"rule": "sampled"})
    assert builder.requests(asked, [[1]], Mock(max_length=64), tuple)[0].is_drawn
