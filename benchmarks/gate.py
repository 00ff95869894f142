"""Gates that calibration finds for the embedded pair, for several bounds, and how long it takes.

    python benchmarks/gate.py

The prompts are held-out problems without their answers. Writes results/gate.json. Takes some five
minutes on two cores; run nothing else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from absl import flags
from texts import MAX_NEW_TOKENS, word_problems

from fly_jax.decoding.config import DecodingConfig, load_config
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.evaluation.calibration import find_gate
from fly_jax.evaluation.strictness import Bound

_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "rows decoded together")
_NUM_PROMPTS = 64  # held-out problems, half of them to check with

RULES = ("fly", "margin")
LIMITS = (0.01, 0.02, 0.05)
CONFIG = Path(__file__).parents[1] / "configs" / "embedded_pair.toml"


def _found(
    pair: Pair, ids: Sequence[Sequence[int]], config: DecodingConfig, limit: float
) -> dict[str, Any]:
    start = time.perf_counter()
    gate = find_gate(
        pair, ids, config, Bound("disagreement", limit), max_new_tokens=MAX_NEW_TOKENS,
        batch_size=_BATCH_SIZE.value,
    )  # fmt: skip
    print(gate.summary(), flush=True)
    return {
        "rule": config.rule,
        "max_disagreement": limit,
        **{name: gate.config.to_dict()[name] for name in gate.varied},
        "disagreement": gate.rate,
        "upper_95": gate.upper,
        "regret": Bound("regret", 1.0).rate(gate.checked),
        "num_tokens": int(gate.checked.tokens.sum()),
        "mean_accepted_tokens": gate.checked.mean_accepted_tokens,
        "exact_mean_accepted_tokens": gate.exact.mean_accepted_tokens,
        "num_tried": gate.num_tried,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    pair = load_pair()
    worded = word_problems("held_out", _NUM_PROMPTS)
    ids = [pair.tokenizer.encode(problem.prompt) for problem in worded]
    base = load_config(CONFIG)
    rules = [base.replace(rule=rule) for rule in RULES]
    found = [_found(pair, ids, one, limit) for one in rules for limit in LIMITS]
    result = {
        "command": f"python benchmarks/gate.py --batch_size={_BATCH_SIZE.value}",
        "num_prompts": len(ids), "batch_size": _BATCH_SIZE.value, "found": found,
        "num_speculative_tokens": base.num_speculative_tokens, "max_new_tokens": MAX_NEW_TOKENS,
    }  # fmt: skip
    print(machine.write("gate", result))


if __name__ == "__main__":
    machine.run(main)
