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
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import vllm_stand_ins
from absl import flags
from machine import run, write
from texts import documents, library_beginnings, word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR

_WAY = flags.DEFINE_string("way", None, "decode in this way alone; used by the script itself")
_FILES = flags.DEFINE_list("files", [], "prompts and output of that way")

_REQUESTS, _ROWS = 32, 8
_TARGET, _DRAFT = map(str, EMBEDDED_PAIR)
_LOOKUP = {
    "method": "ngram", "num_speculative_tokens": 10,
    "prompt_lookup_min": 1, "prompt_lookup_max": 4,
}  # fmt: skip
_MODEL = {"method": "draft_model", "model": _DRAFT, "num_speculative_tokens": 15}
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


def _decode(way: str, source: Path, output: Path) -> None:
    """In a process of its own: what the engine makes of the requests."""
    vllm_stand_ins.install()
    from vllm import LLM, SamplingParams, TokensPrompt

    speculative, fly_jax, other, some_exact = _WAYS[way]
    additional = vllm_stand_ins.SHARDING | ({} if fly_jax is None else {"fly_jax": fly_jax})
    arguments = {"enable_prefix_caching": False} | vllm_stand_ins.ENGINE | other
    engine = LLM(
        _TARGET,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=256,
        speculative_config=speculative,
        additional_config=additional,
        disable_log_stats=False,
        **arguments,
    )
    passes = _counted_passes() if speculative == _MODEL else []
    requests = json.loads(source.read_text())
    extra = {index: {"fly_jax": _EXACT} for index in range(0, _REQUESTS, 4) if some_exact}
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=one["prompt"]) for one in requests],
        [
            SamplingParams(temperature=0, max_tokens=one["limit"], extra_args=extra.get(index))
            for index, one in enumerate(requests)
        ],
    )
    found = {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "metrics": vllm_stand_ins.counters(engine),
        "passes": passes,
    }
    output.write_text(json.dumps(found))


def _counted_passes() -> list[int]:
    """Of the draft model, one number for each of the engine's steps from now on."""
    from fly_jax.integrations.vllm_tpu.draft_model import DraftModelProposer

    propose, passes = DraftModelProposer.propose, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        proposed = propose(self, *args, **kwargs)
        passes.append(int(self.num_passes))
        return proposed

    DraftModelProposer.propose = counted
    return passes


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


def main() -> None:
    if _WAY.value is not None:
        _decode(_WAY.value, *map(Path, _FILES.value))
        return
    versions = vllm_stand_ins.versions("vllm-tpu", "tpu-inference")
    pairs = {"draft_model": load_pair(), "ngram": load_pair(_TARGET, "ngram")}
    requests = _requests(pairs["draft_model"])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "requests.json")
        source.write_text(json.dumps(requests))
        found = {way: vllm_stand_ins.in_its_own_process(way, source) for way in _WAYS}
    plain = found["plain"]["tokens"]
    results = {way: _compared(way, one, plain, pairs, requests) for way, one in found.items()}
    for way, one in results.items():
        print(f"{way}: {one}")
    print(write("vllm_engine", {**versions, "requests": _REQUESTS, "rows": _ROWS, "ways": results}))


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


if __name__ == "__main__":
    run(main)
