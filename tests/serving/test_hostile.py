"""What careless and hostile clients do to a live server: each attempt ends soon, in a sentence.

And how a server ends, and what process 0 of several tells the others.
"""

import asyncio
import collections
import dataclasses
import gc
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import attacks
import httpx
import numpy as np
import pytest
import uvicorn
from attacks import BODY, HALVES, HEALTH, SIZE, TEXT, Attack, connected, sent
from launch_types import Patch
from live_server import HEADERS, Stuck, limited, serving, started, stuck_service, until

from fly_jax import FlyJaxError, Lossy, Margin, Request, RequestState, Sampling
from fly_jax.engine.slots import Prefix, Slots
from fly_jax.launch.flags import Flags
from fly_jax.launch.serve import ServeFlags, _limits
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.tokenizer import load_tokenizer
from fly_jax.serving.http.limits import ServerLimits
from fly_jax.serving.http.run import Connection, ServerFailed, address, bound, run, serve
from fly_jax.serving.http.service import Service
from fly_jax.serving.lockstep import decoded, encoded
from fly_jax.verification.rules import RULES, Budget, Exact, Fly, Rule

_SECONDS, _MEBIBYTES = 0.5, 200  # of seven seconds, and of up to two gibibytes


@pytest.fixture(scope="module")
def service() -> Service:
    return stuck_service()


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving(service) as found:
        yield found


