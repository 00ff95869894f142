"""A server as a process of its own, and clients that ask it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx

from fly_jax.models.checkpoints.source import EMBEDDED_PAIR

_Job = TypeVar("_Job")
READY = re.compile(r"^Ready on (http://\S+):.*\n", re.MULTILINE)
_TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}</s>{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
      url: where.
      pid: its process.
      log: what it writes to standard error.
    """

    url: str
    pid: int
    log: Path

    def resident(self, *, most: bool = False) -> int:
        """Bytes of memory that it has, or the most since `forget_most`; on Linux."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (found,) = re.findall("VmHWM:(.*)kB" if most else "VmRSS:(.*)kB", status)
        return int(found) * 1024

    def forget_most(self) -> None:
        """Lets the most memory be counted from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(self.labelled(name).values())

    def labelled(self, name: str) -> dict[str, float]:
        """A metric by its label."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf"^fly_jax:{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        return {label: float(value) for label, value in found}


def conversing(folder: str) -> tuple[str, ...]:
    """Flags for the embedded pair with a chat template, in a folder."""
    target = shutil.copytree(EMBEDDED_PAIR[0], Path(folder) / "target")
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
    config = Path(__file__).parents[1] / "configs" / "embedded_pair.toml"
    return (f"--target={target}", f"--draft={EMBEDDED_PAIR[1]}", f"--config={config}")


@contextlib.contextmanager
def server(*flags: str) -> Iterator[Server]:
    """Starts the command serve on a free port, and ends it as a cluster would."""
    command = [sys.executable, "-m", "fly_jax.launch", "serve", "--port=0", *flags]
    with tempfile.NamedTemporaryFile("a") as file:
        log = Path(file.name)
        with subprocess.Popen(command, stderr=file) as process:
            try:
                while not (ready := READY.search(log.read_text())):
                    if process.poll() is not None:
                        raise SystemExit(f"The server has not become ready:\n{log.read_text()}")
                    time.sleep(0.1)
                print(ready[0], end="")
                yield Server(ready[1], process.pid, log)
            finally:
                process.send_signal(signal.SIGTERM)
        if process.returncode:
            raise SystemExit(
                f"The server has ended with status {process.returncode}:\n{log.read_text()}"
            )


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
