"""What windows that stay open across rounds bring, at several K: FLy on held-out problems.

    python benchmarks/deferral.py

Compares the published rule, which refuses a mismatch whose window does not fit into its block, with
the policy of `boundary="defer"` and with a naive one that always defers. Counts only, no times, so
other work beside it does no harm. Writes results/deferral.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import machine
from absl import app, flags
from paired import paired_interval
from texts import MAX_NEW_TOKENS, word_problems
from tqdm import tqdm

from fly_jax.decoding import deferral
from fly_jax.decoding.config import Boundary
from fly_jax.decoding.decoder import Generation, capacity_for
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.verification.rules import Exact, Fly, Rule

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 500, "held-out problems")
flags.DEFINE_list("k", ["4", "6", "8", "15", "25"], "draft tokens of a round")

BATCH = 16


def _decode(
    pair: Pair, prompts: list[list[int]], rule: Rule, k: int, boundary: Boundary
) -> list[Generation]:
    spec = pair.spec(rule=rule, num_speculative_tokens=k, boundary=boundary)
    capacity = capacity_for(spec, prompts, MAX_NEW_TOKENS, pair.target.config.max_context)
    decoder = pair.decoder(spec, capacity=capacity, batch_size=BATCH)
    return decoder.generate(prompts, MAX_NEW_TOKENS)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is no flag; see --help.")
    pair = load_pair()
    worded = word_problems("held_out", FLAGS.num_problems)
    prompts = [pair.tokenizer.encode(problem.prompt) for problem in worded]
    found: dict[str, dict[str, Any]] = {}
    target_texts: list[str] = []
    for k in tqdm([int(k) for k in FLAGS.k], unit="K"):
        contenders: dict[str, tuple[Rule, Boundary]] = {"exact": (Exact(), "reject")}
        if k > Fly().window_size:
            contenders["fly"] = Fly(), "reject"
        contenders |= {"fly, deferred": (Fly(), "defer"), "fly, always deferred": (Fly(), "defer")}
        rows: dict[str, Any] = {}
        for name, (rule, boundary) in contenders.items():
            with mock.patch.object(deferral, "pays", wraps=deferral.pays) as policy:
                if name == "fly, always deferred":
                    jax.clear_caches()  # of the programs with the other policy
                    policy.side_effect = lambda pace, *_: pace.matched >= 0
                accounts = _decode(pair, prompts, rule, k, boundary)
            texts = [pair.tokenizer.decode(one.token_ids) for one in accounts]
            target_texts = target_texts or texts
            num_tokens = sum(len(one.token_ids) for one in accounts)
            num_rounds = sum(one.num_rounds for one in accounts)
            rows[name] = {
                "mean_accepted_tokens": num_tokens / num_rounds,
                "num_rescued_tokens": sum(one.num_rescued_tokens for one in accounts),
                "num_rollbacks": sum(one.num_rollbacks for one in accounts),
                **paired_interval(worded, target_texts, texts),
            }
            tqdm.write(f"K = {k}, {name}: {num_tokens / num_rounds:.2f} mean accepted tokens")
        jax.clear_caches()
        found[str(k)] = rows
    result = {
        "command": "python benchmarks/deferral.py",
        "num_problems": len(worded),
        "batch_size": BATCH,
        "k": found,
    }
    print(machine.write("deferral", result))


if __name__ == "__main__":
    app.run(main)
