"""A real model on real prompts: mean accepted tokens and speed, by rule, draft and category.

    python benchmarks/real_model.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts question.jsonl

The prompts are those of Spec-Bench (hemingkx/Spec-Bench, `data/spec_bench/question.jsonl`), put as
a user's first message. With --hugging_face PYTHON, an interpreter that has PyTorch, transformers,
absl-py and tqdm, the same model in float32 also decodes there, greedily and with its own prompt
lookup, and its tokens are compared. A run that was interrupted goes on with what is missing when it
is started again. --drafter adds a drafter that train --teacher has made.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

_TARGET = flags.DEFINE_string("target", None, "an instruct model: folder or GGUF file")
_PROMPTS = flags.DEFINE_string("prompts", None, "Spec-Bench's question.jsonl")
_DRAFTER = flags.DEFINE_string("drafter", None, "folder of a drafter made for the target")
_EACH = flags.DEFINE_integer("each", 4, "prompts of each category", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "of an answer", lower_bound=1)
_PYTHON = flags.DEFINE_string("hugging_face", None, "interpreter with PyTorch and transformers")
_NAME = "real_model"
# 80 of the 480 are MT-bench's, in its own eight categories.
_CATEGORIES = {"translation", "summarization", "qa", "math_reasoning", "rag"}

# What drafts, and how it is decoded.
CONFIGS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "autoregressive": (None, {"rule": "autoregressive"}),
    "lookup, exact, K = 10": ("ngram", {"rule": "exact", "num_speculative_tokens": 10}),
    "lookup, fly, K = 10": ("ngram", {"rule": "fly", "num_speculative_tokens": 10}),
    "self:int4, exact, K = 4": ("self:int4", {"rule": "exact", "num_speculative_tokens": 4}),
    "self:int4, exact, K = 15": ("self:int4", {"rule": "exact", "num_speculative_tokens": 15}),
    "self:int4, fly, K = 15": ("self:int4", {"rule": "fly", "num_speculative_tokens": 15}),
    "self:int4, fly | margin 0.3, K = 15": (
        "self:int4",
        {"rule": "fly | margin", "margin_gap": 0.3, "num_speculative_tokens": 15},
    ),
    "self:int4, margin 1, K = 15": (
        "self:int4",
        {"rule": "margin", "margin_gap": 1.0, "num_speculative_tokens": 15},
    ),
}
_OF_DRAFTER: dict[str, dict[str, Any]] = {
    "drafter, exact, K = 2": {"rule": "exact", "num_speculative_tokens": 2},
    "drafter, exact, K = 4": {"rule": "exact", "num_speculative_tokens": 4},
    "drafter over lookup, exact, K = 6": {
        "rule": "exact", "num_speculative_tokens": 6, "prompt_lookup_max": 4,
    },
    "drafter, fly, K = 10": {"rule": "fly", "num_speculative_tokens": 10},
    "drafter, fly | margin 0.3, K = 10": {
        "rule": "fly | margin", "margin_gap": 0.3, "num_speculative_tokens": 10,
    },
}  # fmt: skip
_HUGGING_FACE = {
    "Hugging Face, greedy": {},
    "Hugging Face, prompt lookup": {"prompt_lookup_num_tokens": 10},
}


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt of Spec-Bench."""

    category: str
    text: str


def questions(path: Path, each: int) -> list[Question]:
    """The first of each category, MT-bench's being one category."""
    found: dict[str, list[Question]] = collections.defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        name = record["category"] if record["category"] in _CATEGORIES else "mt_bench"
        found[name].append(Question(name, record["turns"][0]))
    return [one for name in sorted(found) for one in found[name][:each]]


