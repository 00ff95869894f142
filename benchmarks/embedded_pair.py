"""The embedded pair: one token at a time, exact speculative decoding and FLy, each with its best K.

    python benchmarks/embedded_pair.py

First finds the best K of exact speculative decoding and of FLy on development problems, then runs
the three side by side, in turns, on held-out problems and on held-out library text. Writes
results/embedded_pair.json. Takes about ten minutes on two cores; run nothing else meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import machine
import numpy as np
from absl import app, flags

from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.round import RoundSpec
from fly_jax.decoding.rules import Exact, Fly
from fly_jax.evaluation.compare import Comparison, compare
from fly_jax.training.library_text import documents
from fly_jax.training.problems import Problem, is_correct, problems

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 600, "held-out problems")
flags.DEFINE_integer("num_tuning_problems", 60, "development problems on which K is chosen")
flags.DEFINE_integer("num_documents", 60, "held-out chunks of library text")
flags.DEFINE_integer("batch_size", 1, "rows decoded together")
flags.DEFINE_string("name", "embedded_pair", "of the result file")

EXACT_K = (4, 5, 7, 8, 9, 10, 12, 15, 18, 20)
FLY_K = (9, 11, 13, 15, 18, 20, 22, 25)
MAX_NEW_TOKENS = 160
PROMPT_TOKENS = 40


def _on_problems(pair: Pair, worded: Sequence[Problem], specs: dict[str, RoundSpec]) -> Comparison:
    return compare(
        pair,
        [problem.prompt for problem in worded],
        specs,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=FLAGS.batch_size,
        check=lambda index, text: is_correct(worded[index], text),
    )


def _paired_interval(
    worded: Sequence[Problem], base: Sequence[str], other: Sequence[str]
) -> dict[str, float]:
    """Retention with a 95% interval: problems are redrawn, both decoders' verdicts together."""
    verdicts = np.array(
        [[is_correct(p, a), is_correct(p, b)] for p, a, b in zip(worded, base, other, strict=True)]
    )
    draws = np.random.default_rng(0).integers(len(verdicts), size=(10_000, len(verdicts)))
    sums = verdicts[draws].sum(axis=1)
    low, high = np.quantile(sums[:, 1] / sums[:, 0], (0.025, 0.975))
    return {
        "retention": float(verdicts[:, 1].sum() / verdicts[:, 0].sum()),
        "low": float(low),
        "high": float(high),
        "only_baseline_correct": int((verdicts[:, 0] & ~verdicts[:, 1]).sum()),
        "only_this_correct": int((~verdicts[:, 0] & verdicts[:, 1]).sum()),
        "same_text": float(np.mean([a == b for a, b in zip(base, other, strict=True)])),
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is no flag; see --help.")
    pair = load_pair()
    tuning = list(itertools.islice(problems(3, "development"), FLAGS.num_tuning_problems))
    specs = {f"exact K={k}": pair.spec(Exact(), k) for k in EXACT_K}
    specs |= {f"fly K={k}": pair.spec(Fly(), k) for k in FLY_K}
    baseline = {"autoregressive": pair.spec(Exact(), 0)}
    tuned = _on_problems(pair, tuning, baseline | specs)
    print(tuned.table(), flush=True)
    speeds = {result.name: result.tokens_per_second for result in tuned.results}
    best_exact = max(EXACT_K, key=lambda k: speeds[f"exact K={k}"])
    best_fly = max(FLY_K, key=lambda k: speeds[f"fly K={k}"])

    chosen = baseline | {
        name: specs[name] for name in (f"exact K={best_exact}", f"fly K={best_fly}", "fly K=15")
    }
    held_out = list(itertools.islice(problems(4, "held_out"), FLAGS.num_problems))
    on_problems = _on_problems(pair, held_out, chosen)
    print(on_problems.table(), flush=True)
    library = [
        pair.tokenizer.encode(text)[:PROMPT_TOKENS]
        for text in documents("held_out")
        if len(pair.tokenizer.encode(text)) >= 2 * PROMPT_TOKENS
    ]
    stride = max(1, len(library) // FLAGS.num_documents)
    on_library = compare(
        pair,
        library[::stride][: FLAGS.num_documents],
        chosen,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=FLAGS.batch_size,
    )
    print(on_library.table(), flush=True)

    base = on_problems.results[0]
    result: dict[str, Any] = {
        "command": f"python benchmarks/embedded_pair.py --batch_size={FLAGS.batch_size}",
        "num_problems": len(held_out),
        "batch_size": FLAGS.batch_size,
        "best_k": {"exact": best_exact, "fly": best_fly},
        "tuning": tuned.to_dict(),
        "problems": on_problems.to_dict(),
        "library": on_library.to_dict(),
        "paired": {
            one.name: _paired_interval(held_out, base.texts, one.texts)
            for one in on_problems.results[1:]
        },
    }
    print(machine.write(FLAGS.name, result))


if __name__ == "__main__":
    app.run(main)
