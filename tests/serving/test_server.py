"""A live server, asked by OpenAI's own client: replies, streams, refusals, and what it leaves."""

import asyncio
import contextlib
import functools
import itertools
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attacks
import httpx
import jax
import numpy as np
import openai
import pytest
from launch_types import Captured, Patch, Ran, Refused
from live_server import KEY, LENGTH, NAME, OTHER, PROMPT, QUEUE, SLOTS, Live, limited, until
from prometheus_client.parser import text_string_to_metric_families
from random_pairs import logits_after
from smoke import Smoke

from fly_jax.serving.http.app import EventStream
from fly_jax.serving.http.limits import Client
from fly_jax.serving.http.protocol import CompletionRequest
from fly_jax.serving.http.replies import TextStyle
from fly_jax.verification.rules import Why

CHAT = "/v1/chat/completions"
BENCH = ["bench", "serve", "--num_prompts=3", "--max_new_tokens=8"]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("rule", ["exact", "fly | margin"])
def test_a_reply_is_what_the_library_gives(live: Live, rule: str) -> None:
    reply = live.completion(max_tokens=40, extra_body={"fly": {"rule": rule, "audit": True}})
    alone, text = live.alone(PROMPT, 40, rule=rule)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (text, alone.finish_reason)
    assert reply.usage.completion_tokens == len(alone.token_ids)
    assert reply.usage.prompt_tokens == len(live.pair.tokenizer.encode(PROMPT))
    found = reply.model_extra["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    kept = sum(number * rounds for number, rounds in enumerate(histogram))
    assert sum(histogram) == found["num_spec_steps"] == alone.num_rounds
    assert kept == found["num_accepted_draft_tokens"] == alone.num_accepted_tokens
    assert found["num_draft_tokens"] == alone.num_draft_tokens
    assert found["num_rescued_tokens"] == alone.num_rescued_tokens
    assert found["num_spec_tokens"] == 4
    assert (alone.num_rescued_tokens > 0) == (rule != "exact")
    audit = choice.model_extra["fly"]["audit"]
    rescued = [at for at, why in enumerate(alone.why) if why is Why.RESCUED]
    for one, at in zip(audit["rescues"], rescued, strict=True):
        assert (one["position"], one["draft_id"]) == (at, alone.token_ids[at])
        assert one["choice_id"] == alone.reports[at].choice_id
        assert one["entropy"] == pytest.approx(alone.reports[at].entropy, abs=1e-3)
    refused = alone.why.count(Why.CORRECTED)
    assert sum(found["refused_by"].values()) == len(audit["refusals"]) == refused


def test_rules_and_numbers_side_by_side(live: Live) -> None:
    asked: list[dict[str, Any]] = [
        {"rule": "exact"}, {"rule": "fly", "entropy_threshold": 0.5}, {"margin_gap": 0.2},
        {"rule": "margin", "risk_budget": 1.0}, {}, {"rule": "fly", "window_size": 1},
    ]  # fmt: skip

    def ask(fly: dict[str, Any]) -> tuple[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 40, "fly": fly, "ignore_eos": False, "user": "Ada"}
        reply = live.post(body).json()
        return reply["choices"][0]["text"], reply["metrics"]["speculative_decoding"]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, asked))
    for (text, figures), fly in zip(found, asked, strict=True):
        if "risk_budget" in fly:
            assert 0 < figures["regret"] <= 1
        else:
            assert figures["regret"] is None
            assert text == live.alone(PROMPT, 40, **fly)[1]
    assert len({text for text, _ in found}) >= 4
    assert ask({"protect": ["[f-h]"]})[0] == found[4][0]
    assert ask({"protect": []})[0] == live.alone(PROMPT, 40, protect=())[1] != found[4][0]


