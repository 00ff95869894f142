"""How a server ends: by its engine, by what answers HTTP, or by a second signal."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from live_server import started, until
from random_pairs import random_target

from fly_jax.decoding.config import DecodingConfig, RoundSpec, RoundStatic
from fly_jax.engine.engine import Engine
from fly_jax.serving.async_engine import AsyncEngine
from fly_jax.serving.http.limits import ServerLimits
from fly_jax.serving.http.request_builder import RequestBuilder
from fly_jax.serving.http.run import ServerFailed, address, bound, run
from fly_jax.serving.http.service import Service
from fly_jax.verification.rules import Exact


class Stuck(Engine):
    """An engine that takes requests and decodes nothing."""

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        pass

    def step(self) -> list[Any]:
        time.sleep(0.002)
        return []


@pytest.fixture
def service() -> Service:
    target = random_target(2)
    engine = Stuck(
        target, None, RoundSpec(Exact(), RoundStatic(0, audits=True)), num_slots=1, max_length=60
    )
    tokenizer = types.SimpleNamespace(chat_template=None)
    pair: Any = types.SimpleNamespace(target=target, tokenizer=tokenizer)
    builder = RequestBuilder.of(DecodingConfig().without_draft())
    return Service("stuck", AsyncEngine(engine), pair, builder, ServerLimits())


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


def test_a_second_signal_ends_it_at_once(service: Service) -> None:
    listening = bound("127.0.0.1", 0)
    url, said, seen = address(listening), list[str](), list[str]()

    def client() -> None:
        until(lambda: service.state == "ready")
        body = {"prompt": [1, 2], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert service.num_open == 1
            os.kill(os.getpid(), signal.SIGTERM)
            seen.extend(line[6:] for line in reply.iter_lines() if line)

    asking = threading.Thread(target=client)
    asking.start()
    run(service, listening, grace_period=3600, say=said.append, on_progress=lambda *_: None)
    asking.join()
    error, end = seen
    assert "stopped before it was done" in json.loads(error)["error"]["message"]
    assert end == "[DONE]"
    assert any("1 under way may go on for 3600 s" in line for line in said)
    listening.close()
