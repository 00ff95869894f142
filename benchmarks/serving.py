"""The server under 1, 4 and 16 clients: autoregressive, exact, FLy and the recommended rule.

    python benchmarks/serving.py

Two servers of the embedded pair stand on this machine, one without speculation, and are asked in
turns, one at a time: the rules exact, fly and the server's own by the field `fly` of each request.
The other one chooses K for the load, for loosened requests too.
Clients send the next problem when the last is answered. Beside every speed is the share of problems
that were answered rightly.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from absl import flags
from machine import run, write
from served import Answer, Server, ask, server, work_off
from texts import MAX_NEW_TOKENS, word_problems

from fly_jax.evaluation.problems import Problem, is_correct

_TURNS = flags.DEFINE_integer("turns", 5, "measurements of each", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("num_requests", 48, "of each measurement", lower_bound=1)
_CLIENTS = flags.DEFINE_multi_integer("clients", [1, 4, 16], "at a time", lower_bound=1)
_ROUNDS = "spec_decode_num_rounds_total"
_KINDS = ("autoregressive", "exact", "fly", "recommended")


async def _asked(at: Server, kind: str, worded: Sequence[Problem], clients: int) -> list[Answer]:
    """The answers to all problems, by so many clients."""
    fly = {} if kind in ("recommended", "autoregressive") else {"rule": kind}
    answers = [Answer()] * len(worded)

    async def one(session: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": worded[index].prompt, "max_tokens": MAX_NEW_TOKENS, "fly": fly}
        answers[index] = await ask(session, body)

    await work_off(at, clients, range(len(worded)), one)
    return answers


def _measured(at: Server, kind: str, worded: Sequence[Problem], clients: int) -> dict[str, Any]:
    before = at.labelled(_ROUNDS)
    begin = time.perf_counter()
    answers = asyncio.run(_asked(at, kind, worded, clients))
    seconds = time.perf_counter() - begin
    assert all(one.status == 200 for one in answers)
    after = at.labelled(_ROUNDS)
    firsts, wholes = [[getattr(one, name) for one in answers] for name in ("first", "seconds")]
    return {
        "tokens_per_second": sum(one.num_tokens for one in answers) / seconds,
        "requests_per_second": len(answers) / seconds,
        "first_token_median": statistics.median(firsts),
        "first_token_p95": float(np.quantile(firsts, 0.95)),
        "latency_median": statistics.median(wholes),
        "latency_p95": float(np.quantile(wholes, 0.95)),
        "correct": statistics.mean(
            is_correct(problem, one.text) for problem, one in zip(worded, answers, strict=True)
        ),
        "rounds": {label: value - before.get(label, 0) for label, value in after.items()},
    }


def main() -> None:
    worded = word_problems("held_out", _REQUESTS.value)
    sizes = (f"--num_slots={max(_CLIENTS.value)}", "--max_length=512")
    found: dict[str, list[dict[str, Any]]] = {
        f"{kind}, {clients} clients": []
        for clients, kind in itertools.product(_CLIENTS.value, _KINDS)
    }
    chosen = ("--num_speculative_tokens=auto", "--load_may_change_text")
    with server(*sizes, *chosen) as speculating, server(*sizes, "--rule=autoregressive") as plain:
        for turn, clients in itertools.product(range(_TURNS.value + 1), _CLIENTS.value):
            for kind in _KINDS:
                at = plain if kind == "autoregressive" else speculating
                measured = _measured(at, kind, worded, clients)
                if turn:  # the first one finds nothing in the caches
                    found[f"{kind}, {clients} clients"].append(measured)
    for name, turns in found.items():
        figures = [key for key in turns[0] if key != "rounds"]
        middle = {key: statistics.median(turn[key] for turn in turns) for key in figures}
        print(name, middle)
    print(write("serving", {"requests": len(worded), "measured": found}))


if __name__ == "__main__":
    run(main)
