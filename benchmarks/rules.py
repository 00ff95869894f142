"""Every loosened rule beside tuned exact speculative decoding, at several K, with what it costs.

    python benchmarks/rules.py --batch_size=8

Finds the K with which exact speculative decoding is fastest, and then, for each K, runs the rules
side by side, in turns, on held-out problems and on held-out library text. Adds what it measures to
results/rules.json, K by K, so that a run that was interrupted loses one K at most. Takes about five
minutes for each K on two cores; run nothing else meanwhile.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
from absl import flags
from texts import MAX_NEW_TOKENS, library_beginnings, word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.answers import compare_paired
from fly_jax.evaluation.calibration import fill_memory
from fly_jax.evaluation.compare import Comparison, compare
from fly_jax.evaluation.problems import Problem, is_correct
from fly_jax.verification.correction_memory import CorrectionMemory

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_problems", 500, "held-out problems")
flags.DEFINE_integer("num_documents", 60, "held-out chunks of library text")
flags.DEFINE_integer("batch_size", 8, "rows decoded together")
flags.DEFINE_list("k", ["4", "6", "8", "15", "25"], "draft tokens of a round")
flags.DEFINE_list("rules", None, "those to run, separated by commas; all if not given")

BEST_EXACT = "exact with its best K"
_NO_DIGITS = (r"\d",)
RULES: dict[str, dict[str, Any]] = {
    "exact": {"rule": "exact"},
    "fly": {},
    "fly deferred": {"boundary": "defer"},
    "fly without digits": {"protect": _NO_DIGITS},
    "csd": {"rule": "csd"},
    "lossy": {"rule": "lossy"},
    "lenience": {"rule": "lenience"},
    "typical": {"rule": "typical"},
    "margin": {"rule": "margin"},
    "margin 1": {"rule": "margin", "margin_gap": 1.0},
    "margin 1 with budget 4": {"rule": "margin", "margin_gap": 1.0, "risk_budget": 4.0},
    "margin 1 without digits": {"rule": "margin", "margin_gap": 1.0, "protect": _NO_DIGITS},
    "fly | margin 1 without digits deferred": {
        "rule": "fly | margin",
        "margin_gap": 1.0,
        "protect": _NO_DIGITS,
        "boundary": "defer",
    },
}
_TUNING_K = {"problems": (5, 7, 9, 10, 12, 15), "library": (1, 2, 3, 4, 5, 6, 8)}
_NUM_TUNING = {"problems": 60, "library": 20}

Run = Callable[[str, dict[str, DecodingConfig]], Comparison]


def side_by_side(
    pair: Pair, texts: Sequence[Any], configs: Mapping[str, DecodingConfig], **given: Any
) -> Comparison:
    """Word problems, or prompts as text or token ids, in turns; prints the table.

    Args:
      pair: that decodes.
      texts: problems or prompts.
      configs: by name, the baseline first.
      **given: see `compare`.
    """
    worded = [one for one in texts if isinstance(one, Problem)]
    compared = compare(
        pair,
        [one.prompt for one in worded] or texts,
        configs,
        max_new_tokens=MAX_NEW_TOKENS,
        check=(lambda index, text: is_correct(worded[index], text)) if worded else None,
        **given,
    )
    print(compared.table(), flush=True)
    return compared


def paired_interval(
    worded: Sequence[Problem], base: Sequence[str], other: Sequence[str]
) -> dict[str, Any]:
    """Retention with a 95% interval, and what became of the problems; see `compare_paired`."""
    ours, theirs = (
        np.array([is_correct(*one) for one in zip(worded, texts, strict=True)])
        for texts in (base, other)
    )
    same = float(np.mean([a == b for a, b in zip(base, other, strict=True)]))
    return compare_paired(ours, theirs, margin=1.0) | {"same_text": same}


def _configs(k: int) -> dict[str, DecodingConfig]:
    """The rules that can do something at this K."""
    configs = {}
    for name, values in RULES.items():
        if FLAGS.rules is not None and name not in FLAGS.rules:
            continue
        config = DecodingConfig(**values, num_speculative_tokens=k)
        try:
            config.to_rule()
        except FlyJaxError:  # no window fits: the rule would be exact decoding
            continue
        configs[name] = config
    return configs


def _run(
    pair: Pair, texts: dict[str, Sequence[Any]], memory: CorrectionMemory | None,
    on: str, configs: dict[str, DecodingConfig],
) -> Comparison:  # fmt: skip
    fixed = {name: config.replace(csd_online=False) for name, config in configs.items()}
    return side_by_side(pair, texts[on], fixed, batch_size=FLAGS.batch_size, memory=memory)


def _best_exact(run: Run) -> dict[str, int]:
    """The K of the fastest exact decoding of each kind of text."""
    best = {}
    for on, depths in _TUNING_K.items():
        exact = {str(k): DecodingConfig(rule="exact", num_speculative_tokens=k) for k in depths}
        fastest = max(run(on, exact).results, key=lambda one: one.tokens_per_second)
        best[on] = int(fastest.name)
    return best


def _texts(pair: Pair, number: dict[str, int], split: Any) -> dict[str, Sequence[Any]]:
    return {
        "problems": word_problems(split, number["problems"]),
        "library": library_beginnings(pair, split, number["library"]),
    }


def _memory(pair: Pair) -> CorrectionMemory:
    """The memory that csd begins with: corrections of development texts of both kinds."""
    texts = _texts(pair, {"problems": 300, "library": 60}, "development")
    prompts = [pair.tokenizer.encode(problem.prompt) for problem in texts["problems"]]
    with tempfile.TemporaryDirectory() as folder:
        return fill_memory(
            pair,
            [*prompts, *texts["library"]],
            Path(folder) / "memory.npz",
            num_speculative_tokens=15,
            models="embedded",
            max_new_tokens=MAX_NEW_TOKENS,
            batch_size=8,
        )


def _figures(compared: Comparison, on: str) -> dict[str, Any]:
    """Every rule's figures; the first rule is exact, so its texts are the target's own."""
    base, found = compared.results[0], compared.to_dict()
    worded = word_problems("held_out", FLAGS.num_problems)
    for one in compared.results:
        same = [mine == text for mine, text in zip(one.texts, base.texts, strict=True)]
        found[one.name]["same_text"] = sum(same) / len(same)
        if on == "problems":
            found[one.name] |= paired_interval(worded, base.texts, one.texts)
            found[one.name]["accuracy"] = one.accuracy
    return found


def main() -> None:
    pair = load_pair()
    memory = _memory(pair)
    path = machine.RESULTS / "rules.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result.pop("machine", None)
    result |= {"command": "python benchmarks/rules.py --batch_size=B", "rules": RULES}
    result |= {"num_problems": FLAGS.num_problems, "num_documents": FLAGS.num_documents}
    tuning = functools.partial(_run, pair, _texts(pair, _NUM_TUNING, "development"), memory)
    sizes = {"problems": FLAGS.num_problems, "library": FLAGS.num_documents}
    held_out = functools.partial(_run, pair, _texts(pair, sizes, "held_out"), memory)
    of_batch = result.setdefault("batch_size", {}).setdefault(str(FLAGS.batch_size), {})
    best = of_batch.get("best_exact_k") or _best_exact(tuning)
    of_batch["best_exact_k"] = best
    for k in FLAGS.k:
        found = of_batch.setdefault("k", {}).setdefault(k, {})
        for on, best_k in best.items():
            tuned = DecodingConfig(rule="exact", num_speculative_tokens=best_k)
            made = _figures(held_out(on, {BEST_EXACT: tuned, **_configs(int(k))}), on)
            found.setdefault(on, {}).update(made)
        machine.write("rules", result)


if __name__ == "__main__":
    machine.run(main)
