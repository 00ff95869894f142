"""vLLM for TPU with the plugin, on a CPU: vLLM's engine beside fly_jax's own.

    pip install vllm-tpu==0.32.0 && pip install -e .
    python benchmarks/vllm_engine.py

The embedded pair, 32 prompts of different lengths and limits, 8 at a time, greedily, in float32.
Each way of decoding is a process of its own. What the engine lacks without a TPU is stood in for by
`vllm_stand_ins.py`; so this counts tokens, and says nothing of speed.

- Exact decoding must give plain decoding's tokens, and so must a request that asks for it.
- A lookup below the draft model changes how many passes a step of it takes, and no token.
- FLy must give the tokens of fly_jax's engine with the same rule, K and drafts, which begins
  behind vLLM's first token: vLLM's first block of drafts begins there.

Then 8 random prompts with tiny random models of other families, whose drafts have the targets'
weights: every token that they draft must be accepted, and all tokens must be plain decoding's, with
a lookup below the draft model and with two ranks that share the requests too. Writes
results/vllm_engine.json and results/vllm_families.json.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import vllm_stand_ins
from machine import run, write
from texts import documents, library_beginnings, word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request
from fly_jax.models.checkpoints.load import open_weights
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama

_REQUESTS, _ROWS, _K = 32, 8, 15
_TARGET, _DRAFT = map(str, EMBEDDED_PAIR)
_LOOKUP = {
    "method": "ngram", "num_speculative_tokens": 10,
    "prompt_lookup_min": 1, "prompt_lookup_max": 4,
}  # fmt: skip
_MODEL = {"method": "draft_model", "model": _DRAFT, "num_speculative_tokens": _K}
_FLY = {"rule": "fly", "entropy_threshold": 0.3, "window_size": 6}
_EXACT = {"rule": "exact"}
_BELOW = {"prompt_lookup_max": 4}
# How the engine decodes: speculative_config, additional_config["fly_jax"], other arguments, and
# whether every fourth request asks for the rule exact.
_WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any], bool]] = {
    "plain": (None, None, {}, False),
    "lookup, exact": (_LOOKUP, _EXACT, {}, False),
    "lookup, fly": (_LOOKUP, _FLY, {}, False),
    "draft model, exact": (_MODEL, _EXACT, {"async_scheduling": False}, False),
    "draft model, fly": (_MODEL, _FLY, {"async_scheduling": False}, False),
    "draft model, fly, scheduled ahead": (_MODEL, _FLY, {"async_scheduling": True}, False),
    "draft model, fly, cached beginnings": (_MODEL, _FLY, {"enable_prefix_caching": True}, False),
    "draft model, fly, some exact": (_MODEL, _FLY, {}, True),
    "draft model, exact, lookup below": (_MODEL, _EXACT | _BELOW, {}, False),
    "draft model, fly, lookup below": (_MODEL, _FLY | _BELOW, {}, False),
    "draft model, budget": (
        _MODEL, _FLY | {"rule": "fly | margin", "risk_budget": 1.0}, {}, False,
    ),
}  # fmt: skip

_GOLDEN = Path(__file__).parents[1] / "tests" / "fixtures" / "golden"
_FAMILIES = ("qwen3", "mistral")  # the embedded pair is a Llama
_VOCAB = 96
_HEAD_SIZE = 128  # the engine knows no smaller ones of a Qwen 3
# additional_config["fly_jax"], and the ranks of data parallel attention.
_FAMILY_WAYS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "plain": (None, 1),
    "draft model": (_EXACT, 1),
    "draft model, lookup below, two ranks": (_EXACT | _BELOW, 2),
}


def _requests(pair: Pair) -> list[dict[str, Any]]:
    """A third word problems, a third beginnings of files, and as many long ones."""
    third, chance = -(-_REQUESTS // 3), random.Random(0)
    texts = (pair.tokenizer.encode(text) for text in documents("held_out"))
    long = [ids[: chance.randint(80, 300)] for ids in texts if len(ids) > 500][:third]
    prompts = [
        *(pair.tokenizer.encode(one.prompt) for one in word_problems("held_out", third)),
        *library_beginnings(pair, "held_out", third),
        *long,
    ]
    chance.shuffle(prompts)
    limits = (8, 24, 48, 96, 128)
    return [{"prompt": ids, "limit": chance.choice(limits)} for ids in prompts[:_REQUESTS]]


def _decoded(way: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    speculative, fly_jax, other, some_exact = _WAYS[way]
    asked = [
        one | ({"extra_args": {"fly_jax": _EXACT}} if some_exact and not index % 4 else {})
        for index, one in enumerate(requests)
    ]
    arguments = {"enable_prefix_caching": False, "speculative_config": speculative} | other
    return vllm_stand_ins.decoded(_TARGET, asked, fly_jax=fly_jax, **arguments)


def _own(
    pair: Pair, way: str, requests: list[dict[str, Any]], plain: list[list[int]]
) -> dict[str, Any]:
    """The same by fly_jax's engine: tokens, drafts and accepted draft tokens."""
    speculative, fly_jax, _, _ = _WAYS[way]
    assert speculative is not None
    values = dict(fly_jax or {}) | {
        "num_speculative_tokens": speculative["num_speculative_tokens"],
        "lossless_speculative_tokens": speculative["num_speculative_tokens"],
    }
    if speculative["method"] == "ngram":
        values |= {
            "prompt_lookup_min": speculative["prompt_lookup_min"],
            "prompt_lookup_max": speculative["prompt_lookup_max"],
            "prompt_lookup_match": "earliest",
        }
    found: dict[str, Any] = {"tokens": [one[:1] for one in plain], "drafts": 0}

    def count(output: RoundOutput, _: object) -> None:
        found["drafts"] += int((output.num_drafted > 0).sum())

    # The engine's first token is no draft's; after a limit of one there is nothing to decode.
    prompts = [one["prompt"] + first for one, first in zip(requests, found["tokens"], strict=True)]
    limits = [one["limit"] - 1 for one in requests]
    engine = Engine.of(
        pair, DecodingConfig(**values), prompts=prompts, max_new_tokens=max(limits),
        num_slots=_ROWS, listener=count,
    )  # fmt: skip
    asked = {
        row: engine.submit(Request(prompt, limit))
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        if limit and prompt[-1] not in pair.tokenizer.eos_token_ids
    }
    list(engine.run(()))
    own = {row: one.generation for row, one in asked.items()}
    for row, one in own.items():
        found["tokens"][row] += one.token_ids
    found["accepted"] = sum(one.num_accepted_tokens for one in own.values())
    found["rescued"] = sum(one.num_rescued_tokens for one in own.values())
    return found


