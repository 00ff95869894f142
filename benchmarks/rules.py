"""Every loosened rule beside exact speculative decoding, at several K, with what it costs.

    python benchmarks/rules.py

For each K the rules run side by side, in turns, on the same held-out problems. Writes
results/rules.json. Takes about half an hour on two cores; run nothing else meanwhile.
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
from fly_jax.decoding.rules import Budget, Exact, Fly, Lossy, Margin, Typical
from fly_jax.evaluation.compare import compare
from fly_jax.training.problems import Problem, is_correct, problems

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 500, "held-out problems")
flags.DEFINE_integer("batch_size", 8, "rows decoded together")
flags.DEFINE_list("k", ["4", "6", "8", "15", "22"], "draft tokens of a round")
flags.DEFINE_string("name", "rules", "of the result file")

MAX_NEW_TOKENS = 160


def _specs(pair: Pair, k: int) -> dict[str, RoundSpec]:
    fly, near = Fly(), Margin(gap=1.0)
    loosened = {
        "margin": Margin(),
        "margin, gap 1": near,
        "typical": Typical(),
        "lossy": Lossy(0.3),
        "fly, deferred": fly,
        "fly | margin": fly | Margin(),
        "fly | margin, deferred": fly | Margin(),
        "fly | margin gap 1, deferred": fly | near,
        "fly | margin gap 1, deferred, budget 4": Budget(fly | near, 4.0),
    }
    if k > fly.window_size:
        loosened = {"fly": fly, **loosened}
    return {"autoregressive": pair.spec(Exact(), 0), "exact": pair.spec(Exact(), k)} | {
        name: pair.spec(rule, k, boundary="defer" if "deferred" in name else "reject")
        for name, rule in loosened.items()
    }


def _at(pair: Pair, worded: Sequence[Problem], k: int) -> dict[str, Any]:
    compared = compare(
        pair,
        [problem.prompt for problem in worded],
        _specs(pair, k),
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=FLAGS.batch_size,
        check=lambda index, text: is_correct(worded[index], text),
    )
    print(f"K = {k}", compared.table(), sep="\n", flush=True)
    base = compared.results[0]
    figures = compared.to_dict()
    return {
        one.name: figures[one.name] | paired_interval(worded, base.texts, one.texts)
        for one in compared.results
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is no flag; see --help.")
    pair = load_pair()
    worded = list(itertools.islice(problems(4, "held_out"), FLAGS.num_problems))
    result = {
        "command": f"python benchmarks/rules.py --batch_size={FLAGS.batch_size}",
        "num_problems": len(worded),
        "batch_size": FLAGS.batch_size,
        "k": {k: _at(pair, worded, int(k)) for k in FLAGS.k},
    }
    print(machine.write(FLAGS.name, result))


if __name__ == "__main__":
    app.run(main)
