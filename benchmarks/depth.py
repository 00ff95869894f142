"""K chosen round by round (`auto`) against every fixed K, by rule, kind of text and batch size.

    python benchmarks/depth.py

Writes results/depth.json. Takes about ten minutes on two cores; run nothing else meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import machine
from absl import app, flags
from texts import MAX_NEW_TOKENS, library_beginnings, word_problems

from fly_jax.decoding.config import AUTO_DEPTHS, DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.evaluation.compare import compare

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 120, "held-out problems")
flags.DEFINE_integer("num_documents", 40, "held-out chunks of library text")
flags.DEFINE_list("batch_size", ["1", "8"], "rows decoded together")

RULES: dict[str, dict[str, Any]] = {
    "exact": {"rule": "exact"},
    "fly": {"rule": "fly"},
    "margin 1 without digits": {"rule": "margin", "margin_gap": 1.0, "protect": (r"\d",)},
}


def _measure(pair: Pair, prompts: Sequence[Any], batch_size: int, rule: str) -> dict[str, Any]:
    window = 6 if rule == "fly" else 0
    depths = [*(k for k in AUTO_DEPTHS if k > window), "auto"]
    configs = {
        str(k): DecodingConfig(**RULES[rule], num_speculative_tokens=k)  # type: ignore[arg-type]
        for k in depths
    }
    compared = compare(
        pair,
        prompts,
        {name: pair.spec(config) for name, config in configs.items()},
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=batch_size,
        protect={name: config.protect for name, config in configs.items()},
    )
    print(f"{rule}, batch {batch_size}", compared.table(), sep="\n", flush=True)
    speeds = {one.name: one.tokens_per_second for one in compared.results}
    fixed = {name: speed for name, speed in speeds.items() if name != "auto"}
    return {
        "k": compared.to_dict(),
        "best_k": int(max(fixed, key=lambda name: fixed[name])),
        "auto_over_best": speeds["auto"] / max(fixed.values()),
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is no flag; see --help.")
    pair = load_pair()
    texts: dict[str, Sequence[Any]] = {
        "problems": [one.prompt for one in word_problems("held_out", FLAGS.num_problems)],
        "library": library_beginnings(pair, "held_out", FLAGS.num_documents),
    }
    result = {
        "command": "python benchmarks/depth.py",
        "num_problems": FLAGS.num_problems,
        "num_documents": FLAGS.num_documents,
        "batch_size": {
            size: {
                on: {rule: _measure(pair, prompts, int(size), rule) for rule in RULES}
                for on, prompts in texts.items()
            }
            for size in FLAGS.batch_size
        },
    }
    print(machine.write("depth", result))


if __name__ == "__main__":
    app.run(main)
