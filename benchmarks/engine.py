"""The engine beside static batches: prompts of mixed lengths and limits, on the embedded pair.

    python benchmarks/engine.py

Both decode the same requests with the same rule and as many rows, in turns, with programs compiled
before. A static batch holds prompts of like length (`Decoder.batches`) and has one limit, the
longest of its requests; what a row says beyond its own does not count. Each turn compares all
tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from absl import app, flags
from machine import write
from texts import library_beginnings, word_problems

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.serving.engine import Engine
from fly_jax.serving.request import Request
from fly_jax.training.library_text import documents

_TURNS = flags.DEFINE_integer("turns", 7, "measurements of each", lower_bound=1)
_ROWS = flags.DEFINE_integer("slots", 8, "requests decoded together", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 64, "how many", lower_bound=1)
_RULE = flags.DEFINE_string("rule", None, "of all requests; that of the pair if not given")
_LONGEST_PROMPT, _LONGEST_ANSWER = 400, 256


def _requests(pair: Pair, number: int) -> list[Request]:
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
    tickets = [engine.submit(one) for one in requests]
    while not engine.is_idle:
        engine.step()
    seconds = time.perf_counter() - start
    return seconds, [one.generation.token_ids for one in tickets]


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


def main(_: list[str]) -> None:
    pair = load_pair()
    given = {} if _RULE.value is None else {"rule": _RULE.value}
    requests = _requests(pair, _REQUESTS.value)
    engine = Engine.of(
        pair, num_slots=_ROWS.value, max_length=_LONGEST_PROMPT + _LONGEST_ANSWER, **given
    )
    config = pair.config(**given)
    decoder = pair.decoder(pair.spec(config), batch_size=_ROWS.value, protect=config.protect)
    engine.warm_up()
    decoder.warm_up([one.prompt for one in requests], _LONGEST_ANSWER)
    engine_seconds, static_seconds, alike = [], [], len(requests)
    for turn in range(_TURNS.value + 1):
        seconds, answers = _engine(engine, requests)
        others, same = _static(decoder, requests)
        alike = min(alike, sum(one == other for one, other in zip(answers, same, strict=True)))
        if turn:  # the first one compiles what is left
            engine_seconds.append(seconds)
            static_seconds.append(others)
    num_tokens = sum(map(len, answers))
    ratios = [b / a for a, b in zip(engine_seconds, static_seconds, strict=True)]
    speeds = [num_tokens / statistics.median(some) for some in (engine_seconds, static_seconds)]
    print(
        f"{num_tokens} tokens of {len(requests)} requests in {_ROWS.value} slots: the engine "
        f"{speeds[0]:.0f} tokens/s, static batches {speeds[1]:.0f}: {statistics.median(ratios):.2f}"
        f" times ({min(ratios):.2f} to {max(ratios):.2f}); {alike} of {len(requests)} alike."
    )
    print(
        write(
            "engine",
            {
                "rule": config.rule,
                "requests": len(requests),
                "slots": _ROWS.value,
                "tokens": num_tokens,
                "alike": alike,
                "share_of_prompts_reused": engine.num_reused_tokens / engine.num_prompt_tokens,
                "engine_seconds": engine_seconds,
                "static_seconds": static_seconds,
                "ratios": ratios,
            },
        )
    )


if __name__ == "__main__":
    app.run(main)
