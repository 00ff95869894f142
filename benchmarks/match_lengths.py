r"""The share of looked-up tokens that a target keeps, by how many tokens match before them.

    python benchmarks/match_lengths.py --target target.gguf --prompts_file FILE ...

It writes results/qwen/match_lengths.json. The answers are greedy, of at most 128 tokens; every
token behind the first is looked up in the text before it, as a lookup alone proposes it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import machine
import numpy as np
from absl import flags
from texts import conversations

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.drafters.lookup import Lookup, look_up
from fly_jax.decoding.pair import load_pair
from fly_jax.engine.engine import Engine

_TARGET = flags.DEFINE_string("target", None, "the target")
_PROMPTS = flags.DEFINE_multi_string("prompts_file", None, "JSON lines with prompts")
_CAPACITY, _NEW_TOKENS, _SLOTS = 2048, 128, 8
_find = jax.jit(look_up, static_argnums=(0, 3))


def kept_by_match(prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[int, bool]]:
    """The length of the match, and whether the token is right, of all that are looked up."""
    text = np.zeros((_NEW_TOKENS, _CAPACITY), np.int32)
    text[:, : len(prompt) + len(answer)] = [*prompt, *answer]
    length = np.minimum(len(prompt) + 1 + np.arange(_NEW_TOKENS), len(prompt) + len(answer))
    tokens, found, matching, _ = map(np.asarray, _find(Lookup(), text, length, 1))
    looked_up = (at for at in range(len(answer) - 1) if found[at])
    return [(int(matching[at]), bool(tokens[at, 0] == answer[at + 1])) for at in looked_up]


def main() -> None:
    """Decodes every file's prompts and counts."""
    pair = load_pair(_TARGET.value, dtype="int8")
    results: dict[str, Any] = {"target": _TARGET.value, "dtype": "int8", "files": {}}
    for file in _PROMPTS.value:
        most = _CAPACITY - _NEW_TOKENS
        prompts = [prompt for prompt in conversations(pair, file) if len(prompt) < most]
        engine = Engine.of(
            pair, DecodingConfig(rule="autoregressive"), prompts=prompts, offline=True,
            max_new_tokens=_NEW_TOKENS, num_slots=_SLOTS, with_texts=False,
        )  # fmt: skip
        tried, kept = collections.Counter[int](), collections.Counter[int]()
        for prompt, done in zip(prompts, engine.generate(prompts, _NEW_TOKENS), strict=True):
            for length, is_kept in kept_by_match(prompt, done.token_ids):
                tried[length] += 1
                kept[length] += is_kept
        counts = {str(length): [tried[length], kept[length]] for length in sorted(tried)}
        results["files"][Path(file).stem] = {"prompts": len(prompts), "tried_and_kept": counts}
        engine.forget()
    machine.write("qwen/match_lengths", results)


if __name__ == "__main__":
    flags.mark_flags_as_required(["target", "prompts_file"])
    machine.run(main)