def _compared(
    way: str,
    one: dict[str, Any],
    plain: list[list[int]],
    pairs: dict[str, Pair],
    requests: list[dict[str, Any]],
) -> dict[str, Any]:
    """How many requests have the tokens that they must have."""
    speculative, _, _, some_exact = _WAYS[way]
    result: dict[str, Any] = {
        "tokens": sum(map(len, one["tokens"])),
        "as_plain": sum(a == b for a, b in zip(one["tokens"], plain, strict=True)),
    }
    if speculative is None:
        return result
    own = _own(pairs[speculative["method"]], way, requests, plain)
    is_exact = [some_exact and index % 4 == 0 for index in range(_REQUESTS)]
    wanted = [
        exact if asked else kept
        for asked, exact, kept in zip(is_exact, plain, own["tokens"], strict=True)
    ]
    metrics = one["metrics"]
    result |= {
        "as_fly_jax": sum(a == b for a, b in zip(one["tokens"], wanted, strict=True)),
        "rescued_tokens": metrics.get("rescued_tokens", 0),
        "mean_acceptance_length": 1 + metrics["accepted_tokens"] / metrics["drafts"],
    }
    if one["passes"]:
        result["draft_passes_per_step"] = sum(one["passes"]) / len(one["passes"])
    if not some_exact:
        result |= {
            "rescued_tokens_of_fly_jax": own["rescued"],
            "mean_acceptance_length_of_fly_jax": 1 + own["accepted"] / own["drafts"],
        }
    return result


def _write_models(target: Path, draft: Path, family: str) -> None:
    """Target and draft with the same weights."""
    golden = open_weights(_GOLDEN / family).config
    config = dataclasses.replace(
        golden, head_size=_HEAD_SIZE, sliding_window=None, windowed_layers=()
    )
    # The engine has no Mistral in JAX to be a target, and without windows it is a Llama.
    as_target = "llama" if family == "mistral" else family
    parameters = Llama.random(config, jax.random.key(0)).parameters()
    for folder, architecture in ((target, as_target), (draft, family)):
        model = Llama(dataclasses.replace(config, architecture=architecture), parameters)
        save_hf(model, folder, jnp.float32)
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
            if (EMBEDDED_PAIR[0] / name).exists():
                shutil.copy(EMBEDDED_PAIR[0] / name, folder)


def _family(family: str) -> dict[str, Any]:
    """Drafted and accepted tokens in each way, and how many answers are plain decoding's."""
    chance = random.Random(0)
    requests = [
        {"prompt": [chance.randrange(3, _VOCAB) for _ in range(chance.randint(5, 40))], "limit": 48}
        for _ in range(8)
    ]
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        _write_models(target, draft, family)
        drafting = _MODEL | {"model": str(draft)}
        found = {
            way: vllm_stand_ins.decoded(
                str(target), requests, fly_jax=fly_jax, ranks=ranks, skip_tokenizer_init=True,
                speculative_config=None if fly_jax is None else drafting,
            )
            for way, (fly_jax, ranks) in _FAMILY_WAYS.items()
        }  # fmt: skip
    plain = found.pop("plain")["tokens"]
    return {
        way: {
            "as_plain": sum(a == b for a, b in zip(one["tokens"], plain, strict=True)),
            "drafted": one["metrics"]["draft_tokens"],
            "accepted": one["metrics"]["accepted_tokens"],
        }
        for way, one in found.items()
    }


def main() -> None:
    versions = vllm_stand_ins.versions("vllm-tpu", "tpu-inference")
    jax.config.update("jax_platforms", "cpu")  # here; vLLM's engines have their own processes
    pairs = {"draft_model": load_pair(), "ngram": load_pair(_TARGET, "ngram")}
    requests = _requests(pairs["draft_model"])
    found = {way: _decoded(way, requests) for way in _WAYS}
    plain = found["plain"]["tokens"]
    results = {way: _compared(way, one, plain, pairs, requests) for way, one in found.items()}
    for way, one in results.items():
        print(f"{way}: {one}")
    print(write("vllm_engine", {**versions, "requests": _REQUESTS, "rows": _ROWS, "ways": results}))
    families = {family: _family(family) for family in _FAMILIES}
    print(families)
    print(write("vllm_families", {**versions, "requests": 8, "families": families}))


if __name__ == "__main__":
    run(main)
