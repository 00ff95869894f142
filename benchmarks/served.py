"""A server as a process of its own, and clients that ask it: for serving.py and soak.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import httpx

_Job = TypeVar("_Job")
READY = re.compile(r"^Ready on (http://\S+):")


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
      url: where.
      pid: its process.
    """

    url: str
    pid: int

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(self.labelled(name).values())

    def labelled(self, name: str) -> dict[str, float]:
        """A metric by its label."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf"^fly_jax:{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        return {label: float(value) for label, value in found}


@contextlib.contextmanager
def server(*flags: str) -> Iterator[Server]:
    """Starts the command serve on a free port, and ends it as a cluster would."""
    command = [sys.executable, "-m", "fly_jax.launch", "serve", "--port=0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if found := READY.match(line):
                    break
            else:
                raise SystemExit("The server has not become ready.")
            yield Server(found[1], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
    if process.returncode:
        raise SystemExit(f"The server has ended with status {process.returncode}:\n{rest}")


async def work_off(
    at: Server, clients: int, jobs: Iterable[_Job],
    one: Callable[[httpx.AsyncClient, _Job], Awaitable[None]],
) -> None:  # fmt: skip
    """Has so many clients take the jobs one after another."""
    left, limits = iter(jobs), httpx.Limits(max_connections=clients)

    async def client(session: httpx.AsyncClient) -> None:
        for job in left:
            await one(session, job)

    async with httpx.AsyncClient(base_url=at.url, limits=limits, timeout=600) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))


@dataclasses.dataclass
class Answer:
    """An answer as a client saw it.

    Attributes:
      text: of the answer.
      first: seconds to the first token.
      seconds: to the last.
      num_tokens: of the answer.
      metrics: the server's own of this request.
      status: of HTTP.
    """

    text: str = ""
    first: float = 0.0
    seconds: float = 0.0
    num_tokens: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 200


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Streams an answer to its end."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer, begin = Answer(), time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=asked) as reply:
        answer.status = reply.status_code
        if answer.status != 200:
            answer.text = (await reply.aread()).decode()
            return answer
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                answer.first = answer.first or time.perf_counter() - begin
                answer.text += choice["text"]
            if "usage" in chunk:
                answer.num_tokens = chunk["usage"]["completion_tokens"]
                answer.metrics = chunk["metrics"]
    answer.seconds = time.perf_counter() - begin
    return answer
