"""The embedded pair: one token at a time, and each rule with its best K.

    python benchmarks/embedded_pair.py

First finds the best K of exact speculative decoding, of FLy and of the recommended rule on
development problems and on development library text, each for itself, then runs them side by side,
in turns, on what is held out of both. Writes results/embedded_pair.json. Takes about twenty minutes
on two cores; run nothing else meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import machine
from absl import flags
from paired import paired_interval, side_by_side
from texts import library_beginnings, word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.evaluation.compare import Comparison

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 1000, "held-out problems")
flags.DEFINE_integer("num_tuning_problems", 60, "development problems on which K is chosen")
flags.DEFINE_integer("num_documents", 60, "held-out chunks of library text")
flags.DEFINE_integer("num_tuning_documents", 20, "development chunks on which K is chosen")
flags.DEFINE_integer("batch_size", 1, "rows decoded together")

RULES: dict[str, dict[str, Any]] = {
    "exact": {"rule": "exact"},
    "fly": {"rule": "fly"},
    "margin": {"rule": "margin", "margin_gap": 1.0, "protect": (r"\d",)},
}
PROBLEM_K = {
    "exact": (5, 7, 9, 10, 12, 15),
    "fly": (11, 15, 18, 20, 22, 25),
    "margin": (6, 9, 12, 15, 18, 22),
}
LIBRARY_K = {"exact": (2, 3, 4, 5, 6, 8), "fly": (7, 8, 9, 11), "margin": (3, 4, 5, 6, 8)}
PUBLISHED_K = 15


def _on(pair: Pair, texts: Sequence[Any], depths: Mapping[str, Sequence[int]]) -> Comparison:
    """One token at a time, and every rule with each of its K."""
    configs = {"autoregressive": DecodingConfig(rule="autoregressive")} | {
        f"{rule} K={k}": DecodingConfig(**RULES[rule], num_speculative_tokens=k)
        for rule, several in depths.items()
        for k in several
    }
    return side_by_side(pair, texts, configs, batch_size=FLAGS.batch_size)


def _best(tuned: Comparison) -> dict[str, int]:
    """The K with which each rule was fastest."""
    by_speed = sorted(tuned.results[1:], key=lambda one: one.tokens_per_second)
    named = (one.name.partition(" K=") for one in by_speed)
    return {rule: int(k) for rule, _, k in named}


def main() -> None:
    pair = load_pair()
    tuned = _on(pair, word_problems("development", FLAGS.num_tuning_problems), PROBLEM_K)
    best = _best(tuned)
    held_out = word_problems("held_out", FLAGS.num_problems)
    depths = {rule: (k,) for rule, k in best.items()}
    for rule in ("fly", "margin"):
        depths[rule] = tuple(sorted({best[rule], PUBLISHED_K}, reverse=True))
    on_problems = _on(pair, held_out, depths)

    beginnings = library_beginnings(pair, "development", FLAGS.num_tuning_documents)
    tuned_library = _on(pair, beginnings, LIBRARY_K)
    best_library = _best(tuned_library)
    beginnings = library_beginnings(pair, "held_out", FLAGS.num_documents)
    on_library = _on(pair, beginnings, {rule: (k,) for rule, k in best_library.items()})

    base = on_problems.results[0]
    result: dict[str, Any] = {
        "command": f"python benchmarks/embedded_pair.py --batch_size={FLAGS.batch_size}",
        "num_problems": len(held_out),
        "batch_size": FLAGS.batch_size,
        "best_k": best,
        "best_library_k": best_library,
        "tuning": tuned.to_dict(),
        "problems": on_problems.to_dict(),
        "library_tuning": tuned_library.to_dict(),
        "library": on_library.to_dict(),
        "paired": {
            one.name: paired_interval(held_out, base.texts, one.texts)
            for one in on_problems.results[1:]
        },
    }
    print(machine.write("embedded_pair", result))


if __name__ == "__main__":
    machine.run(main)
