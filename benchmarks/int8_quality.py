"""Answers that int8 matrices cost: the embedded target, alone and under FLy, both ways.

    python benchmarks/int8_quality.py

Converts the embedded target to int8 as the command `convert` does, and solves held-out problems
with the original and with the int8 target: one token at a time, and by FLy with the embedded draft
(which stays as it is). Activations and caches are float32 in both, so that nothing else differs.
Retention is against the original target decoding alone. Writes results/int8_quality.json. Takes
about ten minutes on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import machine
from absl import flags
from paired import paired_interval, side_by_side
from texts import word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import load_pair
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.checkpoints.write import convert

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 600, "held-out problems")

BATCH = 16
RULES = ("autoregressive", "fly")


def main() -> None:
    target, draft = EMBEDDED_PAIR
    worded = word_problems("held_out", FLAGS.num_problems)
    configs = {rule: DecodingConfig(rule=rule, num_speculative_tokens=15) for rule in RULES}
    solved = {"float32": side_by_side(load_pair(), worded, configs, batch_size=BATCH)}
    with tempfile.TemporaryDirectory() as temporary:
        convert(target, Path(temporary) / "int8", "int8")
        pair = load_pair(Path(temporary) / "int8", draft, dtype="float32")
        assert pair.target.has_integers
        solved["int8"] = side_by_side(pair, worded, configs, batch_size=BATCH)
    base = solved["float32"].results[0]
    result: dict[str, Any] = {
        "command": f"python benchmarks/int8_quality.py --num_problems={len(worded)}",
        "num_problems": len(worded),
        "batch_size": BATCH,
        "num_speculative_tokens": 15,
    }
    for name, comparison in solved.items():
        for one in comparison.results:
            paired = paired_interval(worded, base.texts, one.texts)
            result[f"{name}, {one.name}"] = {
                "solved": one.accuracy,
                "retention": paired["retention"],
                "retention_95": [paired["low"], paired["high"]],
                "same_text": paired["same_text"],
                "mean_accepted_tokens": one.mean_accepted_tokens,
            }
            print(name, one.name, result[f"{name}, {one.name}"], flush=True)
    print(machine.write("int8_quality", result))


if __name__ == "__main__":
    machine.run(main)