def test_a_conversation_streamed_and_in_one_piece(live: Live) -> None:
    first, asked = {"role": "system", "content": "Hi to all."}, {"role": "user", "content": PROMPT}
    messages = [first, asked | {"content": [{"type": "text", "text": PROMPT}]}]
    alone, text = live.alone(live.pair.tokenizer.apply_chat_template([first, asked]), 10)
    reply = live.chat(messages, max_tokens=10)
    said = reply.choices[0].message
    assert (said.role, said.content) == ("assistant", text)
    usage = {"include_usage": True, "continuous_usage_stats": True}  # as guidellm asks for it
    given = {"stream_options": usage, "extra_body": {"fly": {"stream_why": True}}}
    *pieces, last = live.chat(messages, max_completion_tokens=10, stream=True, **given)
    nothing = [None] * (len(pieces) - 1)
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == text
    assert [one.choices[0].delta.role for one in pieces] == ["assistant", *nothing]
    assert {one.id for one in pieces} == {last.id}
    assert [one.choices[0].finish_reason for one in pieces[:-1]] == nothing
    assert pieces[-1].choices[0].finish_reason == reply.choices[0].finish_reason
    assert (last.choices, last.usage.completion_tokens) == ([], reply.usage.completion_tokens)
    assert last.usage.prompt_tokens_details.cached_tokens  # of the request before
    tokens = [one for piece in pieces for one in piece.choices[0].model_extra["fly"]["tokens"]]
    assert [one["id"] for one in tokens] == alone.token_ids
    assert [one["why"] for one in tokens] == [why.name.lower() for why in alone.why]
    assert "".join(one["text"] for one in tokens) == text
    assert all((one["other"] is None) == (one["why"] in ("matched", "bonus")) for one in tokens)


