"""int8 on a CPU beside bfloat16 on an H100, on the items that `evaluate` judged on both.

    python benchmarks/int8_paired.py

It reads the answers' verdicts in results/qwen and results/h100, and writes
results/qwen/int8_paired.json: of each task and of all items together what was gained and lost, and
whether that is worse, by a margin of one and of two points.
"""

from __future__ import annotations

import json

import machine
import numpy as np

from fly_jax.evaluation.answers import compare_paired

_QWEN = machine.RESULTS / "qwen"
# Exact is the int8 target's own text.
_TASKS = {"humaneval": "exact, K = 4", "mbpp": "exact, K = 3"}


def main() -> None:
    """Pairs the verdicts, and writes the result."""
    wide = json.loads((machine.RESULTS / "h100" / "quality_draft.json").read_text())["tasks"]
    verdicts = {}
    for task, decoding in _TASKS.items():
        found = json.loads((_QWEN / f"{task}_int8.json").read_text())["tasks"][task][decoding]
        base = wide[task]["autoregressive"]
        right = dict(zip(found["items"], found["right"], strict=True))
        pairs = zip(base["items"], base["right"], strict=True)
        verdicts[task] = np.array([(one == "1", right[item] == "1") for item, one in pairs])
    verdicts["all"] = np.concatenate([*verdicts.values()])
    result = {
        name: {"items": len(both)}
        | {f"{margin} points": compare_paired(*both.T, margin=margin) for margin in (1.0, 2.0)}
        for name, both in verdicts.items()
    }
    machine.write("qwen/int8_paired", result)


if __name__ == "__main__":
    machine.run(main)
