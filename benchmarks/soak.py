"""Many clients of every kind at once, for long: nothing may be lost, leak, grow or compile.

    python benchmarks/soak.py --num_requests 2000 --hostile 4

They ask for mixed lengths, rules, temperatures and stops, some as a stream; some leave in the
middle, some break the connection off, some read slowly. Others send attacks and random bodies
beside them. Greedy exact answers are compared with the library's own. At the end all slots are
free, and nothing was compiled. Memory may grow in the first half, which brings in what an
allocator keeps for the next burst, and hardly behind that: what leaks goes on.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from absl import flags

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import attacks
from machine import run, write
from random_attacks import FOREIGN, RULES, fault, random_request
from served import Server, conversing, server, work_off
from texts import library_beginnings, word_problems

from fly_jax import generate, load_pair
from fly_jax.decoding.pair import Pair
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.http_load import ask

_REQUESTS = flags.DEFINE_integer("num_requests", 2000, "in all", lower_bound=10)
_CLIENTS = flags.DEFINE_integer("clients", 64, "at a time", lower_bound=1)
_SLOTS = flags.DEFINE_integer("num_slots", 8, "of the server", lower_bound=1)
_HOSTILE = flags.DEFINE_integer("hostile", 0, "clients besides, who attack", lower_bound=0)
_LIMITS = (1, 8, 24, 64, 128)
_RULES = ("exact", "fly", "margin", "fly | margin", None)
_ATTACKS = (*RULES, *attacks.MANY_THINGS, *attacks.LARGE_NUMBERS, *FOREIGN)
# Bytes, at most: from the first tenth to the end, and of these in the second half.
_MOST_GROWTH, _MOST_LATE_GROWTH = 200 * 2**20, 16 * 2**20


@dataclasses.dataclass
class Soak:
    """Outcomes of the requests so far."""

    pair: Pair
    prompts: list[list[int]]
    chance: random.Random
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    exact: dict[tuple[int, int], set[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(set)
    )
    attacked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    compiled: list[float] = dataclasses.field(default_factory=list)

    async def one(self, session: httpx.AsyncClient) -> None:
        """A request of any kind."""
        chance = self.chance
        index, limit = chance.randrange(len(self.prompts)), chance.choice(_LIMITS)
        rule = chance.choice(_RULES)
        drawn = chance.random() < 0.3
        body: dict[str, Any] = {"prompt": self.prompts[index], "max_tokens": limit}
        body["fly"] = {"audit": chance.random() < 0.2} | ({} if rule is None else {"rule": rule})
        if drawn:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": chance.randrange(1000)}
        if chance.random() < 0.2:
            body["stop"] = ["\n\n", "return"]
        kind = chance.choices(("stream", "whole", "leaves", "slow"), (6, 2, 2, 1))[0]
        text = None
        if kind in ("leaves", "slow"):
            await self._awkward(session, body, leaves=kind == "leaves")
        elif kind == "whole":
            reply = await session.post("/v1/completions", json=body)
            self._note(kind, reply.status_code)
            if reply.status_code == 200:
                text = reply.json()["choices"][0]["text"]
        else:
            text = (await ask(session, "/v1/completions", body)).text
            self._note(kind, 200)
        is_exact = rule == "exact" and not drawn and "stop" not in body
        if is_exact and text is not None:
            self.exact[index, limit].add(text)

    def _note(self, kind: str, status: int) -> None:
        self.outcomes[kind if status == 200 else f"HTTP {status}"] += 1

    async def _awkward(
        self, session: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool
    ) -> None:
        """Somebody who leaves in the middle, or reads slowly to the end."""
        asked = body | {"stream": True, "max_tokens": 128}
        async with session.stream("POST", "/v1/completions", json=asked) as reply:
            left = self.chance.randrange(4) if leaves else None
            last = ""
            async for line in reply.aiter_lines():
                last = line or last
                if left is not None:
                    left -= 1
                    if left < 0:
                        break
                else:
                    await asyncio.sleep(0.02)
            if leaves or last == "data: [DONE]":
                self._note("left" if leaves else "read slowly", reply.status_code)
            else:
                self.outcomes["cut off"] += 1

    async def attack(self, at: Server) -> None:
        """One attack after the other, until it is cancelled."""
        host, port = at.url.removeprefix("http://").split(":")
        async with httpx.AsyncClient(base_url=at.url, timeout=600) as session:
            while True:
                kind = self.chance.choices(("random", "attack", "half a request"), (8, 2, 1))[0]
                if kind == "half a request":
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.write(self.chance.choice([*attacks.HALVES.values()])[0])
                    await asyncio.sleep(1)
                    writer.close()
                    self.attacked[kind] += 1
                    continue
                is_random = kind == "random"
                asked = random_request(self.chance) if is_random else self.chance.choice(_ATTACKS)
                reply = await session.post(asked.path, content=asked.body, headers=asked.headers)
                self.attacked[f"{kind}, HTTP {reply.status_code}"] += 1
                if said := fault(reply.status_code, reply.content):
                    self.faults.append(f"{asked.path} {asked.body[:1000]!r}: {said}")

    def watch(self, at: Server) -> None:
        """Notes the server's memory and programs."""
        self.memory.append(at.resident())
        self.compiled.append(at.metric("compilations"))

    def num_unlike(self) -> int:
        """Greedy exact answers that the library has otherwise; a shorter one begins a longer."""
        longest = max(_LIMITS)
        whole = generate(self.pair, self.prompts, rule="exact", max_new_tokens=longest)
        expected = {
            (index, limit): self.pair.tokenizer.decode(one.token_ids[:limit], continues=True)
            for index, one in enumerate(whole)
            for limit in _LIMITS
        }
        return sum(text != expected[key] for key, texts in self.exact.items() for text in texts)


