"""Writes the tables of README.md, docs/rules.md and docs/real_model.md, between markers.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import real_tables
from hugging_face import GREEDY
from real_decodings import TARGET_ALONE

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: python benchmarks/tables.py -->\n", "<!-- end of results -->"


def _read(name: str) -> dict[str, Any]:
    return json.loads((machine.RESULTS / f"{name}.json").read_text())


def _where(result: dict[str, Any]) -> str:
    about = result["machine"]
    return (
        f"{about['cpu']}, {about['cpu_cores']} cores{_named(about.get('simd'))}, float32, "
        f"JAX {about['jax']}, {about['date']}"
    )


def _named(simd: str | None) -> str:
    """The vectors of a processor, which older results leave out."""
    return f" with {simd.upper()}" if simd else ""


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


def _reference(result: dict[str, Any]) -> list[str]:
    def medians(mode: str) -> str:
        theirs, ours = (
            result["tokens_per_second"][side][mode]["median"] for side in ("reference", "fly_jax")
        )
        return f"{theirs:.0f} and {ours:.0f} tokens/s"

    best = result["tokens_per_second"]["fly_jax"]["fly-best"]
    same = result["same_tokens"]["fly"]
    return [
        "",
        "FLy's reference code (PyTorch, batch 1) and fly_jax on the same pair, prompts and "
        f"machine, in turns: {medians('greedy')} one token at a time (theirs: Hugging Face), "
        f"{medians('fly')} with FLy as published, {medians('fly-nongram')} without its n-gram "
        f"level, and fly_jax {best['median']:.0f} with its best K = {result['best_k']}. With the "
        f"reference's config the tokens are the same on {same['same_tokens']} of "
        f"{same['prompts']} prompts (medians of {len(best['runs'])} turns, "
        f"{result['machine']['date']}; [file](../benchmarks/results/against_reference.json)).",
    ]


def _rules_rows(measured: dict[str, Any]) -> list[str]:
    """A row for every rule of one K: on problems, and on library text."""
    lines = [
        "| rule | mean accepted tokens | speed over tuned exact | retention (95% interval) "
        "| disagreement | library: mean accepted tokens | speed over tuned exact | disagreement |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in measured["problems"].items():
        library, shown_name = measured["library"][name], name.replace("|", "\\|")
        lines.append(
            f"| {shown_name} | {row['mean_accepted_tokens']:.2f} | {row['speed_up']:.2f}x "
            f"| {row['retention']:.1%} ({row['low']:.1%} to {row['high']:.1%}) "
            f"| {row['rescued_per_100_tokens']:.1f} | {library['mean_accepted_tokens']:.2f} "
            f"| {library['speed_up']:.2f}x | {library['rescued_per_100_tokens']:.1f} |"
        )
    return lines


def _in_three_lines(pair: dict[str, Any], rules: dict[str, Any], real: dict[str, Any]) -> list[str]:
    """The result in three lines, the unfavourable too."""
    rows, of_k = pair["problems"], rules["batch_size"]["1"]["k"]["15"]
    exact = next(row for name, row in rows.items() if name.startswith("exact"))
    of_fly = (name for name in rows if name.startswith("fly"))
    best = max(of_fly, key=lambda name: rows[name]["speed_up"])
    fly, kept, library = rows[best], pair["paired"][best], of_k["library"]
    alone = real["summaries"][real_tables.ONE]
    plain, theirs = (alone[name]["tokens_per_second"] for name in (TARGET_ALONE, GREEDY))
    fastest = max(
        (name for name in alone if ", " in name and not name.startswith("Hugging")),
        key=lambda name: alone[name]["tokens_per_second"],
    )
    return [
        f"1. **On the pair that ships inside**, word problems, one at a time: FLy decodes "
        f"{fly['speed_up']:.1f} times as fast as one token at a time and "
        f"{fly['speed_up'] / exact['speed_up']:.2f} times as fast as tuned exact speculation, for "
        f"{kept['retention']:.1%} of the answers (95% interval {kept['low']:.1%} to "
        f"{kept['high']:.1%}). On library text it is slower than tuned exact speculation "
        f"({library['fly']['speed_up']:.2f}x at K = 15).",
        f"2. **On a real model on a CPU** (SmolLM2-135M-Instruct) speculation brings hardly "
        f"anything on average: one token at a time decodes {plain:.1f} tokens/s, the fastest draft "
        f"{alone[fastest]['tokens_per_second']:.1f} ({fastest}), Hugging Face {theirs:.1f}.",
        "3. **On accelerators** nothing larger than the embedded pair has been measured. The "
        "published 2.81x on a 70B and 5.07x on a 405B target are FLy's authors' and have not been "
        "repeated here, for want of the weights.",
        "",
    ]


def _rules_all(result: dict[str, Any]) -> list[str]:
    lines = [
        f"Measured on {_where(result)}, {result['num_problems']} held-out problems, "
        f"{result['num_documents']} pieces of library text."
    ]
    for batch, of_batch in sorted(result["batch_size"].items(), key=lambda one: int(one[0])):
        best = of_batch["best_exact_k"]
        lines += [
            "",
            f"## Batch {batch}",
            "",
            f"Exact speculative decoding is fastest with K = {best['problems']} on problems and "
            f"K = {best['library']} on library text.",
        ]
        for k, measured in sorted(of_batch["k"].items(), key=lambda one: int(one[0])):
            lines += ["", f"### K = {k}", "", *_rules_rows(measured)]
    return lines


def _put(path: Path, lines: Sequence[str]) -> None:
    text = path.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    path.write_text(f"{text[:start]}{chr(10).join(lines)}\n{text[end:]}", encoding="utf-8")


def main() -> None:
    rules, real, ifeval = _read("rules"), _read("real_model"), _read("ifeval")
    pair = _read("embedded_pair")
    _put(ROOT / "README.md", _in_three_lines(pair, rules, real) + _pair_table(pair))
    _put(ROOT / "docs" / "rules.md", _rules_all(rules) + _reference(_read("against_reference")))
    _put(ROOT / "docs" / "real_model.md", real_tables.page(real, ifeval, _where(real)))


if __name__ == "__main__":
    machine.run(main)
