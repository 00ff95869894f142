r"""Plain and speculative decoding in turns, by one process, as clients of a server would ask.

    python benchmarks/clients.py --target target.gguf --draft draft.gguf --prompts_file FILE ...

It writes results/qwen/clients.json.

Over HTTP servers are measured one after the other, and a machine changes between them. Here the
engines are in one process, have a slot for each client, and take turns: so many clients at a time
ask for 64 tokens each, one request after another, until all prompts of a file were asked. The
programs of three engines of 16 slots need more memory maps than Linux allows a process.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from absl import flags
from texts import conversations

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.pair import load_pair
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState

_TARGET = flags.DEFINE_string("target", None, "the target")
_DRAFT = flags.DEFINE_string("draft", None, "the draft model or head")
_LOOKUP = flags.DEFINE_integer("prompt_lookup_max", 0, "of a lookup with it; 0 for none")
_DTYPE = flags.DEFINE_string("dtype", "int8", "of the weights")
_PROMPTS = flags.DEFINE_multi_string("prompts_file", None, "JSON lines with prompts")
_CLIENTS = flags.DEFINE_list("clients", ["4"], "clients at a time")
_TURNS = flags.DEFINE_integer("turns", 2, "of each engine")
_LENGTH, _NEW_TOKENS, _LEAST = 1280, 64, 12


def asked(engine: Engine, prompts: Sequence[Sequence[int]], clients: int) -> dict[str, Any]:
    """What these clients see while they ask for twice as many answers, at least 12."""
    number = max(2 * clients, _LEAST)
    left = iter([prompts[at % len(prompts)] for at in range(number)])
    before = collections.Counter(engine.costs.num_rounds if engine.costs else {})
    open_ones, done, begin = list[RequestState](), list[RequestState](), time.perf_counter()
    while len(done) < number:
        while len(open_ones) < clients and (prompt := next(left, None)) is not None:
            open_ones.append(engine.submit(Request(prompt, _NEW_TOKENS)))
        for _ in engine.step():
            pass
        done += [one for one in open_ones if one.is_finished]
        open_ones = [one for one in open_ones if not one.is_finished]
    seconds = time.perf_counter() - begin
    rounds = collections.Counter(engine.costs.num_rounds if engine.costs else {}) - before
    found = {
        "tokens_per_second": sum(len(one.generation.token_ids) for one in done) / seconds,
        "first_token_seconds": statistics.median(one.first_token_seconds or 0.0 for one in done),
        "rounds_by_depth": dict(rounds),
    }
    engine.forget()
    return found


def main() -> None:
    """Measures all, and writes the results after every turn."""
    pair = load_pair(_TARGET.value, _DRAFT.value, dtype=_DTYPE.value)
    files = {Path(file).stem: conversations(pair, file) for file in _PROMPTS.value}
    alone = dataclasses.replace(pair, drafts=())
    auto = DecodingConfig(rule="exact", num_speculative_tokens="auto")
    pairs = {
        "autoregressive": (alone, DecodingConfig(rule="autoregressive")),
        "lookup, exact:auto": (alone, auto.replace(prompt_lookup_max=Lookup.max_ngram)),
        "exact:auto": (pair, auto.replace(prompt_lookup_max=_LOOKUP.value)),
    }
    engines, warm_seconds, turns = dict[str, Engine](), dict[str, float](), list[dict[str, Any]]()
    clients_given = [int(one) for one in _CLIENTS.value]
    slots = max(clients_given)
    for name, (models, config) in pairs.items():
        begin = time.perf_counter()
        given = {"num_slots": slots, "max_length": _LENGTH, "with_texts": False}
        engines[name] = Engine.of(models, config, **given)
        engines[name].warm_up()
        warm_seconds[name] = time.perf_counter() - begin
        print(name, warm_seconds[name], flush=True)
    for turn in range(_TURNS.value):
        order = list(engines)[:: 1 if turn % 2 == 0 else -1]
        for clients, file in itertools.product(clients_given, files):
            for name in order:
                found = asked(engines[name], files[file], clients)
                asked_for = {"turn": turn, "clients": clients, "prompts": file, "decoding": name}
                turns.append(asked_for | found)
                print(turns[-1], flush=True)
                result = {"slots": slots, "max_new_tokens": _NEW_TOKENS}
                result |= {"warm_up_seconds": warm_seconds, "turns": turns}
                machine.write("qwen/clients", result)


if __name__ == "__main__":
    flags.mark_flags_as_required(["target", "draft", "prompts_file"])
    machine.run(main)