def test_stop_strings_and_logprobs(live: Live) -> None:
    """Of every token, why ever it stands there, as a pass over the whole text has them."""
    tokenizer, (_, text) = live.pair.tokenizer, live.alone(PROMPT, 40)
    stops = {"max_tokens": 60, "stop": ["?!", text[17:21]]}
    for more in (stops, {"max_tokens": 24, "temperature": 1.3, "seed": 3}):
        given: dict[str, Any] = {"logprobs": 3} | more
        (choice,) = live.completion(**given).choices
        if more is stops:
            cut = text[: text.index(text[17:21])]
            assert (choice.text, choice.finish_reason) == (cut, "stop")
        found = choice.logprobs.model_dump()
        pieces = [one.choices[0] for one in live.completion(**given, stream=True)]
        assert "".join(one.text for one in pieces) == choice.text
        streamed = [one.logprobs.model_dump() for one in pieces if one.logprobs]
        assert len(streamed) > 1
        assert {name: [one for part in streamed for one in part[name]] for name in found} == found
        tokens, offsets = found["tokens"], [*found["text_offset"], len(choice.text)]
        for token, (begin, end) in zip(tokens, itertools.pairwise(offsets), strict=True):
            added = choice.text[begin:end].lstrip("\ufffd")  # that is of tokens before it
            assert token.startswith((added, "bytes:"))

    asked = {"max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    reply = live.chat(HELLO, **asked)
    content = reply.choices[0].logprobs.content
    parts = [piece.choices[0].logprobs for piece in live.chat(HELLO, **asked, stream=True)]
    assert content == [one for part in parts if part is not None for one in part.content]
    prompt = tokenizer.apply_chat_template(HELLO)
    alone, text = live.alone(prompt, 24)
    assert reply.choices[0].message.content == text
    logits = logits_after(live.pair.target, [*prompt, *alone.token_ids])[len(prompt) - 1 : -1]
    expected = np.asarray(jax.nn.log_softmax(logits))
    assert Why.RESCUED in alone.why
    spelled = functools.partial(tokenizer.vocabulary.token_bytes, first=False)
    for one, token, values in zip(content, alone.token_ids, expected, strict=True):
        data = spelled(token)
        assert (bytes(one.bytes), one.token) == (data, data.decode("utf-8", "replace"))
        assert one.logprob == pytest.approx(values[token], abs=1e-4)
        best = np.argsort(-values)[:2]
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(values[best], abs=1e-4)
        assert [bytes(top.bytes) for top in one.top_logprobs] == [*map(spelled, best.tolist())]


def test_prompts_of_every_kind_and_several_answers(live: Live) -> None:
    prompts = [PROMPT, "Boris buys 7"]
    ids = [live.pair.tokenizer.encode(one) for one in prompts]
    first, second = (live.alone(one, 9)[1] for one in prompts)
    for prompt in (prompts, ids):
        reply = live.completion(prompt, max_tokens=9, n=2)
        expected = [*enumerate((first, first, second, second))]
        assert [(one.index, one.text) for one in reply.choices] == expected
        assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert live.completion(ids[0], max_tokens=9, n=None).choices[0].text == first


def test_draws(live: Live) -> None:
    def drawn(**given: Any) -> list[str]:
        reply = live.completion(max_tokens=12, **{"temperature": 1.0} | given)
        return [one.text for one in reply.choices]

    first = drawn(n=3, seed=5, top_p=0.95)
    assert len(set(first)) == 3
    assert [drawn(seed=seed, top_p=0.95)[0] for seed in (5, 6, 7)] == first
    assert drawn() != drawn()
    reply = live.completion([PROMPT] * 3, max_tokens=12, temperature=1.0)
    assert len({one.text for one in reply.choices}) == 3
    exact = {"fly": {"rule": "exact"}}
    _, text = live.alone(PROMPT, 12, rule="sampled", temperature=0.7, seed=9)
    assert drawn(seed=9, temperature=0.7, extra_body=exact) == [text]
    # With nothing drawn it does not matter what draws would be kept from.
    assert drawn(temperature=1e-40, top_p=0.1) == [live.alone(PROMPT, 12)[1]]


@pytest.mark.parametrize(("path", "body", "status", "code", "words"), [
    ("", b'{"prompt": "a', 400, None, "The body is not valid JSON"),
    ("", b'{"prompt": "\xff"}', 400, None, "send it in UTF-8"),
    ("", b'{"prompt": "\\ud800"}', 400, None, "prompt"), ("", {"prompt": []}, 400, None, "prompt"),
    ("", b"[" * 19_000, 400, None, "fewer levels"), (CHAT, {"messages": []}, 400, None, "messages"),
    ("", {}, 400, None, "prompt: Field required"), ("/v1/nowhere", {}, 404, None, "/openapi.json"),
    ("", {"prompt": [[]]}, 400, None, "is empty"),
    ("", {"prompt": [5] * 200}, 400, "context_length_exceeded", "has 200 tokens"),
    ("", {"prompt": "a", "model": "other"}, 404, "model_not_found", "'other'"),
    ("", {"prompt": "a", "fly": {"typo": 1}}, 400, "unknown_field", "'fly.typo'"),
    ("", b'{"prompt": "a", "temperature": NaN}', 400, None, "temperature"),
    ("", {"prompt": "a", "n": 7}, 400, None, "takes 6"),
    ("", {"prompt": "a", "logprobs": 5}, 400, None, "engine gives at most 4"),
    ("", {"prompt": "a", "fly": {"rule": "typical"}}, 400, "rule_not_served", "exact, margin"),
    ("", {"prompt": "a", "fly": {"rule": "fly & ("}}, 400, None, "joined by &"),
    ("", {"prompt": "a", "fly": {"rule": "fly", "window_size": 9}}, 400, None, "window_size=9"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, None, "No tools."),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, None, ""),
    ("/v1/models", {}, 405, None, "not take that method"),
    ("", {"prompt": "a" * 30_000}, 413, "body_too_large", "more than 20000 bytes"),
    ("", [b" " * 9000] * 4, 413, "body_too_large", "--max_body"),  # of unsaid length
])  # fmt: skip
def test_what_is_refused(
    live: Live, path: str, body: object, status: int, code: str | None, words: str
) -> None:
    for streams in (False, True):
        if isinstance(body, dict) and "prompt" in body:
            body = body | {"stream": streams}
        reply = live.post(body, path or "/v1/completions")
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (status, code), error
        assert words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


