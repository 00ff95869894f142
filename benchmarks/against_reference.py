"""Our side of the comparison with FLy's reference code (AMD-AGI/FLy, PyTorch, batch 1).

    python benchmarks/against_reference.py ours --prompts_file=prompts.jsonl --output=ours.jsonl
    python benchmarks/against_reference.py compare ours1.jsonl,ours2.jsonl theirs1.jsonl,...

`ours` decodes prompts (JSON lines with `prompt_token_ids`) on the embedded pair and writes one JSON
line per prompt and mode with `mode`, `index`, `token_ids` (cut at the end of text, which is
dropped) and `seconds` (prefill not counted). The reference code is run by a harness of one's own
that writes the same lines for its modes `fly`, `fly-nongram`, `strict-nongram`, `greedy` and
`assisted`, on the same pair, prompts and machine, in turns with ours. `compare` takes the runs of
both sides, counts the prompts on which the tokens agree, and writes results/against_reference.json
with the smallest ratio of the speeds of a turn.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Sequence
from operator import truediv
from pathlib import Path
from typing import Any

import machine
from absl import app, flags

from fly_jax.decoding.config import DecodingConfig, from_reference_json
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.engine.engine import Engine

FLAGS = flags.FLAGS
flags.DEFINE_string("prompts_file", None, "JSON lines with prompt_token_ids")
flags.DEFINE_string("output", None, "JSON lines")
flags.DEFINE_integer("max_new_tokens", 128, "limit of each continuation")
flags.DEFINE_integer("best_k", 18, "K of the mode fly-best")

REFERENCE_CONFIG = {
    "spd_k": 15,
    "enable_fly": True,
    "win_len": 6,
    "entropy_thre": 0.3,
    "use_ngram": True,
    "max_ngram_size": 4,
    "num_ngram_pred_tokens": 6,
    "temperature": 0.0,
}

_COMPARED = (
    ("fly-best", "fly"),
    ("fly-best", "fly-nongram"),
    ("fly", "fly"),
    ("fly-nongram", "fly-nongram"),
    ("strict-nongram", "strict-nongram"),
    ("greedy", "greedy"),
)


def ours() -> None:
    pair = load_pair()
    lines = Path(FLAGS.prompts_file).read_text().splitlines()
    prompts = [json.loads(line)["prompt_token_ids"] for line in lines]
    config = from_reference_json(REFERENCE_CONFIG)
    configs = {
        "greedy": config.replace(rule="autoregressive"),
        "strict-nongram": config.replace(rule="exact", prompt_lookup_max=0),
        "fly": config,
        "fly-nongram": config.replace(prompt_lookup_max=0),
        "fly-best": DecodingConfig(num_speculative_tokens=FLAGS.best_k),
    }
    with Path(FLAGS.output).open("w") as output:
        for mode, one in configs.items():
            _decode(pair, mode, one, prompts, output)


def _decode(
    pair: Pair, mode: str, config: DecodingConfig, prompts: list[list[int]], output: Any
) -> None:
    limit = FLAGS.max_new_tokens
    engine = Engine.of(pair, config, prompts=prompts, max_new_tokens=limit, num_slots=1)
    engine.warm_up_for(engine.requests(prompts, limit))
    for index, account in enumerate(engine.generate(prompts, limit)):
        ended = account.finish_reason == "stop"
        record = {
            "mode": mode,
            "index": index,
            "token_ids": account.token_ids[:-1] if ended else account.token_ids,
            "num_tokens": len(account.token_ids),
            "seconds": account.seconds,
            "rounds": account.num_rounds,
        }
        print(json.dumps(record), file=output, flush=True)


def _read(path: str) -> dict[str, dict[int, dict[str, Any]]]:
    modes: dict[str, dict[int, dict[str, Any]]] = collections.defaultdict(dict)
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        modes[record["mode"]][record["index"]] = record
    return modes


def _speeds(runs: list[dict[str, dict[int, dict[str, Any]]]], mode: str) -> list[float]:
    """Useful tokens per second of each run: those up to the end of text."""
    return [
        sum(len(record["token_ids"]) for record in run[mode].values())
        / sum(record["seconds"] for record in run[mode].values())
        for run in runs
    ]


def compare(our_paths: str, their_paths: str) -> None:
    our_runs = [_read(path) for path in our_paths.split(",")]
    their_runs = [_read(path) for path in their_paths.split(",")]
    sides = {"fly_jax": our_runs, "reference": their_runs}
    speeds = {
        side: {
            mode: {"runs": _speeds(runs, mode), "median": statistics.median(_speeds(runs, mode))}
            for mode in runs[0]
        }
        for side, runs in sides.items()
    }
    same = {}
    for mode in ("fly", "fly-nongram", "strict-nongram", "greedy"):
        theirs = their_runs[0][mode]
        mine = our_runs[0][mode]
        alike = [mine[index]["token_ids"] == one["token_ids"] for index, one in theirs.items()]
        same[mode] = {"prompts": len(alike), "same_tokens": sum(alike)}
    result = {
        "command": "python benchmarks/against_reference.py (see its docstring)",
        "reference": "AMD-AGI/FLy at 6667ae8, torch 2.13.0 CPU, transformers 4.57.6, 2 threads",
        "config": REFERENCE_CONFIG,
        "best_k": FLAGS.best_k,
        "tokens_per_second": speeds,
        "same_tokens": same,
        "smallest_ratio_of_a_turn": {
            f"{ours} / {theirs}": min(
                map(truediv, speeds["fly_jax"][ours]["runs"], speeds["reference"][theirs]["runs"])
            )
            for ours, theirs in _COMPARED
        },
    }
    print(json.dumps(result["smallest_ratio_of_a_turn"], indent=2))
    print(machine.write("against_reference", result))


def main(argv: Sequence[str]) -> None:
    match argv[1:]:
        case ["ours"]:
            ours()
        case ["compare", our_paths, their_paths]:
            compare(our_paths, their_paths)
        case _:
            raise app.UsageError("Say 'ours', or 'compare' and the files of both sides.")


if __name__ == "__main__":
    app.run(main)
