"""The engine beside static batches on the embedded pair, as `generate` uses it for a file.

    python benchmarks/engine.py

Both decode the same requests with the same rule and as many rows, in turns, with programs compiled
before: prompts of mixed lengths and limits; and word problems, which are of one length, of one
limit and answered in about as many tokens, so that a static batch loses nothing. A static batch
holds prompts of like length (`Decoder.batches`) and has one limit, the longest of its requests;
what a row says beyond its own does not count. Each turn compares all tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from machine import write
from texts import MAX_NEW_TOKENS, library_beginnings, word_problems

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request
from fly_jax.training.library_text import documents

_TURNS = flags.DEFINE_integer("turns", 7, "measurements of each", lower_bound=1)
_ROWS = flags.DEFINE_integer("slots", 8, "requests decoded together", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 64, "how many", lower_bound=1)
_RULE = flags.DEFINE_string("rule", None, "of all requests; that of the pair if not given")
_LONGEST_PROMPT, _LONGEST_ANSWER = 400, 256


def _alike(pair: Pair, number: int) -> list[Request]:
    """Word problems."""
    worded = word_problems("held_out", number)
    return [Request(pair.tokenizer.encode(one.prompt), MAX_NEW_TOKENS) for one in worded]


def _mixed(pair: Pair, number: int) -> list[Request]:
    """A third word problems, a third beginnings of files, and as many long ones."""
    third = -(-number // 3)
    chance = random.Random(0)
    texts = (pair.tokenizer.encode(text) for text in documents("held_out"))
    long = [ids[: chance.randint(80, _LONGEST_PROMPT)] for ids in texts if len(ids) > 500][:third]
    prompts = [
        *(pair.tokenizer.encode(one.prompt) for one in word_problems("held_out", third)),
        *library_beginnings(pair, "held_out", third),
        *long,
    ]
    chance.shuffle(prompts)
    limits = (8, 16, 32, 64, 128, _LONGEST_ANSWER)
    return [Request(prompt, chance.choice(limits)) for prompt in prompts[:number]]


def _engine(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    states = [engine.submit(one) for one in requests]
    while not engine.is_idle:
        engine.step()
    seconds = time.perf_counter() - start
    return seconds, [one.generation.token_ids for one in states]


def _static(decoder: Decoder, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    answers: dict[int, list[int]] = {}
    start = time.perf_counter()
    for batch in decoder.batches([one.prompt for one in requests]):
        some = [requests[index] for index in batch]
        limit = max(one.max_new_tokens for one in some)
        rows = decoder.decode([one.prompt for one in some], limit, seed=0)
        for index, row in zip(batch, rows, strict=True):
            answers[index] = row.token_ids[: requests[index].max_new_tokens]
    return time.perf_counter() - start, [answers[index] for index in range(len(requests))]


def _measured(pair: Pair, requests: Sequence[Request]) -> dict[str, Any]:
    given = {} if _RULE.value is None else {"rule": _RULE.value}
    config = pair.config(**given)
    spec = pair.spec(config)
    prompts = [one.prompt for one in requests]
    longest = max(one.max_new_tokens for one in requests)
    engine = Engine(
        pair.target,
        pair.proposing(spec),
        spec,
        num_slots=_ROWS.value,
        max_length=max(map(len, prompts)) + longest,
        protected_token_ids=pair.protected_token_ids(config.protect),
        offline=True,
    )
    decoder = pair.decoder(spec, batch_size=_ROWS.value, protect=config.protect)
    engine.warm_up_for(requests)
    decoder.warm_up(prompts, longest)
    engine_seconds, static_seconds, alike = [], [], len(requests)
    for turn in range(_TURNS.value + 1):
        for slot in range(_ROWS.value):  # nothing is found in the caches of the turn before
            engine.slots.forget(slot)
        seconds, answers = _engine(engine, requests)
        others, same = _static(decoder, requests)
        alike = min(alike, sum(one == other for one, other in zip(answers, same, strict=True)))
        if turn:  # the first one compiles what is left
            engine_seconds.append(seconds)
            static_seconds.append(others)
    return {
        "rule": config.rule,
        "requests": len(requests),
        "slots": _ROWS.value,
        "tokens": sum(map(len, answers)),
        "alike": alike,
        "share_of_prompts_reused": engine.num_reused_tokens / engine.num_prompt_tokens,
        "engine_seconds": engine_seconds,
        "static_seconds": static_seconds,
        "ratios": [b / a for a, b in zip(engine_seconds, static_seconds, strict=True)],
    }


def main(_: list[str]) -> None:
    pair = load_pair()
    found = {
        name: _measured(pair, make(pair, _REQUESTS.value))
        for name, make in {"mixed": _mixed, "alike": _alike}.items()
    }
    for name, one in found.items():
        ours, others = (
            one["tokens"] / statistics.median(one[f"{way}_seconds"]) for way in ("engine", "static")
        )
        ratios = one["ratios"]
        print(
            f"{name}: {one['tokens']} tokens of {one['requests']} requests in {one['slots']} slots:"
            f" the engine {ours:.0f} tokens/s, static batches {others:.0f}: "
            f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"{one['alike']} of {one['requests']} alike."
        )
    print(write("engine", found))


if __name__ == "__main__":
    app.run(main)
