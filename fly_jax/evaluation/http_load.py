"""Load on a server with OpenAI's API: what clients at a time see, by vLLM's names."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_summary import aligned

_TIMES = ("ttft", "tpot", "itl", "e2el")


@dataclasses.dataclass
class ClientReply:
    """A streamed answer as a client saw it; times are in seconds, metrics the server's own."""

    text: str = ""
    ttft: float | None = None  # from asking to the first text; None without any
    itl: list[float] = dataclasses.field(default_factory=list)  # from one piece of text to the next
    e2el: float = 0.0  # from asking to the end
    num_tokens: int = 0  # of the answer; pieces of text where the server does not say
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tpot(self) -> float | None:
        """Seconds of a token after the first; None where all came at once."""
        if self.ttft is None or not self.itl or self.num_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_tokens - 1)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream; httpx's own also end at U+2028, which a text in JSON may have."""
    rest = b""
    async for some in response.aiter_bytes():
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            yield line.decode()
    yield rest.decode()


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> ClientReply:
    """Streams an answer to its end; raises FlyJaxError where the server refuses or breaks off."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    reply, begin = ClientReply(), time.perf_counter()
    last, is_stream = begin, False
    try:
        async with client.stream("POST", path, json=asked) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")[:400]
                why = f"{client.base_url} refuses ({response.status_code}): {said}"
                raise FlyJaxError(f"{why}; correct what it names.")
            async for line in _lines(response):
                data = line.removeprefix("data:").lstrip() if line.startswith("data:") else ""
                if not data.startswith("{"):
                    continue
                chunk, is_stream = json.loads(data), True
                if "error" in chunk:
                    raise FlyJaxError(f"{client.base_url} breaks off: {chunk['error']}; try again.")
                given = [{**one, **one.get("delta", {})} for one in chunk["choices"]]
                # What a model that reasons thinks is counted in the usage too.
                names = "text", "content", "reasoning_content", "reasoning"
                if text := "".join(one.get(name) or "" for one in given for name in names):
                    now = time.perf_counter()
                    if reply.text:
                        reply.itl.append(now - last)
                    else:
                        reply.ttft = now - begin
                    reply.text, last = reply.text + text, now
                    reply.num_tokens += 1
                reply.metrics = chunk.get("metrics") or reply.metrics
                if chunk.get("usage"):
                    reply.num_tokens = chunk["usage"]["completion_tokens"]
            if not is_stream:
                raise ValueError("no line of it begins with data:")
    except FlyJaxError:
        raise
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        raise FlyJaxError(
            f"{client.base_url}{path} gave no stream of an answer ({error!r}); give the address of "
            "a server with OpenAI's API."
        ) from error
    reply.e2el = time.perf_counter() - begin
    return reply


@dataclasses.dataclass(frozen=True)
class Load:
    """A number of clients, what they saw, and the seconds from first to last."""

    concurrency: int
    seconds: float
    replies: tuple[ClientReply, ...]

    def to_dict(self) -> dict[str, Any]:
        """Throughput, and each time's statistics in milliseconds by vLLM's names."""
        found: dict[str, Any] = {
            "concurrency": self.concurrency, "requests": len(self.replies),
            "request_throughput": len(self.replies) / self.seconds,
            "output_throughput": sum(one.num_tokens for one in self.replies) / self.seconds,
        }  # fmt: skip
        for name in _TIMES:
            values = [getattr(one, name) for one in self.replies]
            if name == "itl":
                values = [gap for gaps in values for gap in gaps]
            if values := sorted(value for value in values if value is not None):
                at = math.ceil(0.99 * len(values)) - 1
                found[f"mean_{name}_ms"] = 1e3 * statistics.fmean(values)
                found[f"median_{name}_ms"] = 1e3 * statistics.median(values)
                found[f"p99_{name}_ms"] = 1e3 * values[at]
        steps = [one.metrics.get("speculative_decoding") or {} for one in self.replies]
        if rounds := sum(one.get("num_spec_steps", 0) for one in steps):
            accepted = sum(one.get("num_accepted_draft_tokens", 0) for one in steps)
            found["mean_acceptance_length"] = 1 + accepted / rounds
        return found


async def load(
    client: httpx.AsyncClient, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
) -> Load:
    """Lets `concurrency` clients ask for the answers, each one after another; see `ask`."""
    left, replies = iter(bodies), list[ClientReply]()
    with tqdm(total=len(bodies), desc=f"{concurrency} clients", disable=None, leave=False) as bar:

        async def one() -> None:
            for body in left:
                replies.append(await ask(client, path, body))
                bar.update()

        begin = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(concurrency)))
    return Load(concurrency, time.perf_counter() - begin, tuple(replies))


def table(loads: Sequence[Load]) -> str:
    """A line for every number of clients; times are medians and 99th percentiles, in ms."""
    rows = [["clients", "requests/s", "tokens/s", *(f"{name} p50/p99" for name in _TIMES)]]
    for one in loads:
        found = one.to_dict()
        cells = [f"{found[f'median_{n}_ms']:.0f}/{found[f'p99_{n}_ms']:.0f}"
                 if f"median_{n}_ms" in found else "-" for n in _TIMES]  # fmt: skip
        rates = [f"{found[f'{kind}_throughput']:.1f}" for kind in ("request", "output")]
        rows.append([str(one.concurrency), *rates, *cells])
    return "\n".join(aligned(rows))
