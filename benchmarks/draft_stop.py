"""Drafting that stops early (`draft_stop`) beside drafting K tokens, on problems and library text.

    python benchmarks/draft_stop.py

Exact and FLy, each with its usual K and with K chosen round by round, all in turns on the same
held-out prompts, one row at a time. Writes results/draft_stop.json. Takes about five minutes on two
cores; run nothing else meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import machine
from absl import app, flags

from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.spec import RoundSpec
from fly_jax.evaluation.compare import Comparison, compare
from fly_jax.training.library_text import documents
from fly_jax.training.problems import is_correct, problems
from fly_jax.verification.rules import Exact, Fly, Rule

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 60, "held-out problems")
flags.DEFINE_integer("num_documents", 60, "held-out chunks of library text")
flags.DEFINE_string("name", "draft_stop", "of the result file")

MAX_NEW_TOKENS = 160
PROMPT_TOKENS = 40
CASES: tuple[tuple[str, Rule, int | Literal["auto"]], ...] = (
    ("exact", Exact(), 15),
    ("exact", Exact(), "auto"),
    ("fly", Fly(), 15),
    ("fly", Fly(), 22),
    ("fly", Fly(), "auto"),
)


def _specs(pair: Pair) -> dict[str, RoundSpec]:
    """Each case without and with early stopping, one after the other."""
    return {
        f"{name} K={k}{', stops' if stop else ''}": pair.spec(
            rule=rule, num_speculative_tokens=k, draft_stop=stop
        )
        for name, rule, k in CASES
        for stop in (None, EntropyStop())
    }


def _figures(compared: Comparison) -> dict[str, Any]:
    print(compared.table(), flush=True)
    figures: dict[str, Any] = compared.to_dict()
    for one in compared.results:
        figures[one.name]["draft_tokens_per_round"] = one.num_draft_tokens / one.num_rounds
    return figures


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is no flag; see --help.")
    pair = load_pair()
    specs = _specs(pair)
    worded = list(itertools.islice(problems(4, "held_out"), FLAGS.num_problems))
    on_problems = compare(
        pair,
        [problem.prompt for problem in worded],
        specs,
        max_new_tokens=MAX_NEW_TOKENS,
        check=lambda index, text: is_correct(worded[index], text),
    )
    encoded = (pair.tokenizer.encode(text) for text in documents("held_out"))
    prompts = [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= 2 * PROMPT_TOKENS]
    stride = max(1, len(prompts) // FLAGS.num_documents)
    on_library = compare(
        pair, prompts[::stride][: FLAGS.num_documents], specs, max_new_tokens=MAX_NEW_TOKENS
    )
    result = {
        "command": "python benchmarks/draft_stop.py",
        "num_problems": len(worded),
        "num_documents": FLAGS.num_documents,
        "problems": _figures(on_problems),
        "library": _figures(on_library),
    }
    print(machine.write(FLAGS.name, result))


if __name__ == "__main__":
    app.run(main)
