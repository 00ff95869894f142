"""What any server of ours must do, whatever model it has: asked over HTTP, by OpenAI's client.

    python tests/helpers/smoke.py http://localhost:8000 [key]

The suite asks a tiny server the same. Answers are compared with each other, so the models have to
be in float32, as they are on a CPU.
"""

import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

_PROMPTS = ("Ada has 3", "One, two,", "import os", "She said")
# What some checks ask of a server, which not every one has.
_NEEDED = {"a_conversation_is_answered": "has_chat_template"}
_NEEDED |= {"greedy_tokens_are_the_likeliest": "max_logprobs"}


class Smoke:
    """The checks, each a method whose name says what holds."""

    def __init__(self, url: str, key: str = "none") -> None:
        self._url = url
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
        (self._model,) = self._client.models.list().data
        self._fly: Any = (self._model.model_extra or {})["fly"]
        self._usual = {"model": self._model.id, "max_tokens": 12, "temperature": 0}
        self._usual |= {"extra_body": {"fly": {"rule": "exact"}}}

    def run(self, on_progress: Callable[[str], None] = print) -> None:
        """All of them; `on_progress` gets the name of each that holds."""
        for name in (name for name in vars(Smoke) if not name.startswith("_") and name != "run"):
            if name not in _NEEDED or self._fly[_NEEDED[name]]:
                getattr(self, name)()
                on_progress(name)

    def _completion(self, prompt: str = _PROMPTS[0], **given: Any) -> Any:
        return self._client.completions.create(**self._usual | {"prompt": prompt} | given)

    def _chat(self, **given: Any) -> Any:
        messages = [{"role": "user", "content": "Hi"}]
        return self._client.chat.completions.create(**self._usual | given, messages=messages)

    def a_stream_is_the_reply(self) -> None:
        reply = self._completion()
        (choice,) = reply.choices
        assert choice.finish_reason in ("length", "stop")
        assert 1 <= reply.usage.completion_tokens <= 12
        chunks = list(self._completion(stream=True, stream_options={"include_usage": True}))
        assert "".join(one.choices[0].text for one in chunks[:-1]) == choice.text
        assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens

    def a_conversation_is_answered(self) -> None:
        (choice,) = self._chat().choices
        assert choice.message.role == "assistant"
        pieces = [one.choices[0].delta.content or "" for one in self._chat(stream=True)]
        assert "".join(pieces) == choice.message.content

    def a_stop_string_ends_a_text(self) -> None:
        text = self._completion().choices[0].text
        stop = text[len(text) // 2 :][:3]
        (choice,) = self._completion(stop=[stop, "\x00\x01"]).choices
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")

    def draws_are_those_of_their_seed(self) -> None:
        given = {"temperature": 1.0, "seed": 5, "n": 2}
        first, again = ([one.text for one in self._completion(**given).choices] for _ in range(2))
        assert first == again
        assert first[0] != first[1]

    def neighbours_change_nothing(self) -> None:
        alone = [self._completion(prompt).choices[0].text for prompt in _PROMPTS]
        with ThreadPoolExecutor(len(_PROMPTS)) as pool:
            together = list(pool.map(self._completion, _PROMPTS))
        assert [one.choices[0].text for one in together] == alone

    def every_rule_answers_and_is_audited(self) -> None:
        for rule in self._fly["rules"]:
            reply = self._completion(extra_body={"fly": {"rule": rule, "audit": True}})
            figures = reply.model_extra["metrics"]["speculative_decoding"]
            audit = reply.choices[0].model_extra["fly"]["audit"]
            assert len(audit["rescues"]) == figures["num_rescued_tokens"]
            assert rule != "exact" or not audit["rescues"]

    def greedy_tokens_are_the_likeliest(self) -> None:
        found = self._completion(logprobs=1).choices[0].logprobs
        assert len(found.tokens) == len(found.token_logprobs)
        for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
            assert value == max(top.values()) <= 0

    def who_leaves_frees_the_slot(self) -> None:
        given = {"max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}}
        with self._completion(**given) as stream:
            next(iter(stream))
        for _ in range(300):
            text = httpx.get(f"{self._url}/metrics").text
            numbers = re.findall(r"^fly_jax:num_requests_(?:running|waiting) (\S+)$", text, re.M)
            if sum(map(float, numbers)) == 0:
                return
            time.sleep(0.1)
        raise AssertionError("a slot is still taken")

    def what_is_wrong_is_refused_in_a_sentence(self) -> None:
        for given, words in (
            ({"max_tokens": 0}, "max_tokens"),
            ({"presence_penalty": 1.0}, "presence_penalty is 1.0"),
            ({"prompt": [2**30]}, "vocabulary"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                self._completion(**given)


if __name__ == "__main__":
    Smoke(*sys.argv[1:]).run()