def test_only_json_is_taken(live: Live) -> None:
    """Else a page of any site could have its reader's browser ask."""
    boundary = "multipart/form-data; boundary=application/json"
    kinds = dict.fromkeys((None, "", "text/plain", "application/jsonp", boundary), 415)
    kinds |= {"Application/JSON; charset=utf-8": 200, "application/vnd.a-b+json": 200}
    for kind, status in kinds.items():
        given = {} if kind is None else {"Content-Type": kind}
        headers = {"Authorization": f"Bearer {KEY}"} | given
        reply = live.post({"prompt": PROMPT, "max_tokens": 1}, headers=headers)
        assert reply.status_code == status, kind
        assert status == 200 or "application/json" in reply.json()["error"]["message"]


def test_the_key(live: Live) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        live.client("another").models.list()
    for path in ("/health", "/metrics", "/version"):
        assert httpx.get(live.url + path).status_code == 200
    for kind, status in (("bearer ", 200), ("BEARER", 200), ("Basic", 401)):
        headers = {"Authorization": f"{kind} {KEY}"}
        assert httpx.get(f"{live.url}/v1/models", headers=headers).status_code == status, kind
    salt = live.service.limits.cache_salt
    assert salt(f"bearer  {KEY}", "a") == salt(f"Bearer {KEY}", "a") != salt("Bearer other", "a")
    (model,) = live.client().models.list()
    assert model.id == NAME
    assert live.client().models.retrieve(NAME).model_extra["max_model_len"] == LENGTH  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        live.client().models.retrieve("org/other")


def test_who_leaves_frees_the_slots(live: Live) -> None:
    """Before a token has come; `Smoke` has one leave after that."""
    with live.held():
        with live.streaming(n=4):
            until(lambda: len(live.engine.waiting) == 4)
        until(lambda: not live.engine.waiting)
        with ThreadPoolExecutor(1) as pool:  # in one piece: nothing has come yet
            going = pool.submit(live.post, {"prompt": PROMPT, "max_tokens": 80}, timeout=2)
            until(lambda: len(live.engine.waiting) == 1)
            assert isinstance(going.exception(), httpx.ReadTimeout)
        until(lambda: live.service.num_open == 0)


def test_the_queue_is_full(live: Live) -> None:
    with live.held(), live.streaming(n=SLOTS + QUEUE, max_tokens=3) as events:
        until(lambda: live.service.num_open == SLOTS + QUEUE)
        with pytest.raises(openai.RateLimitError) as caught:
            live.completion()
        assert caught.value.response.headers["Retry-After"] == "1"
        live.engine.gate.set()
        *chunks, end = events
    assert end == "[DONE]"
    assert sum(json.loads(one)["choices"][0]["finish_reason"] is not None for one in chunks) == 6


def test_a_request_that_takes_too_long(live: Live) -> None:
    with limited(live.service, request_timeout=0.2), live.held():
        reply = live.post({"prompt": PROMPT})
        assert reply.status_code == 408
        assert reply.headers["x-should-retry"] == "false"
        with live.streaming() as events:
            *_, error, end = events
        assert json.loads(error)["error"]["code"] == "request_timeout"
        assert end == "[DONE]"


