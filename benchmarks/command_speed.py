"""The command's decoding speed in two checkouts, in turns: has a change made it slower?

    git worktree add ../before 9c5e518; git worktree add ../again HEAD
    python benchmarks/command_speed.py --before ../before --again ../again --turns 24

Each turn is a process of one checkout that decodes the same held-out word problems, one at a time,
with the embedded pair. What is counted is each record's `tokens_per_second`, which is without what
the prompt takes. Before the turns each process runs once to compile. Processes of one commit differ
by several percent, whichever runs first: a second checkout of it (`--again`) shows by how much.
Writes results/command_speed.json; run nothing else meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from absl import flags
from texts import MAX_NEW_TOKENS, word_problems

_BEFORE = flags.DEFINE_string("before", None, "a checkout")
_AFTER = flags.DEFINE_string("after", str(Path(__file__).parents[1]), "another one")
_AGAIN = flags.DEFINE_string("again", None, "a second checkout of the commit of --after")
_TURNS = flags.DEFINE_integer("turns", 4, "measurements of each", lower_bound=2)

WAYS = {"exact, K = 9": ("exact", 9), "fly, K = 15": ("fly", 15)}


def _decoded(checkout: Path, prompts: Path, way: str) -> list[dict[str, Any]]:
    """The records that the command of a checkout prints."""
    rule, k = WAYS[way]
    command = [
        sys.executable, "-m", "fly_jax.launch", f"--prompts_file={prompts}", "--json",
        f"--rule={rule}", f"--num_speculative_tokens={k}", f"--max_new_tokens={MAX_NEW_TOKENS}",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _speed(records: list[dict[str, Any]]) -> float:
    """Tokens a second of all prompts together."""
    sizes = [len(one["token_ids"]) for one in records]
    return sum(sizes) / sum(
        size / one["tokens_per_second"] for size, one in zip(sizes, records, strict=True) if size
    )


def _ratio(speeds: list[float], before: list[float]) -> tuple[float, float]:
    """The mean of the turns' ratios and its standard error."""
    ratios = [one / other for one, other in zip(speeds, before, strict=True)]
    return statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    given = {"before": _BEFORE.value, "after": _AFTER.value, "again": _AGAIN.value}
    checkouts = {side: Path(folder).resolve() for side, folder in given.items() if folder}
    worded, found = word_problems("held_out", 40), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": one.prompt}) + "\n" for one in worded))
        for way in WAYS:
            first = {side: _decoded(one, prompts, way) for side, one in checkouts.items()}
            turns: dict[str, list[float]] = {side: [] for side in checkouts}
            for _ in range(_TURNS.value):
                for side in random.sample(list(checkouts), len(checkouts)):
                    turns[side].append(_speed(_decoded(checkouts[side], prompts, way)))
            tokens = [[one["token_ids"] for one in records] for records in first.values()]
            found[way] = {
                "tokens_per_second": turns,
                "medians": {side: statistics.median(speeds) for side, speeds in turns.items()},
                "over_before": {side: _ratio(turns[side], turns["before"]) for side in checkouts},
                "same_tokens": sum(
                    all(one == same[0] for one in same) for same in zip(*tokens, strict=True)
                ),
            }
            print(way, found[way], flush=True)
    commits = {side: _commit(one) for side, one in checkouts.items()}
    print(machine.write("command_speed", {"commits": commits, "prompts": len(worded)} | found))


if __name__ == "__main__":
    flags.mark_flag_as_required("before")
    machine.run(main)