async def _run(soak: Soak, at: Server, number: int) -> None:
    async def one(session: httpx.AsyncClient, _: int) -> None:
        try:
            await soak.one(session)
        except (httpx.HTTPError, FlyJaxError) as error:
            soak.outcomes[f"{type(error).__name__}: {error}"] += 1

    hostile = [asyncio.create_task(soak.attack(at)) for _ in range(_HOSTILE.value)]
    await work_off(at, _CLIENTS.value, range(number), one)
    for attacking in hostile:
        attacking.cancel()
    for ended in await asyncio.gather(*hostile, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            soak.faults.append(f"{type(ended).__name__}: {ended}")
    for _ in range(200):
        if at.metric("num_requests_running") + at.metric("num_requests_waiting") == 0:
            return
        await asyncio.sleep(0.1)
    soak.outcomes["slots that were not given back"] += 1


def main() -> None:
    pair = load_pair()
    prompts = [
        *(pair.tokenizer.encode(one.prompt) for one in word_problems("held_out", 12)),
        *library_beginnings(pair, "held_out", 12),
    ]
    soak = Soak(pair, prompts, random.Random(0))
    sizes = (f"--num_slots={_SLOTS.value}", "--max_length=512")
    with tempfile.TemporaryDirectory() as folder, server(*conversing(folder), *sizes) as at:
        begun = len(at.log.read_text())
        for _ in range(10):
            asyncio.run(_run(soak, at, -(-_REQUESTS.value // 10)))
            soak.watch(at)
            print(f"{sum(soak.outcomes.values())} requests, {soak.memory[-1] / 2**20:.0f} MiB")
        if log := at.log.read_text()[begun:]:
            soak.faults.append(f"The log says: {log}")
    good = sum(soak.outcomes[kind] for kind in ("stream", "whole", "left", "read slowly"))
    growth, late = (soak.memory[-1] - soak.memory[at] for at in (0, len(soak.memory) // 2))
    requests = sum(soak.outcomes.values())
    result = {
        "requests": requests,
        "clients": _CLIENTS.value,
        "slots": _SLOTS.value,
        "outcomes": dict(soak.outcomes),
        "hostile_clients": _HOSTILE.value,
        "attacks": dict(soak.attacked),
        "faults": soak.faults,
        "exact_answers": sum(map(len, soak.exact.values())),
        "unlike": soak.num_unlike(),
        "resident_bytes": soak.memory,
        "programs_compiled": soak.compiled[-1] - soak.compiled[0],
    }
    print(result, write("soak", result), sep="\n")
    failed = requests > good or soak.faults or result["unlike"] or result["programs_compiled"]
    if failed or growth > _MOST_GROWTH or late > _MOST_LATE_GROWTH:
        raise SystemExit("The server has not come through.")


if __name__ == "__main__":
    run(main)