def test_a_prompt_whose_tokens_take_too_long(live: Live, monkeypatch: Patch) -> None:
    go_on, encoded = threading.Event(), live.service._encoded
    monkeypatch.setattr(live.service, "_encoded", lambda one: go_on.wait(30) and encoded(one))
    with limited(live.service, request_timeout=0.2):
        for streams in (False, True):
            assert live.post({"prompt": PROMPT, "stream": streams}).status_code == 408
            assert live.service.num_open == 0
    with live.held(), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.post, {"prompt": PROMPT}, timeout=30)
        until(lambda: live.service.num_open == 1)
        asyncio.run_coroutine_threadsafe(live.service.drain(0.1), live.loop).result(30)
        go_on.set()
        assert asked.result().status_code == 503
    live.service.state = "ready"


def test_all_of_a_request_is_handed_in_or_none(live: Live, monkeypatch: Patch) -> None:
    submit, calls = live.service.engine.submit, itertools.count()

    async def only_one(*given: Any, **named: Any) -> Any:
        return await (asyncio.sleep(3600) if next(calls) else submit(*given, **named))

    monkeypatch.setattr(live.service.engine, "submit", only_one)
    with live.held(), limited(live.service, request_timeout=0.5):
        assert live.post({"prompt": PROMPT, "n": 3}).status_code == 408
        until(lambda: not live.engine.waiting)


def test_who_does_not_read_is_given_up(live: Live) -> None:
    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    async def run() -> None:
        asked = CompletionRequest(prompt=PROMPT, max_tokens=80, stream=True)
        stream = await live.service.answer(asked, TextStyle())
        never: Any = lambda: asyncio.sleep(3600)  # noqa: E731
        await EventStream(stream, Client(never, 600), 0.1)({}, never, stuck)

    asyncio.run_coroutine_threadsafe(run(), live.loop).result(30)


def test_what_any_server_must_do(live: Live) -> None:
    """The part that is run against servers with real models too."""
    held: list[str] = []
    Smoke(live.url, KEY).run(held.append)
    assert len(held) == 9


def test_metrics(live: Live) -> None:
    def scraped() -> dict[str, float]:
        text = httpx.get(f"{live.url}/metrics").text
        samples = [one for found in text_string_to_metric_families(text) for one in found.samples]
        return {one.name + str(sorted(one.labels.items())): one.value for one in samples}

    before = scraped()
    reply = live.post({"prompt": PROMPT, "max_tokens": 40, "n": 2}).json()
    live.post({"prompt": PROMPT, "model": "other"})
    live.wait_until_free()
    live.service.state = "starting"
    assert httpx.get(f"{live.url}/health").status_code == 503  # a probe is no request
    live.service.state = "ready"
    after = scraped()
    found, usage = reply["metrics"]["speculative_decoding"], reply["usage"]
    grown = {key: after[key] - before.get(key, 0) for key in after}
    for name, value in {
        "spec_decode_num_drafts_total": found["num_spec_steps"],
        "spec_decode_num_draft_tokens_total": found["num_draft_tokens"],
        "spec_decode_num_accepted_tokens_total": found["num_accepted_draft_tokens"],
        "spec_decode_num_rescued_tokens_total": found["num_rescued_tokens"],
        "generation_tokens_total": usage["completion_tokens"],
        "prompt_tokens_total": 2 * usage["prompt_tokens"], "time_to_first_token_seconds_count": 2,
        "compilations": 0,
    }.items():  # fmt: skip
        assert grown[f"fly_jax:{name}[]"] == value, name
    refused = {key: one for key, one in grown.items() if "request_refused_total" in key and one}
    assert refused == {"fly_jax:request_refused_total[('status', '404')]": 1}
    assert sum(one for key, one in grown.items() if "request_success_total" in key) == 2
    assert after["fly_jax:num_slots[]"] == SLOTS
    assert after["fly_jax:spec_decode_depth[]"] == after["fly_jax:num_spec_tokens[]"]
    first = grown["fly_jax:spec_decode_num_accepted_tokens_per_pos_total[('position', '0')]"]
    assert first == sum(found["acceptance_histogram"][1:])