def _decoded(
    pair: Any, values: dict[str, Any], prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Each prompt alone, compiled before."""
    spec = pair.spec(**values)
    decoder = pair.decoder(spec)
    decoder.warm_up(prompts, _MAX_NEW_TOKENS.value)
    found = []
    for ids in tqdm(prompts, leave=False):
        (one,) = decoder.generate([ids], _MAX_NEW_TOKENS.value)
        found.append(
            {
                "tokens": one.token_ids,
                "seconds": one.seconds,
                "rounds": one.num_rounds,
                "rescued": one.num_rescued_tokens,
            }
        )
    return found


@contextlib.contextmanager
def _written(target: Any) -> Iterator[str]:
    """The model as Hugging Face reads it, in float32."""
    import jax.numpy as jnp

    from fly_jax.models.checkpoints.load import save_hf

    with tempfile.TemporaryDirectory() as folder:
        save_hf(target, Path(folder), jnp.float32)
        yield folder


def _with_hugging_face(folder: str, prompts: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    asked = {"folder": folder, "prompts": list(map(list, prompts)), "ways": _HUGGING_FACE,
             "max_new_tokens": _MAX_NEW_TOKENS.value}  # fmt: skip
    assert _PYTHON.value is not None
    done = subprocess.run(
        [_PYTHON.value, __file__, "serve"], input=json.dumps(asked), stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    answer: dict[str, list[Any]] = json.loads(done.stdout)
    return answer


def _serve() -> None:
    """Runs in the other interpreter: transformers decodes what standard input asks for."""
    import torch
    from transformers import AutoModelForCausalLM

    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32).eval()
    answer: dict[str, list[Any]] = {}
    for name, options in asked["ways"].items():
        for ids in [asked["prompts"][0], *asked["prompts"]]:  # the first one twice, to warm up
            tokens = torch.tensor([ids])
            start = time.perf_counter()
            with torch.no_grad():
                model(tokens)  # what a prompt takes is not counted
                begin = time.perf_counter()
                whole = model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                    max_new_tokens=asked["max_new_tokens"], pad_token_id=0, **options,
                )  # fmt: skip
            seconds = time.perf_counter() - begin - (begin - start)
            answer.setdefault(name, []).append(
                {"tokens": whole[0, len(ids) :].tolist(), "seconds": seconds}
            )
        del answer[name][0]
    json.dump(answer, sys.stdout)


def _summary(
    decoded: list[dict[str, Any]], asked: list[Question], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """Speed and mean accepted tokens, in all and by category; how far the text is the target's."""

    def of(indices: Sequence[int]) -> dict[str, float]:
        some = [decoded[index] for index in indices]
        count = sum(len(one["tokens"]) for one in some)
        figures = {"tokens_per_second": count / sum(one["seconds"] for one in some)}
        if "rounds" in some[0]:
            figures["mean_accepted_tokens"] = count / sum(one["rounds"] for one in some)
            figures["rescued_per_100_tokens"] = 100 * sum(one["rescued"] for one in some) / count
        return figures

    names = [one.category for one in asked]
    pairs = [(x["tokens"], y["tokens"]) for x, y in zip(decoded, plain, strict=True)]
    return {
        **of(range(len(names))),
        "same_answers": sum(one == other for one, other in pairs),
        "median_same_tokens": statistics.median(_same(*pair) for pair in pairs),
        "by_category": {
            name: of([index for index, one in enumerate(names) if one == name])
            for name in sorted(set(names))
        },
    }


def _same(one: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    both = zip(one, other, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], both)))


def main(_: list[str]) -> None:
    if _TARGET.value is None or _PROMPTS.value is None:
        raise app.UsageError("--target and --prompts are needed; see the head of this file.")
    from machine import RESULTS, write

    from fly_jax.decoding.pair import load_pair, open_pair
    from fly_jax.models.checkpoints.identity import identity

    asked = questions(Path(_PROMPTS.value), _EACH.value)
    configs = dict(CONFIGS)
    if _DRAFTER.value is not None:
        configs |= {name: (_DRAFTER.value, values) for name, values in _OF_DRAFTER.items()}
    opened = open_pair(_TARGET.value)
    ids = [opened.encode([{"role": "user", "content": one.text}]) for one in asked]
    setting = {
        "target": Path(_TARGET.value).name,
        "prompts": len(asked),
        "max_new_tokens": _MAX_NEW_TOKENS.value,
    }
    path = RESULTS / f"{_NAME}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    decoded: dict[str, list[dict[str, Any]]] = {}
    drafter = None if _DRAFTER.value is None else identity(Path(_DRAFTER.value))
    if before.get("setting") == setting:
        same = before.get("drafter") == drafter
        kept = before["decoded"].items()
        decoded = {name: one for name, one in kept if same or name not in _OF_DRAFTER}
    drafts: dict[str | None, list[str]] = collections.defaultdict(list)
    for name, (draft, _values) in configs.items():
        if name not in decoded:
            drafts[draft].append(name)

    def save() -> None:
        plain = decoded["autoregressive"]
        summaries = {name: _summary(one, asked, plain) for name, one in decoded.items()}
        found = {"setting": setting, "drafter": drafter, "summaries": summaries}
        write(_NAME, found | {"decoded": decoded})

    for draft, names in drafts.items():
        pair = load_pair(_TARGET.value, draft)
        for name in names:
            decoded[name] = _decoded(pair, configs[name][1], ids)
            save()
    if _PYTHON.value is not None and not set(_HUGGING_FACE) <= set(decoded):
        with _written(load_pair(_TARGET.value, dtype="float32").target) as folder:
            decoded |= _with_hugging_face(folder, ids)
        save()
    for name, one in json.loads(path.read_text())["summaries"].items():
        mean = one.get("mean_accepted_tokens")
        print(
            f"{name:<38}{one['tokens_per_second']:8.1f} tokens/s"
            + (f"{mean:8.2f} mean accepted tokens" if mean else f"{'':28}")
            + f"{one['same_answers']:5} of {len(asked)} answers are the target's"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve()
    else:
        app.run(main)
