"""Attacks on a live server, one kind after the other, and thousands of random bodies.

    python benchmarks/hostile.py --number 10000

Meanwhile /health is asked every 20 ms, and the server's memory is noted. It has the embedded pair,
with a chat template. Every reply has to be a success or a refusal in one sentence, and the server's
log stays empty. Writes results/hostile.json.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from absl import flags

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import attacks
from machine import run, write
from random_attacks import FOREIGN, RULES, fault, random_request
from served import Server, conversing, server, work_off
from tqdm import tqdm

_NUMBER = flags.DEFINE_integer("number", 10_000, "random bodies", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of the bodies")
_CLIENTS, _SLOW = 8, 8  # of random bodies; and of each kind of half a request
_MOST_SECONDS, _MOST_BYTES = 0.5, 200 * 2**20


@contextlib.contextmanager
def _watched(at: Server) -> Iterator[dict[str, Any]]:
    """Fills in what others and the machine notice meanwhile."""
    waits, is_done = [0.0], threading.Event()

    def others() -> None:
        with httpx.Client(timeout=120) as client:
            while not is_done.wait(0.02):
                begun = time.perf_counter()
                client.get(f"{at.url}/health").raise_for_status()
                waits.append(time.perf_counter() - begun)

    at.forget_most()
    found: dict[str, Any] = {"bytes_before": at.resident()}
    with ThreadPoolExecutor(1) as pool:
        asking, begun = pool.submit(others), time.perf_counter()
        try:
            yield found
        finally:
            found["seconds"] = time.perf_counter() - begun
            is_done.set()
    asking.result()
    found |= {"health_asked": len(waits) - 1, "health_seconds_most": max(waits)}
    found |= {"bytes_most": at.resident(most=True), "bytes_after": at.resident()}


def _post(at: Server, path: str = attacks.TEXT, **body: Any) -> httpx.Response:
    return httpx.post(at.url + path, json={"max_tokens": 1} | body, timeout=120)


def _each(asked: Iterable[attacks.Attack], at: Server) -> list[httpx.Response]:
    """One request after the other, each of which has to be answered with its words."""
    found = []
    for path, body, words, headers in asked:
        found.append(httpx.post(at.url + path, content=body, headers=headers, timeout=120))
        if words not in found[-1].text:
            raise RuntimeError(f"a reply lacks {words!r}: {found[-1].text[:300]}")
    return found


def _guesses(at: Server) -> list[httpx.Response]:
    """48 guesses of what another client's prompt begins with, and the whole of it."""
    secret = [3 + 7 * index % 500 for index in range(200)]
    for salt in (None, "theirs"):
        _post(at, prompt=secret, cache_salt=salt).raise_for_status()
    found = [_post(at, prompt=[*secret[:length], 9]) for length in range(1, 49)]
    found.append(_post(at, prompt=secret, cache_salt="mine"))
    told = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    if any(told):
        raise RuntimeError(f"cached_tokens tells of others' prompts: {told}")
    return found


def _control_tokens(at: Server) -> list[httpx.Response]:
    """Messages that would end their own turn; as text, a mark has several tokens."""
    contents = ("hi", *("hi" + mark * 9 for mark in ("</s>", "<s>", "<unk>")))
    messages = [[{"role": "user", "content": one}] for one in contents]
    found = [_post(at, attacks.CHAT, messages=one) for one in messages]
    plain, *marked = [one.json()["usage"]["prompt_tokens"] for one in found]
    if min(marked) < plain + 2 * 9:
        raise RuntimeError(f"marks became control tokens: {plain} without, {marked} with them")
    return found


def _slow(at: Server) -> list[httpx.Response]:
    """Clients of whose header or body the rest never comes."""

    def one(pieces: tuple[bytes, ...]) -> httpx.Response:
        *_, last = attacks.sent(at.url, *pieces, wait=1, most=120)[0].split(b"HTTP/1.1 ")
        head, _, content = last.partition(b"\r\n\r\n")
        return httpx.Response(int(head[:3]), content=content)

    asked = [*attacks.HALVES.values()] * _SLOW
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(one, asked))