def attacked(url: str, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The reply, and the most seconds that others waited meanwhile."""
    waits, is_done = [0.0], threading.Event()

    def others() -> None:
        with httpx.Client() as client:
            while not is_done.is_set():
                begun = time.perf_counter()
                client.get(f"{url}/health", timeout=60)
                waits.append(time.perf_counter() - begun)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(others)
        reply = httpx.post(url + path, content=body, headers=HEADERS, timeout=60)
        is_done.set()
    return reply, max(waits)


def most_memory() -> float:
    """Mebibytes of this process at its peak."""
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) / 2**10


@pytest.mark.parametrize("attack", attacks.MANY_THINGS)
def test_a_body_of_many_small_things(url: str, attack: Attack) -> None:
    """Neither others wait for it, nor does it take much memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = most_memory()
    reply, wait = attacked(url, attack.path, attack.body)
    assert most_memory() - before < _MEBIBYTES
    assert wait < _SECONDS
    assert reply.status_code == 400
    assert attack.words in reply.json()["error"]["message"]
    assert len(reply.content) < 4000, "errors quote little of what was given"


def test_a_long_text_is_cut_into_tokens_while_others_are_answered() -> None:
    text = "Ada has 3 apples and eats 2. " * (SIZE // 30)
    with serving(stuck_service(load_tokenizer(EMBEDDED_PAIR[0]))) as url:
        reply, wait = attacked(url, TEXT, json.dumps({"prompt": text}).encode())
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert wait < _SECONDS


def refusals(service: Service) -> collections.Counter[str]:
    """How many there have been, by status."""
    lines = re.findall(r'refused_total{status="(\d+)"} (\d+)', service.metrics.text().decode())
    return collections.Counter({status: int(number) for status, number in lines})


@pytest.mark.parametrize("pieces", HALVES.values(), ids=HALVES)
def test_half_a_request_is_given_up(service: Service, url: str, pieces: tuple[bytes, ...]) -> None:
    before = refusals(service)
    with limited(service, request_timeout=0.5):
        reply, seconds = sent(url, *pieces, wait=0.1)
    *_, last = reply.split(b"HTTP/1.1 ")
    assert last.startswith(b"408")
    assert b"The request was not there in 0.5 seconds" in last
    assert 0.4 < seconds < 4.5
    until(lambda: service.num_open == 0)
    assert refusals(service) - before == {"408": 1}


def test_what_is_refused_before_its_body_is_there_is_closed_too(service: Service, url: str) -> None:
    with limited(service, request_timeout=0.5):
        reply, seconds = sent(url, BODY.replace(b"99", b"99999999") + b"{")
    assert reply.startswith(b"HTTP/1.1 413")
    assert reply.count(b"HTTP/1.1") == 1
    assert seconds < 4.5


def test_a_request_that_is_decoded_has_arrived(
    service: Service, url: str, monkeypatch: Patch
) -> None:
    """Another bound is for it; and an idle connection is closed by uvicorn's, of 5 seconds."""
    made = Connection.connection_made

    def begun(one: Connection, transport: asyncio.Transport) -> None:
        assert one.timeout_keep_alive == 5
        one.timeout_keep_alive = 1
        made(one, transport)

    monkeypatch.setattr(Connection, "connection_made", begun)
    with httpx.stream("POST", url + TEXT, json={"prompt": [1], "stream": True}) as reply:
        assert reply.status_code == 200
        until(lambda: service.num_open == 1)
    until(lambda: service.num_open == 0)
    reply, seconds = sent(url, HEALTH + b"\r\n")
    assert reply.startswith(b"HTTP/1.1 200")
    assert 0.9 < seconds < 4


def test_too_many_connections(service: Service, url: str) -> None:
    with limited(service, max_connections=3), connected(url), connected(url), connected(url):
        time.sleep(0.2)
        reply, _ = sent(url)
        assert reply.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in reply
    until(lambda: httpx.get(f"{url}/health").status_code == 200)


def test_an_answer_is_shared_when_it_is_finished() -> None:
    slots, longer = Slots((2,), 16), Request(range(1, 60), cache_salt="a")
    state = RequestState(Request(range(1, 21), cache_salt="a"), Exact())
    slots.take(state, Prefix())
    state.generation.token_ids += range(21, 60)
    assert slots.shared(longer).length == 16
    state.finished = 1.0
    assert slots.shared(longer).length == 48
    assert slots.shared(dataclasses.replace(longer, cache_salt="b")).length == 0
    slots.block = 0
    assert slots.shared(longer).length == 0


LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def test_a_server_is_called_by_its_names_only(service: Service, url: str) -> None:
    """A page whose name is made to lead to this machine is another site's to the browser."""
    with limited(service, allowed_hosts=LOOPBACK):
        for name in (*LOOPBACK, "LocalHost", "localhost:80", "[::1]:8000"):
            assert httpx.get(f"{url}/health", headers={"Host": name}).status_code == 200, name
        for name, path in itertools.product(attacks.FOREIGN_HOSTS, ("/", "/health", "/v1/models")):
            reply = httpx.get(url + path, headers={"Host": name})
            assert reply.status_code == 400, name
            assert "--allowed_hosts" in reply.json()["error"]["message"]
    assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 200


def limits_of(arguments: list[str], address: str = "::") -> ServerLimits:
    return _limits(Flags("serve", ServeFlags).parse(arguments, ""), address)


@pytest.mark.parametrize(("given", "at", "names"), [
    ([], "127.0.0.1", LOOPBACK), (["--host=Box"], "127.0.1.1", (*LOOPBACK, "box", "127.0.1.1")),
    (["--host=localhost"], "::1", LOOPBACK), (["--host=0.0.0.0"], "0.0.0.0", ()),
    (["--host=127.0.0.2"], "127.0.0.2", (*LOOPBACK, "127.0.0.2")),
    (["--host=::ffff:127.0.0.1"], "::ffff:127.0.0.1", (*LOOPBACK, "[::ffff:127.0.0.1]")),
    (["--allowed_hosts=Box", "--allowed_hosts=localhost"], "127.0.0.1", ("box", "localhost")),
    (["--allowed_hosts=*"], "127.0.0.1", ()), (["--api_key=a", "--api_key=b"], "127.0.0.1", ()),
])  # fmt: skip
def test_names_if_nobody_says(monkeypatch: Patch, given: list[str], at: str, names: Any) -> None:
    monkeypatch.delenv("FLY_JAX_API_KEY", raising=False)
    assert limits_of(given, at).allowed_hosts == names


def test_keys_of_a_file(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLY_JAX_API_KEY", "unused")
    path = tmp_path / "keys"
    path.write_text("\ufeffone\ntwo \n\n", "utf-8")
    of_file = f"--api_keys_file={path}"
    assert limits_of(["--api_key=zero", of_file]).api_keys == ("zero", "one", "two")
    path.write_text("\n")
    with pytest.raises(FlyJaxError, match="is empty"):
        limits_of([of_file])


@pytest.mark.parametrize("fails", ["warm_up", "step", "startup", "draining"])
def test_a_failure_ends_the_server(monkeypatch: Patch, fails: str) -> None:
    """Where nothing has begun, in a step, and in a step while it drains."""
    fresh = stuck_service()

    def fail(*_: object, **__: object) -> list[Any]:
        if fails != "draining" or fresh.state == "draining":
            raise RuntimeError("the chip is gone")
        return []

    owner = uvicorn.Server if fails == "startup" else Stuck
    monkeypatch.setattr(owner, "step" if fails == "draining" else fails, fail)
    url, loop, stop, ended = started(fresh)
    if fails in ("step", "draining"):
        until(lambda: fresh.state == "ready")
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": [1, 2]}
            asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            if fails == "draining":
                until(lambda: fresh.num_open == 1)
                loop.call_soon_threadsafe(stop.set)
        assert asked.result().status_code == 503
        if fails == "step":
            assert "the chip is gone" in asked.result().json()["error"]["message"]
    with pytest.raises(ServerFailed, match="the chip is gone"):
        ended.result(30)


def test_who_stops_it_while_it_compiles_is_told_so(monkeypatch: Patch) -> None:
    fresh, gate, said = stuck_service(), threading.Event(), list[str]()
    monkeypatch.setattr(Stuck, "warm_up", lambda *_: gate.wait(30))
    _, loop, stop, ended = started(fresh, said.append)
    loop.call_soon_threadsafe(stop.set)
    until(lambda: bool(said))
    gate.set()
    ended.result(30)
    (line,) = said
    assert "a second signal stops at once" in line


def test_small_pieces_are_sent_at_once(monkeypatch: Patch) -> None:
    """Else a reply of two, and a token after another, waits 40 ms for the client's TCP."""
    found, take = list[int](), Connection.connection_made

    def noted(self: Connection, transport: Any) -> None:
        accepted = transport.get_extra_info("socket")
        found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        take(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    with serving(stuck_service()) as url:
        httpx.get(f"{url}/health")
    assert found == [1]


def test_a_second_signal_ends_it_at_once() -> None:
    listening, say, seen, frozen = bound("127.0.0.1", 0), Mock(), list[str](), list[int]()
    fresh, url = stuck_service(), address(listening)
    gc.unfreeze()

    def client() -> None:
        until(lambda: fresh.state == "ready")
        body = {"prompt": [1, 2], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            another = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert another.status_code == 503
            assert "about to stop" in another.json()["error"]["message"]
            assert fresh.num_open == 1
            frozen.append(gc.get_freeze_count())
            os.kill(os.getpid(), signal.SIGTERM)
            seen.extend(line[6:] for line in reply.iter_lines() if line)

    with listening, ThreadPoolExecutor(1) as pool:
        pool.submit(client)
        settings: dict[str, Any] = {"grace_period": 3600, "say": say, "on_progress": Mock()}
        run(partial(serve, fresh, listening, **settings), fresh.cancel)
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
