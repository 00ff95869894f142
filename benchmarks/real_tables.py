"""The tables of a real model, from the result file of ifeval.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from real_decodings import TARGET_ALONE


def quality(ifeval: Mapping[str, Any]) -> list[str]:
    """For docs/real_model.md: what is followed, and how that differs from the target's.

    Args:
      ifeval: what ifeval.py wrote.
    """
    judged = ifeval["decodings"]
    lines = [
        f"IFEval, strict, up to {ifeval['max_new_tokens']} new tokens "
        f"({ifeval['machine']['date']}; [file](../benchmarks/results/ifeval.json)): what is "
        "followed, and the difference in points with a paired 95% interval.",
        "",
        "| decoding | prompts | prompt level | instruction level | gained, lost | same text "
        "| mean accepted tokens | rescued per 100 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in judged.items():
        levels = []
        for level in ("prompt_level", "instruction_level"):
            points = "" if name == TARGET_ALONE else f": {_difference(one[level])}"
            levels.append(f"{one[level]['this']:.1f}%{points}")
        changed = f"{len(one['gained'])}, {len(one['lost'])}" if name != TARGET_ALONE else ""
        lines.append(
            f"| {_named(name)} | {one['prompts']} | {levels[0]} | {levels[1]} | {changed} "
            f"| {one['same_text']} | {one['mean_accepted_tokens']:.2f} "
            f"| {one['rescued_per_100_tokens']:.1f} |"
        )
    return lines


def _difference(score: Mapping[str, float]) -> str:
    return f"{score['points']:+.1f} ({score['low']:+.1f} to {score['high']:+.1f})"


def _named(way: str) -> str:
    return ("one token at a time" if way == TARGET_ALONE else way).replace("|", "\\|")