def test_the_examples_of_the_page_run(live: Live, capsys: Captured) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    asked = re.findall(r"localhost:8000(/\S+) .*?-d '(.*?)'", text, re.DOTALL)
    assert len(asked) == 2
    for path, body in asked:
        reply = live.post(body.encode(), path)
        assert reply.status_code == 200
        assert '"finish_reason":"' in reply.text.replace('": "', '":"')
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    block = block.replace("http://localhost:8000", live.url).replace('"none"', repr(KEY))
    exec(compile(block, "serving.md", "exec"), names := dict[str, Any]())
    names["client"].close()
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("chat", [False, True])
def test_bench_serve(live: Live, chat: bool, tmp_path: Path, ran: Ran, refused: Refused) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\nBoris\n")
    refused(*BENCH, f"--url={live.url}", "--api_key=wrong", words=["401"])
    named = [f"--url={live.url}", "--api_key=wrong", "--model=any"]
    assert "no stream" not in refused(*BENCH, *named, words=["refuses (401)"])
    asked = ["--concurrency=1,2", '--extra_body={"fly": {"rule": "exact"}}', *["--chat"] * chat]
    server = [f"--url={live.url}", f"--api_key={KEY}"]
    given = [*BENCH, *server, *asked, f"--prompts_file={prompts}", "--json"]
    measured = json.loads(ran(*given).out)["measured"]
    for found, number in zip(measured, (1, 2), strict=True):
        assert (found["concurrency"], found["requests"]) == (number, 3)
        assert found["mean_acceptance_length"] >= 1
        assert found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
        assert found["output_throughput"] >= found["request_throughput"]


def test_nobody_reads_a_prompt_by_guessing_its_tokens(live: Live) -> None:
    """A block of tokens is guessed as a whole, and with the same key, or not at all."""
    secret = [3 + 7 * at % 50 for at in range(45)]

    def cached(length: int, key: str = KEY, salt: str | None = None) -> int:
        given: Any = {"prompt": [*secret[:length], 60], "extra_body": {"cache_salt": salt}}
        reply: Any = live.client(key).completions.create(model=NAME, max_tokens=1, **given)
        return int(reply.usage.prompt_tokens_details.cached_tokens)

    guesses: tuple[tuple[Any, ...], ...] = ((6,), (20,), (31,), (40,), (31, OTHER), (40, OTHER))
    for guess in (*guesses, (40, KEY, "mine"), (40, OTHER, "mine")):
        live.completion(secret, max_tokens=4)
        assert cached(*guess) == 32 * (guess == (40,)), guess
    assert cached(40, OTHER, "mine") == 32, "of its own, by now"
    assert cached(40, OTHER, "yours") == 0
    assert live.post({"prompt": "a", "cache_salt": ""}).status_code == 400


def test_who_takes_nothing_is_cut_off(live: Live) -> None:
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with limited(live.service, client_timeout=0.5), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", int(live.url.split(":")[-1])))
        connection.sendall(asked * 400)  # some 10 MB of replies, which nobody reads
        time.sleep(3)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(2**20):
                received += len(data)
    assert 0 < received < 200 * len(httpx.get(f"{live.url}/openapi.json").content)


@pytest.mark.parametrize("name", attacks.NAMES)
def test_numbers_that_have_no_place(live: Live, name: str) -> None:
    for given in attacks.NUMBERS:
        fits = {
            **dict.fromkeys(("window_size", "entropy_top_k"), False),
            "risk_budget": -1 < given <= 10_000, "max_tokens": given == 2**31 - 1,
            "top_k": given in (-1, 2**31 - 1), "seed": -1 <= given <= 2**32,
        }.get(name, name in attacks.RULE_NUMBERS and -1 < given <= 2**64)  # fmt: skip
        reply = live.post(attacks.with_number(name, given).body)
        assert reply.status_code == (200 if fits else 400), reply.text
        assert fits or name in reply.json()["error"]["message"]
