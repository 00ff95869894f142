"""What int8 matrices cost in answers: the embedded target, alone and under FLy, both ways.

    python benchmarks/int8_quality.py

Converts the embedded target to int8 as the command `convert` does, and solves held-out problems
with the original and with the int8 target: one token at a time, and by FLy with the embedded draft
(which stays as it is). Activations and caches are float32 in both, so that nothing else differs.
Retention is against the original target decoding alone. Writes results/int8_quality.json. Takes
about ten minutes on two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from absl import flags
from paired import paired_interval
from texts import MAX_NEW_TOKENS, word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.evaluation.compare import Comparison, compare
from fly_jax.models.checkpoints.load import convert
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.training.problems import Problem, is_correct

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 600, "held-out problems")
flags.DEFINE_boolean("save", True, "write the result file")

BATCH = 16
RULES = ("autoregressive", "fly")


def _solve(pair: Pair, worded: Sequence[Problem]) -> Comparison:
    return compare(
        pair,
        [problem.prompt for problem in worded],
        {rule: DecodingConfig(rule=rule, num_speculative_tokens=15) for rule in RULES},
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=BATCH,
        check=lambda index, text: is_correct(worded[index], text),
    )


def _against(
    worded: Sequence[Problem], base: Sequence[str], other: Sequence[str]
) -> dict[str, Any]:
    """How many are solved, and what share of the baseline's that is."""
    paired = paired_interval(worded, base, other)
    return {
        "solved": sum(map(is_correct, worded, other)) / len(worded),
        "retention": paired["retention"],
        "retention_95": [paired["low"], paired["high"]],
        "same_text": paired["same_text"],
    }


def main() -> None:
    target, draft = EMBEDDED_PAIR
    worded = word_problems("held_out", FLAGS.num_problems)
    solved = {"float32": _solve(load_pair(), worded)}
    with tempfile.TemporaryDirectory() as temporary:
        convert(target, Path(temporary) / "int8", "int8")
        pair = load_pair(Path(temporary) / "int8", draft, dtype="float32")
        assert pair.target.int8
        solved["int8"] = _solve(pair, worded)
    base = solved["float32"].results[0]
    result: dict[str, Any] = {
        "command": f"python benchmarks/int8_quality.py --num_problems={len(worded)}",
        "num_problems": len(worded),
        "batch_size": BATCH,
        "num_speculative_tokens": 15,
    }
    for name, comparison in solved.items():
        for one in comparison.results:
            row = _against(worded, base.texts, one.texts)
            row["mean_accepted_tokens"] = one.mean_accepted_tokens
            result[f"{name}, {one.name}"] = row
            print(name, one.name, row, flush=True)
    if FLAGS.save:
        print(machine.write("int8_quality", result))


if __name__ == "__main__":
    machine.run(main)
