"""How a server ends, and what process 0 of several tells the others."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import uvicorn
from launch_types import Patch
from live_server import Stuck, serving, started, stuck_service, until

from fly_jax import Budget, Exact, Fly, Lossy, Margin, Request, Rule, Sampling
from fly_jax.serving.http.run import Connection, ServerFailed, address, bound, run, serve
from fly_jax.serving.http.service import Service
from fly_jax.serving.lockstep import decoded, encoded
from fly_jax.verification.rules import RULES


@pytest.fixture
def service() -> Service:
    return stuck_service()


@pytest.mark.parametrize("fails", ["warm_up", "step", "startup"])
def test_a_failure_ends_the_server(service: Service, monkeypatch: Patch, fails: str) -> None:
    fail = Mock(side_effect=RuntimeError("the chip is gone"))
    monkeypatch.setattr(uvicorn.Server if fails == "startup" else Stuck, fails, fail)
    url, _, _, ended = started(service)
    if fails == "step":
        until(lambda: service.state == "ready")
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2]}, timeout=60)
        assert reply.status_code == 503
        assert "the chip is gone" in reply.json()["error"]["message"]
    with pytest.raises(ServerFailed, match="the chip is gone"):
        ended.result(30)


def test_a_failure_while_it_drains_ends_the_server_too(
    service: Service, monkeypatch: Patch
) -> None:
    def step() -> list[Any]:
        if service.state == "draining":
            raise RuntimeError("the chip is gone")
        return []

    monkeypatch.setattr(Stuck, "step", Mock(side_effect=step))
    url, loop, stop, ended = started(service)
    until(lambda: service.state == "ready")
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": [1, 2]}
        reply = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        until(lambda: service.num_open == 1)
        loop.call_soon_threadsafe(stop.set)
        assert reply.result().status_code == 503
    with pytest.raises(ServerFailed, match="the chip is gone"):
        ended.result(30)


def test_small_pieces_are_sent_at_once(service: Service, monkeypatch: Patch) -> None:
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
    listening, say, seen, frozen = bound("127.0.0.1", 0), Mock(), list[str](), list[int]()
    url = address(listening)

    def client() -> None:
        until(lambda: service.state == "ready")
        body = {"prompt": [1, 2], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            another = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert another.status_code == 503
            assert "about to stop" in another.json()["error"]["message"]
            assert service.num_open == 1
            frozen.append(gc.get_freeze_count())
            os.kill(os.getpid(), signal.SIGTERM)
            seen.extend(line[6:] for line in reply.iter_lines() if line)

    with listening, ThreadPoolExecutor(1) as pool:
        pool.submit(client)
        settings: dict[str, Any] = {"grace_period": 3600, "say": say, "on_progress": Mock()}
        run(partial(serve, service, listening, **settings), service.cancel)
    error, end = seen
    assert "stopped before it was done" in json.loads(error)["error"]["message"]
    assert end == "[DONE]"
    assert "1 under way may go on for 3600 s" in str(say.mock_calls)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


JOINED = ((Fly(window_size=2) | Margin(gap=1.5)) & Lossy(), Fly(entropy="normalized") & Margin())
ASKED_FOR = [Exact(), Budget(JOINED[1], total=3.0), JOINED[0], Margin(gap=np.float32(0.25))]
ASKED_FOR += [kind() for kind in RULES.values()]


@pytest.mark.parametrize("rule", ASKED_FOR, ids=lambda rule: type(rule).__name__)
def test_a_request_arrives_as_it_was_sent(rule: Rule) -> None:
    drawn, others = Sampling(0.7, top_k=5), {"protected_token_ids": (5, 6)}
    sent = Request([1, 2, 3], 20, rule, drawn, 4, ("\n", "é"), **others)
    arrived = decoded(json.loads(json.dumps(encoded(sent))))
    assert isinstance(arrived, Request)
    assert arrived == dataclasses.replace(sent, stop=["\n", "é"], protected_token_ids=[5, 6])


def test_nothing_else_is_made_of_a_message() -> None:
    with pytest.raises(KeyError):
        decoded({"Path": {}})
