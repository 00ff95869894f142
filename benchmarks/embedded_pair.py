"""The embedded pair: one token at a time, exact speculative decoding and FLy, each with its best K.

    python benchmarks/embedded_pair.py

First finds the best K of exact speculative decoding and of FLy on development problems and on
development library text, each for itself, then runs the three side by side, in turns, on what is
held out of both. Writes results/embedded_pair.json. Takes about a quarter of an hour on two cores;
run nothing else meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import machine
from absl import app, flags
from paired import paired_interval

from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.round import RoundSpec
from fly_jax.decoding.rules import Exact, Fly
from fly_jax.evaluation.compare import Comparison, compare
from fly_jax.training.library_text import documents
from fly_jax.training.problems import Problem, Split, is_correct, problems

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 1000, "held-out problems")
flags.DEFINE_integer("num_tuning_problems", 60, "development problems on which K is chosen")
flags.DEFINE_integer("num_documents", 60, "held-out chunks of library text")
flags.DEFINE_integer("num_tuning_documents", 20, "development chunks on which K is chosen")
flags.DEFINE_integer("batch_size", 1, "rows decoded together")
flags.DEFINE_string("name", "embedded_pair", "of the result file")

EXACT_K = (5, 7, 8, 9, 10, 12, 15, 18)
FLY_K = (9, 11, 13, 15, 18, 20, 22, 25)
LIBRARY_EXACT_K = (1, 2, 3, 4, 5, 6, 8)
LIBRARY_FLY_K = (7, 8, 9, 11, 13)
PUBLISHED_K = 15
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


def _on_library(
    pair: Pair, split: Split, num_documents: int, specs: dict[str, RoundSpec]
) -> Comparison:
    """Continues the beginnings of `num_documents` chunks spread evenly over the split."""
    encoded = (pair.tokenizer.encode(text) for text in documents(split))
    prompts = [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= 2 * PROMPT_TOKENS]
    stride = max(1, len(prompts) // num_documents)
    return compare(
        pair,
        prompts[::stride][:num_documents],
        specs,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=FLAGS.batch_size,
    )


def _specs(pair: Pair, exact_k: Sequence[int], fly_k: Sequence[int]) -> dict[str, RoundSpec]:
    """One token at a time, and both rules with each K."""
    return (
        {"autoregressive": pair.spec(Exact(), 0)}
        | {f"exact K={k}": pair.spec(Exact(), k) for k in exact_k}
        | {f"fly K={k}": pair.spec(Fly(), k) for k in fly_k}
    )


def _best(tuned: Comparison, rule: str) -> int:
    """The K with which the rule was fastest."""
    of_rule = [one for one in tuned.results if one.name.startswith(rule)]
    return int(max(of_rule, key=lambda one: one.tokens_per_second).name.partition("=")[2])


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is no flag; see --help.")
    pair = load_pair()
    tuning = list(itertools.islice(problems(3, "development"), FLAGS.num_tuning_problems))
    tuned = _on_problems(pair, tuning, _specs(pair, EXACT_K, FLY_K))
    print(tuned.table(), flush=True)
    best = {"exact": _best(tuned, "exact"), "fly": _best(tuned, "fly")}
    held_out = list(itertools.islice(problems(4, "held_out"), FLAGS.num_problems))
    chosen = _specs(pair, (best["exact"],), sorted({best["fly"], PUBLISHED_K}, reverse=True))
    on_problems = _on_problems(pair, held_out, chosen)
    print(on_problems.table(), flush=True)

    tuned_library = _on_library(
        pair,
        "development",
        FLAGS.num_tuning_documents,
        _specs(pair, LIBRARY_EXACT_K, LIBRARY_FLY_K),
    )
    print(tuned_library.table(), flush=True)
    best_library = {"exact": _best(tuned_library, "exact"), "fly": _best(tuned_library, "fly")}
    chosen = _specs(pair, (best_library["exact"],), (best_library["fly"],))
    on_library = _on_library(pair, "held_out", FLAGS.num_documents, chosen)
    print(on_library.table(), flush=True)

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
    print(machine.write(FLAGS.name, result))


if __name__ == "__main__":
    app.run(main)
