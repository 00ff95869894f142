"""A server that runs in a thread, over a tiny random pair with a chat template."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import httpx
import openai
import pytest
from launch_types import Folders
from random_pairs import random_target

from fly_jax import AsyncEngine, Engine, Exact, Generation, RequestState, Settled, generate
from fly_jax.decoding.config import DecodingConfig, RoundSpec, RoundStatic
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.serving.http.limits import ServerLimits
from fly_jax.serving.http.request_builder import RequestBuilder
from fly_jax.serving.http.run import address, bound, serve
from fly_jax.serving.http.service import Service

KEY, OTHER, NAME, SLOTS, QUEUE = "a secret", "another secret", "tiny", 3, 3
LENGTH = 58  # fits into the shortest cache, so that few programs are compiled
GIVEN = {
    "rule": "margin", "margin_gap": 1.5, "num_speculative_tokens": 4, "window_size": 2,
    "protect": ("[f-h]",),
}  # fmt: skip
PROMPT = "Ada has 3 apples"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


class Gated(Engine):
    """An engine whose steps a test can hold back, so that requests are going for sure."""

    gate: threading.Event

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        assert self.gate.wait(30)
        super().warm_up(on_progress)

    def step(self) -> list[tuple[RequestState, Settled]]:
        if not self.gate.is_set():
            time.sleep(0.002)
            return []
        return super().step()


class Stuck(Engine):
    """An engine that takes requests and decodes nothing."""

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        pass

    def step(self) -> list[Any]:
        time.sleep(0.002)
        return []


def stuck_service(tokenizer: Any = None) -> Service:
    """A service over such an engine, which without a tokenizer takes token ids only."""
    target, spec = random_target(2), RoundSpec(Exact(), RoundStatic(0, audits=True))
    engine = Stuck(target, None, spec, num_slots=1, max_length=60)
    tokenizer = tokenizer or SimpleNamespace(chat_template=None)
    pair: Any = SimpleNamespace(target=target, tokenizer=tokenizer, protected_token_ids=tuple)
    builder = RequestBuilder.of(DecodingConfig().without_draft())
    return Service("stuck", AsyncEngine(engine), pair, builder, ServerLimits())


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serves what needs no warm-up, in a thread; its address."""
    url, loop, stop, ended = started(service)
    until(lambda: service.state == "ready")
    yield url
    loop.call_soon_threadsafe(stop.set)
    ended.result(30)


@dataclasses.dataclass
class Live:
    service: Service
    engine: Gated
    pair: Pair
    url: str
    loop: asyncio.AbstractEventLoop
    clients: contextlib.ExitStack

    def client(self, key: str = KEY) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        return self.clients.enter_context(made)

    def completion(self, prompt: Any = None, **given: Any) -> Any:
        return self.client().completions.create(model=NAME, prompt=prompt or PROMPT, **given)

    def chat(self, messages: Any, **given: Any) -> Any:
        return self.client().chat.completions.create(model=NAME, messages=messages, **given)

    def post(self, body: object, path: str = "/v1/completions", **given: Any) -> httpx.Response:
        data: Any = json.dumps(body).encode() if isinstance(body, dict) else body
        given = {"headers": HEADERS, "timeout": 60} | given
        return httpx.post(self.url + path, content=data, **given)

    def alone(self, prompt: str | list[int], limit: int, **given: Any) -> tuple[Generation, str]:
        """What the library gives for a prompt, with its text."""
        (one,) = generate(self.pair, [prompt], max_new_tokens=limit, audits=True, **GIVEN | given)  # type: ignore[list-item]
        return one, self.pair.tokenizer.decode(one.token_ids, continues=True)

    @contextlib.contextmanager
    def streaming(self, **given: Any) -> Iterator[Iterator[str]]:
        """The events of a stream, which can be left at any time."""
        body = {"prompt": PROMPT, "max_tokens": 80, "stream": True} | given
        given: Any = {"json": body, "headers": HEADERS, "timeout": 60}
        with httpx.stream("POST", f"{self.url}/v1/completions", **given) as reply:
            assert reply.status_code == 200
            yield (line[6:] for line in reply.iter_lines() if line)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is decoded meanwhile."""
        self.engine.gate.clear()
        try:
            yield
        finally:
            self.engine.gate.set()

    def wait_until_free(self) -> None:
        until(lambda: self.engine.is_idle and self.service.num_open == 0)
        assert self.engine.slots.num_free == SLOTS


def limited(service: Service, **limits: Any) -> contextlib.AbstractContextManager[object]:
    """The service has other limits meanwhile."""
    return patch.object(service, "limits", dataclasses.replace(service.limits, **limits))


def until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it has not come to that in half a minute")


def started(service: Service, say: Any = None) -> tuple[str, Any, asyncio.Event, Future[None]]:
    """Serves in a thread: its address, its loop, what stops it, and its end."""
    begun, ended = Future[tuple[str, Any, asyncio.Event]](), Future[None]()

    async def run() -> None:
        stop, nothing = asyncio.Event(), Mock()
        with bound("127.0.0.1", 0) as listening:
            begun.set_result((address(listening), asyncio.get_running_loop(), stop))
            given: Any = {"grace_period": 5, "say": say or nothing, "on_progress": nothing}
            await serve(service, listening, stop=stop, **given)

    def thread() -> None:
        try:
            ended.set_result(asyncio.run(run()))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=thread, daemon=True).start()
    return *begun.result(), ended


@pytest.fixture
def live(server: Live) -> Iterator[Live]:
    """The server of the file; no test leaves anything behind in it."""
    yield server
    server.wait_until_free()


@pytest.fixture(scope="module")
def server(chatty_pair: Folders) -> Iterator[Live]:
    pair = load_pair(*chatty_pair, dtype="float32")
    builder = RequestBuilder.of(pair.config(**GIVEN))
    engine = Gated.of(
        pair, builder.for_engine, num_slots=SLOTS, max_length=LENGTH, rules=builder.kinds,
        prefill_chunk=32, audits=True, max_logprobs=4, shared_block=32,
    )  # fmt: skip
    assert isinstance(engine, Gated)
    engine.gate = threading.Event()
    limits = ServerLimits(max_queue=QUEUE, max_body=20_000, api_keys=(KEY, OTHER))
    service = Service(NAME, AsyncEngine(engine), pair, builder, limits)
    url, loop, stop, ended = started(service)

    def answers(status: int) -> bool:
        if ended.done():
            ended.result()  # raises what has ended it
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=1).status_code == status
        return False

    until(lambda: answers(503))  # while it compiles
    engine.gate.set()
    until(lambda: answers(200))
    with contextlib.ExitStack() as clients:
        yield Live(service, engine, pair, url, loop, clients)
    loop.call_soon_threadsafe(stop.set)
    ended.result(30)
