"""How a server ends, and what process 0 of several tells the others."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import socket
import threading
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from live_server import Stuck, serving, started, stuck_service, until

from fly_jax.engine.request import Request
from fly_jax.serving.http.protocol import ApiError, CompletionRequest
from fly_jax.serving.http.replies import TextStyle
from fly_jax.serving.http.run import Connection, ServerFailed, address, bound, run, serve
from fly_jax.serving.http.service import Service
from fly_jax.serving.lockstep import decoded, encoded
from fly_jax.verification.rules import RULES, Budget, Exact, Fly, Lossy, Margin, Rule
from fly_jax.verification.sampling import Sampling


@pytest.fixture
def service() -> Service:
    return stuck_service()


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("the chip is gone")


@pytest.mark.parametrize("fails", ["warm_up", "step", "app"])
def test_a_failure_ends_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    if fails == "app":
        monkeypatch.setattr(uvicorn.Server, "startup", fail)
    else:
        monkeypatch.setattr(Stuck, fails, fail)
    listening = bound("127.0.0.1", 0)
    url = address(listening)
    _, _, ended = started(service, listening)
    if fails == "step":
        until(lambda: service.state == "ready")
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2]}, timeout=60)
        assert reply.status_code == 503
        assert "the chip is gone" in reply.json()["error"]["message"]
    with pytest.raises(ServerFailed, match="the chip is gone"):
        ended.result(30)
    listening.close()


def test_small_pieces_are_sent_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reply of two, and a token after another, waits 40 ms for the client's TCP."""
    found, take = list[int](), Connection.connection_made

    def noted(self: Connection, transport: Any) -> None:
        accepted = transport.get_extra_info("socket")
        found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        take(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    with serving(service) as url:
        httpx.get(f"{url}/health")
    assert found == [1]


def test_a_second_signal_ends_it_at_once(service: Service) -> None:
    listening = bound("127.0.0.1", 0)
    url, said, seen, frozen = address(listening), list[str](), list[str](), list[int]()

    def client() -> None:
        until(lambda: service.state == "ready")
        body = {"prompt": [1, 2], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert service.num_open == 1
            frozen.append(gc.get_freeze_count())
            os.kill(os.getpid(), signal.SIGTERM)
            seen.extend(line[6:] for line in reply.iter_lines() if line)

    asking = threading.Thread(target=client)
    asking.start()
    settings: dict[str, Any] = {"grace_period": 3600, "on_progress": lambda *_: None}
    run(partial(serve, service, listening, say=said.append, **settings), service.cancel)
    asking.join()
    error, end = seen
    assert "stopped before it was done" in json.loads(error)["error"]["message"]
    assert end == "[DONE]"
    assert any("1 under way may go on for 3600 s" in line for line in said)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0
    listening.close()


def test_an_engine_that_has_stopped_takes_nothing(service: Service) -> None:
    """As when a prompt's tokens are there only then."""
    service.state = "ready"
    with pytest.raises(ApiError) as caught:
        asyncio.run(service.answer(CompletionRequest(prompt=[1]), TextStyle()))
    assert caught.value.status == 503
    assert service.num_open == 0


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