# Each with the statuses that its replies may have.
_ATTACKS: dict[str, tuple[Callable[[Server], list[httpx.Response]], set[int]]] = {
    "text of a rule": (partial(_each, RULES), {400}),
    "bodies of many small things": (partial(_each, attacks.MANY_THINGS), {400}),
    "guessing by cached_tokens": (_guesses, {200}),
    "large numbers": (partial(_each, attacks.LARGE_NUMBERS), {200, 400}),
    "control tokens in a message": (_control_tokens, {200}),
    "slow clients": (_slow, {200, 408}),  # to a whole request before half a one
    "foreign hosts": (partial(_each, FOREIGN), {400}),
}


def _attacked(
    at: Server, attack: Callable[[Server], list[httpx.Response]], statuses: set[int]
) -> dict[str, Any]:
    """What came back, and what was wrong with it."""
    faults, replies = list[str](), list[httpx.Response]()
    with _watched(at) as found:
        try:
            replies = attack(at)
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            faults.append(f"{type(error).__name__}: {error}")
    faults += [said for one in replies if (said := fault(one.status_code, one.content))]
    number = collections.Counter(one.status_code for one in replies)
    faults += [f"HTTP {status} was not to be expected" for status in number.keys() - statuses]
    said = next((one.json()["error"]["message"][:300] for one in replies if one.is_error), None)
    return {"statuses": number, "sentence": said} | found | {"faults": faults}


def _random(at: Server) -> dict[str, Any]:
    """What random bodies brought."""
    chance, faults = random.Random(_SEED.value), list[str]()
    number: collections.Counter[int] = collections.Counter()
    made = (random_request(chance) for _ in range(_NUMBER.value))

    async def one(session: httpx.AsyncClient, asked: attacks.Attack) -> None:
        try:
            reply = await session.post(asked.path, content=asked.body, headers=asked.headers)
            number[reply.status_code] += 1
            said = fault(reply.status_code, reply.content)
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}"
        if said:
            faults.append(f"{asked.path} {asked.body[:1000]!r}: {said}")
            tqdm.write(faults[-1])

    with _watched(at) as found:
        jobs = tqdm(made, total=_NUMBER.value, desc="Bodies", unit="")
        asyncio.run(work_off(at, _CLIENTS, jobs, one))
    return {"seed": _SEED.value, "statuses": number} | found | {"faults": faults}


def main() -> None:
    ordinary: dict[str, Any] = {"prompt": "Ada has 3 apples", "max_tokens": 32, "seed": 1}
    sizes = ("--num_slots=8", "--max_length=256", "--max_logprobs=2")
    with tempfile.TemporaryDirectory() as folder, server(*conversing(folder), *sizes) as at:
        before = [_post(at, **ordinary).json()["choices"] for _ in range(9)]
        memory, begun = at.resident(), len(at.log.read_text())
        bar = tqdm(_ATTACKS.items(), desc="Attacks", unit="")
        found = {name: _attacked(at, *attack) for name, attack in bar}
        found["random bodies"] = _random(at)
        faults = [f"{name}: {said}" for name, one in found.items() for said in one["faults"]]
        if _post(at, **ordinary).json()["choices"] not in before:
            faults.append("An ordinary request is answered otherwise than before.")
        if log := at.log.read_text()[begun:]:
            faults.append(f"The log says: {log}")
    grown = max(one["bytes_most"] for one in found.values()) - memory
    wait = max(one["health_seconds_most"] for one in found.values())
    print(write("hostile", {"resident_bytes": memory, "most_growth_bytes": grown, "found": found}))
    if faults or grown > _MOST_BYTES or wait > _MOST_SECONDS:
        summary = f"{len(faults)} faults, {grown / 2**20:.0f} MiB more, /health took {wait:.2f} s."
        raise SystemExit("\n".join([*faults[:20], summary]))


if __name__ == "__main__":
    run(main)
