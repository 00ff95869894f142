"""Writes the README's result tables from the result files, between its two markers.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from absl import app

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- results: python benchmarks/tables.py -->\n", "<!-- end of results -->"


def _read(name: str) -> dict[str, Any]:
    return json.loads((machine.RESULTS / f"{name}.json").read_text())


def _where(result: dict[str, Any]) -> str:
    about = result["machine"]
    return (
        f"{about['cpu']}, {about['cpu_cores']} cores, float32, JAX {about['jax']}, {about['date']}"
    )


def _pair_table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"The embedded pair on {result['num_problems']} held-out word problems, batch "
        f"{result['batch_size']}, each rule with its best K ({_where(result)}; "
        "[script](benchmarks/embedded_pair.py), [file](benchmarks/results/embedded_pair.json)):",
        "",
        "| decoding | tokens/s | speed-up | mean accepted tokens | rescued per 100 | solved | "
        "retention (95% interval) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["problems"].items():
        paired = result["paired"].get(name)
        kept = (
            ""
            if paired is None
            else (f"{paired['retention']:.1%} ({paired['low']:.1%} to {paired['high']:.1%})")
        )
        lines.append(
            f"| {name} | {row['tokens_per_second']:.0f} | {row['speed_up']:.2f}x "
            f"| {row['mean_accepted_tokens']:.2f} | {row['rescued_per_100_tokens']:.1f} "
            f"| {row['num_correct'] / row['num_checked']:.1%} | {kept} |"
        )
    library = ", ".join(
        f"{name} {row['speed_up']:.2f}x ({row['mean_accepted_tokens']:.2f} tokens a pass)"
        for name, row in list(result["library"].items())[1:]
    )
    return [
        *lines,
        "",
        f"On held-out library text, where nothing can be checked, each with its best K there: "
        f"{library}.",
    ]


def _reference_table(result: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"Against FLy's reference code (PyTorch, batch 1) on the same pair, prompts and machine, "
        f"in turns ({result['machine']['date']}; "
        "[file](benchmarks/results/against_reference.json)):",
        "",
        "| | reference, tokens/s | fly_jax, tokens/s |",
        "|---|---|---|",
    ]
    theirs, ours = (result["tokens_per_second"][side] for side in ("reference", "fly_jax"))
    for label, their_mode, our_mode in (
        ("greedy, one token at a time (theirs: Hugging Face)", "greedy", "greedy"),
        ("FLy as published, n-gram level on", "fly", "fly"),
        ("FLy, n-gram level off", "fly-nongram", "fly-nongram"),
        (f"FLy, best K = {result['best_k']}", None, "fly-best"),
    ):
        their = "" if their_mode is None else f"{theirs[their_mode]['median']:.0f}"
        lines.append(f"| {label} | {their} | {ours[our_mode]['median']:.0f} |")
    same = result["same_tokens"]["fly"]
    least = result["smallest_ratio_of_a_turn"]
    turns = len(theirs["fly"]["runs"])
    return [
        *lines,
        "",
        f"Medians of {turns} turns; the smallest ratio of a turn is "
        f"{least['fly-best / fly']:.1f} to the reference as published and "
        f"{least['fly-best / fly-nongram']:.1f} to its fastest configuration. With the "
        f"reference's config the tokens are the same on {same['same_tokens']} of "
        f"{same['prompts']} prompts.",
    ]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is not understood; this script takes no arguments.")
    lines = _pair_table(_read("embedded_pair"))
    if (machine.RESULTS / "against_reference.json").exists():
        lines += _reference_table(_read("against_reference"))
    text = README.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(f"{text[:start]}{chr(10).join(lines)}\n{text[end:]}", encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
