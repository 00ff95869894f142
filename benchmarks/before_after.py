"""Two versions of fly_jax side by side: the embedded pair, rule by rule, in batches of 1 and 8.

    git worktree add ../before 9c5e518
    python benchmarks/before_after.py --before ../before

Each version runs in processes of its own; they take turns, so that what else the machine does
weighs on both. Where a process gets its memory decides over a tenth of its speed for as long as it
lives, so both are started anew several times. The file keeps every turn, and whether the tokens
are the same.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

_BEFORE = flags.DEFINE_string("before", None, "checkout of the version to compare with")
_TURNS = flags.DEFINE_integer("turns", 4, "measurements of each process", lower_bound=1)
_STARTS = flags.DEFINE_integer("starts", 5, "processes of each version", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "problems to continue", lower_bound=1)
_ROOT = Path(__file__).resolve().parents[1]
_MAX_NEW_TOKENS = 128
_SEED = 77

# Values of a config, which both versions know by the same names.
CONFIGS: dict[str, dict[str, Any]] = {
    "autoregressive": {"rule": "autoregressive"},
    "exact, K = 9": {"rule": "exact", "num_speculative_tokens": 9},
    "fly, K = 15": {"rule": "fly"},
    "margin 1 without digits, K = 15": {"rule": "margin", "margin_gap": 1.0, "protect": [r"\d"]},
    "fly, K = 15, lookup": {"rule": "fly", "prompt_lookup_max": 4},
    "fly, auto": {"rule": "fly", "num_speculative_tokens": "auto"},
    "fly, K = 6, deferred": {
        "rule": "fly", "num_speculative_tokens": 6, "boundary": "defer",
    },
    "fly | margin, K = 15": {"rule": "fly | margin"},
    "csd, K = 15": {"rule": "csd"},
    "typical, K = 15": {"rule": "typical"},
    "fly, K = 15, budget 3": {"rule": "fly", "risk_budget": 3.0},
    "sampled, top-p 0.9, K = 9": {
        "rule": "sampled", "temperature": 0.7, "top_p": 0.9, "num_speculative_tokens": 9,
    },
}  # fmt: skip


def _serve(root: str, num_prompts: int) -> None:
    """Decodes what it is asked to, with the version in this checkout."""
    sys.path.insert(0, root)
    import fly_jax
    from fly_jax.decoding.pair import load_pair
    from fly_jax.training.problems import problems

    assert fly_jax.__file__ is not None
    assert Path(fly_jax.__file__).is_relative_to(root), fly_jax.__file__
    pair = load_pair()
    drawn = itertools.islice(problems(_SEED, "held_out"), num_prompts)
    ids = [pair.tokenizer.encode(problem.prompt) for problem in drawn]
    decoders: dict[str, Any] = {}
    for line in sys.stdin:
        values, batch_size = json.loads(line)
        protect = tuple(values.get("protect", ()))
        values = values | ({"protect": protect} if protect else {})
        if line not in decoders:
            decoders[line] = _decoder(pair, values, protect, ids, batch_size)
            decoders[line].generate(ids, _MAX_NEW_TOKENS)  # compiles
        decoded = decoders[line].generate(ids, _MAX_NEW_TOKENS)
        batches = [decoded[at : at + batch_size] for at in range(0, len(ids), batch_size)]
        seconds = sum(max(one.seconds for one in batch) for batch in batches)
        answer = {
            "tokens_per_second": sum(len(one.token_ids) for one in decoded) / seconds,
            "tokens": [one.token_ids for one in decoded],
        }
        print(json.dumps(answer), flush=True)


def _decoder(
    pair: Any, values: dict[str, Any], protect: tuple[str, ...], ids: list[list[int]], rows: int
) -> Any:
    if hasattr(pair, "config"):
        spec = pair.spec(**values)
        return pair.decoder(spec, batch_size=rows, protect=protect)
    from fly_jax.decoding.config import DecodeConfig  # type: ignore[attr-defined]
    from fly_jax.decoding.decoder import capacity_for  # type: ignore[attr-defined]

    spec = pair.spec_of(DecodeConfig(**values))
    capacity = capacity_for(spec, ids, _MAX_NEW_TOKENS, pair.target.config.max_context)
    return pair.decoder(spec, capacity=capacity, batch_size=rows, protect=protect)


class _Version:
    """A process with one version; what it compiles is kept for the next one."""

    def __init__(self, root: Path, cache: str) -> None:
        caches = {"JAX_COMPILATION_CACHE_DIR": cache, "FLY_JAX_COMPILATION_CACHE": cache}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(root), str(_PROMPTS.value)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **caches, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    def __enter__(self) -> _Version:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, values: dict[str, Any], batch_size: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([values, batch_size]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _turn(
    versions: list[_Version], values: dict[str, Any], rows: int, turn: int
) -> list[dict[str, Any]]:
    """One measurement of each version; they take turns in going first."""
    order = (0, 1) if turn % 2 == 0 else (1, 0)
    answers = {index: versions[index].ask(values, rows) for index in order}
    return [answers[0], answers[1]]


def _summary(speeds: list[list[float]], *, same: bool) -> dict[str, Any]:
    before, after = zip(*speeds, strict=True)
    return {
        "before": statistics.median(before),
        "after": statistics.median(after),
        "median_ratio": statistics.median(after) / statistics.median(before),
        "best_ratio": max(after) / max(before),
        "turns": speeds,
        "same_tokens": same,
    }


def main(_: list[str]) -> None:
    if _BEFORE.value is None:
        raise app.UsageError("--before needs the checkout of another version.")
    from machine import write

    before = Path(_BEFORE.value).resolve()
    commit = subprocess.run(
        ["git", "-C", str(before), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    speeds: dict[str, list[list[float]]] = {}
    same: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as cache:
        for start in range(_STARTS.value):
            with _Version(before, cache) as old, _Version(_ROOT, cache) as new:
                for name, values in CONFIGS.items():
                    for rows in (1, 8):
                        label = f"{name}, batch {rows}"
                        for turn in range(_TURNS.value):
                            answers = _turn([old, new], values, rows, turn + start)
                            one = [answer["tokens_per_second"] for answer in answers]
                            speeds.setdefault(label, []).append(one)
                            alike = answers[0]["tokens"] == answers[1]["tokens"]
                            same[label] = same.get(label, True) and alike
            found = {label: _summary(turns, same=same[label]) for label, turns in speeds.items()}
            path = write("before_after", {"before_commit": commit, "configs": found})
            print(f"{start + 1} of {_STARTS.value} starts", file=sys.stderr, flush=True)
    for label, one in found.items():
        print(
            f"{label}: {one['before']:.0f} -> {one['after']:.0f} tokens/s, median ratio "
            f"{one['median_ratio']:.2f}, ratio of the best {one['best_ratio']:.2f}, same tokens: "
            f"{one['same_tokens']}"
        )
    print(path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(sys.argv[2], int(sys.argv[3]))
    else:
        app.run(main)
