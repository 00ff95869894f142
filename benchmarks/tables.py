"""Writes the tables of README.md and of pages in docs/, between markers.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine

TARGET_ALONE = "autoregressive"
ROOT = Path(__file__).parents[1]
# What the files of bench were measured on, and those of evaluate.
_REAL_PAIR = {
    "qwen/code_lookup": "HumanEval, the lookup drafts alone",
    "qwen/code_draft": "HumanEval, the 0.5B drafts",
    "qwen/code_loosened": "HumanEval, the 0.5B drafts, FLy and margin",
    "qwen/code_head": "HumanEval, the head drafts",
    "qwen/spec_head": "Spec-Bench, the head drafts",
    "qwen/spec_either": "Spec-Bench, the head drafts, what FLy or margin keeps",
    "qwen/spec_lookup": "Spec-Bench, the lookup drafts alone",
    "qwen/spec_lookup_more": "Spec-Bench, every 20th question, the lookup drafts alone",
    "qwen/spec_draft": "Spec-Bench, the 0.5B drafts",
    "qwen/spec_margin": "Spec-Bench, the 0.5B drafts, wider margins",
    "h100/draft": "A GPU, HumanEval and Spec-Bench, the 0.5B drafts",
    "h100/lookup": "A GPU, HumanEval and Spec-Bench, the lookup drafts alone",
}
_REAL_MODEL = {
    "smollm2/lookup": "Spec-Bench, the lookup drafts",
    "smollm2/drafter": "Spec-Bench, the drafter drafts",
}
_QUALITY = {
    "h100/quality_draft": "the 0.5B",
    "h100/quality_gsm8k": "the 0.5B",
    "h100/quality_lookup": "the lookup alone",
}
# Servers that one client asked, by the beginning of the files of bench serve.
_SERVERS = {
    "q8": "llama.cpp, Q8_0 (made of the Q4_K_M)",
    "q8_lookup": "llama.cpp, Q8_0, its own lookup of 10 tokens",
    "q4": "llama.cpp, Q4_K_M",
    "q4_lookup": "llama.cpp, Q4_K_M, its own lookup of 10 tokens",
    "plain": "fly_jax, int8, one token at a time",
    "lookup": "fly_jax, int8, exact by the lookup, K = `auto`",
    "margin_lookup_auto": "fly_jax, int8, margin by the lookup, K = `auto`",
}
# README's rows: the machine, what drafts, the rule, the files of its speeds on code and on prose
# (one for both on the H100), and of what it keeps.
_RESULT = (
    ("CPU", "lookup", "exact", "qwen/code_lookup", "qwen/spec_lookup", ""),
    ("CPU", "head and lookup", "exact", "qwen/code_head", "qwen/spec_head", ""),
    ("CPU", "head and lookup", "fly", "", "qwen/spec_head", "qwen/humaneval_head"),
    ("CPU", "head and lookup", "margin", "", "qwen/spec_head", "qwen/humaneval_head"),
    ("CPU", "0.5B over lookup", "exact", "qwen/code_loosened", "", ""),
    ("CPU", "0.5B over lookup", "fly", "qwen/code_loosened", "", "qwen/humaneval_int8_long"),
    ("H100", "lookup", "exact", "h100/lookup", "", ""),
    ("H100", "lookup", "fly", "h100/lookup", "", "h100/quality_lookup"),
    ("H100", "0.5B over lookup", "exact", "h100/draft", "", ""),
    ("H100", "0.5B over lookup", "fly", "h100/draft", "", "h100/quality_draft h100/quality_gsm8k"),
)
_TASKS = {"humaneval": "HumanEval", "mbpp": "MBPP", "gsm8k": "GSM8K"}
BEGIN, END = "<!-- results: python benchmarks/tables.py -->\n", "<!-- end of results -->"


def _read(name: str) -> dict[str, Any]:
    return json.loads((machine.RESULTS / f"{name}.json").read_text())


def _where(result: dict[str, Any]) -> str:
    about = result["machine"]
    vectors = f" with {about['simd'].upper()}" if about.get("simd") else ""
    runs_on = f"{about['cpu']}, {about['cpu_cores']} cores{vectors}"
    if about.get("devices", ["cpu"]) != ["cpu"]:
        runs_on = ", ".join(about["devices"])
    return f"{runs_on}, {result.get('dtype') or 'float32'}, JAX {about['jax']}, {about['date']}"


def _real_table() -> list[str]:
    """What a user of a real pair gains, and what it costs."""
    about, on_gpu = _read("qwen/code_head"), _read("h100/draft")
    lines = [
        f"Qwen2.5-Coder-1.5B-Instruct, one prompt at a time ({_where(about)}; {_where(on_gpu)}; "
        "[files and commands](docs/real_pair.md)). Code is 10 prompts of HumanEval in answers of "
        "128 tokens, prose 12 of Spec-Bench in answers of 64; the H100's figure is of both, in "
        "answers of 128. The time of the prompts is not counted; with it the head's are "
        f"{' and '.join(_with_prompts(one) for one in ('code', 'spec'))}:",
        "",
        "| machine | drafts | decoding | code | prose | answers kept (95% interval) |",
        "|---|---|---|---|---|---|",
    ]
    for where, drafts, rule, code, prose, quality in _RESULT:
        found = [_fastest(_read(file), rule) if file else ("", None) for file in (code, prose)]
        name = max(name for name, _ in found)
        tasks = [one for file in quality.split() for one in _read(file)["tasks"].items()]
        kept = list[str]()
        for task, of in tasks:
            how = name if name in of else _fastest(of, rule)[0]
            other = "" if how == name else f" with {how.split(', ')[1]}"
            kept.append(f"{_kept(of[how])} of {_TASKS[task]}{other}")
        exactly = "the target's own" + (" but for rounding" if where == "H100" else "")
        shown = _shown(name.rsplit(", prompt_lookup_max", 1)[0])
        gains = " | ".join(f"{one['speed_up']:.2f}x" if one else "" for _, one in found)
        lines.append(f"| {where} | {drafts} | {shown} | {gains} | {', '.join(kept) or exactly} |")
    return lines


def _with_prompts(text: str) -> str:
    ways = (_fastest(_read(f"qwen/{text}_head"), rule)[1] for rule in ("exact", TARGET_ALONE))
    exact, alone = (one["whole_tokens_per_second"] for one in ways)
    return f"{exact / alone:.2f}x"


def _pair_table(pair: dict[str, Any]) -> list[str]:
    """From what `report` wrote of benchmarks/results/embedded."""
    about = _read("embedded/problems")
    judged = len(pair["quality"]["quality"]["tasks"]["problems"]["autoregressive"]["right"])
    lines = [
        f"The embedded pair on held-out word problems, the speed of {about['prompts']} of them one "
        f"at a time, in {about['turns']} turns, the answers of {judged}; each K was the fastest on "
        f"other problems, and FLy is also shown with its published 15 ({_where(about)}; [files]"
        "(../benchmarks/results/embedded), [commands](measuring.md#the-tables-of-the-readme)):",
        "",
        "| decoding | tokens/s | speed-up | mean accepted tokens | rescued per 100 | solved | "
        "retention (95% interval) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _rows(pair, "problems"):
        found = row["quality"]["problems (quality)"]
        kept = "" if found["retention"] is None else _kept(found)
        lines.append(
            f"| {row['decoding'].removesuffix(', protect=')} "
            f"| {row['tokens_per_second']:.0f} ± {row['deviation']:.0f} "
            f"| {row['speed_up']:.2f}x | {row['mean_accepted_tokens']:.2f} "
            f"| {row['rescued_per_100_tokens']:.1f} | {found['score']:.1%} | {kept} |"
        )
    return lines


def _rows(pair: dict[str, Any], file: str) -> list[dict[str, Any]]:
    return [one for one in pair["speed"] if one["file"] == file]


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


def _in_three_lines(pair: dict[str, Any]) -> list[str]:
    """The result in three lines, the unfavourable too."""
    rows, library = _rows(pair, "problems"), _rows(pair, "library")
    fly = next(row for row in rows if row["decoding"].startswith("fly, K = 15"))
    kept = fly["quality"]["problems (quality)"]
    slow = next(row for row in library if row["decoding"].startswith("fly"))
    code, prose, short = (
        _fastest(_read(f"qwen/{name}"), "exact")[1]
        for name in ("code_head", "spec_head", "code_lookup")
    )
    way, on_cpu = _fastest(_read("qwen/code_loosened"), "fly")
    judged = _read("qwen/humaneval_int8_long")["tasks"]["humaneval"][way]
    on_gpu = _fastest(_read("h100/draft"), "fly")[1]["speed_up"]
    return [
        f"1. **The pair that ships inside**, word problems: FLy (K = 15) is {fly['speed_up']:.1f} "
        f"times as fast as one token at a time, {fly['over_tuned_exact']:.2f} times as fast as "
        f"tuned exact decoding, and keeps {_kept(kept)} of the answers. On library text it is "
        f"{slow['over_tuned_exact']:.2f} times as fast as tuned exact decoding.",
        "2. **A real model, its own text** (Qwen2.5-Coder-1.5B-Instruct in int8 on 2 CPU cores): "
        f"{short['speed_up']:.2f} times as fast as one token at a time on HumanEval by a lookup, "
        f"{code['speed_up']:.2f} times by a lookup with a head that was trained here in 73 "
        f"minutes, which is {prose['speed_up']:.2f} times as fast on Spec-Bench.",
        f"3. **That model, loosened**: FLy (K = 15) with a 0.5B draft is {on_cpu['speed_up']:.2f} "
        f"times as fast on code and keeps {_kept(judged)} of HumanEval's answers (164, too few to "
        f"tell); on an H100 it is {on_gpu:.2f} times as fast. Each loosened decoding of the table "
        "kept fewer answers. FLy's authors' 2.81x on a 70B and 5.07x on a 405B: not repeated here.",
        "",
    ]


def _rules_all(result: dict[str, Any]) -> list[str]:
    lines = [
        f"Measured on {_where(result)}, {result['num_problems']} held-out problems, "
        f"{result['num_documents']} pieces of library text "
        "([file](../benchmarks/results/rules.json))."
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


def _measured(files: dict[str, str]) -> list[str]:
    """A table for each file of bench."""
    lines = list[str]()
    for name, title in files.items():
        found = _read(name)
        decodings, turns = found["decodings"], found["turns"]
        exact = _fastest(found, "exact")[1]["tokens_per_second"]
        has_whole = "whole_tokens_per_second" in decodings[TARGET_ALONE]  # older files lack it
        lines += [
            f"**{title}**: {found['prompts']} prompts, up to {found['max_new_tokens']} new tokens, "
            f"{turns} turn{'s' if turns > 1 else ''} ({_where(found)}; "
            f"[file](../benchmarks/results/{name}.json)):",
            "",
            f"| decoding | tokens/s{' | with prompts' * has_whole} | over plain | over tuned exact "
            "| first token | mean accepted tokens | rescued per 100 |",
            f"|---|---|---|---|{'---|' * has_whole}---|---|---|",
        ]
        for way, one in decodings.items():
            spread = f" ± {one['deviation']:.1f}" if one["deviation"] is not None else ""
            whole = f"| {one['whole_tokens_per_second']:.1f} " if has_whole else ""
            lines.append(
                f"| {_shown(way)} | {one['tokens_per_second']:.1f}{spread} {whole}"
                f"| {one['speed_up']:.2f}x | {one['tokens_per_second'] / exact:.2f}x "
                f"| {one['first_token_seconds']:.2g} s | {one['mean_accepted_tokens']:.2f} "
                f"| {one['rescued_per_100_tokens']:.1f} |"
            )
        lines.append("")
        categories = list(decodings[TARGET_ALONE]["by_category"])
        if len(categories) > 1:
            lines += [
                "Times as fast as one token at a time, by category:",
                "",
                f"| decoding | {' | '.join(one.replace('_', ' ') for one in categories)} |",
                f"|---|{'---|' * len(categories)}",
            ]
            for way, one in list(decodings.items())[1:]:
                cells = (
                    one["by_category"][name]["tokens_per_second"]
                    / decodings[TARGET_ALONE]["by_category"][name]["tokens_per_second"]
                    for name in categories
                )
                lines.append(f"| {_shown(way)} | {' | '.join(f'{cell:.2f}x' for cell in cells)} |")
            lines.append("")
    return lines


def _real_pair() -> list[str]:
    """What bench measured, and what servers give on the same code."""
    return [*_measured(_REAL_PAIR), *_beside_llama_cpp(), *_quality()]


def _beside_llama_cpp() -> list[str]:
    """A row for each server, over its turns."""
    folder = machine.RESULTS / "qwen" / "llama_cpp"
    of_each = {
        server: [json.loads(path.read_text()) for path in _turns(folder, server)]
        for server in _SERVERS
    }
    first, about = of_each["plain"][0], of_each["plain"][0]["machine"]
    lines = [
        f"**Beside llama.cpp's server**, HumanEval, {first['measured'][0]['requests']} prompts of "
        f"one client, greedy, up to 128 new tokens, means over requests ({about['cpu']}, "
        f"{about['cpu_cores']} cores; "
        "[files](../benchmarks/results/qwen/llama_cpp)):",
        "",
        "| server | turns | day | tokens/s behind the first | tokens/s with the prompt "
        "| first token |",
        "|---|---|---|---|---|---|",
    ]
    for server, turns in of_each.items():
        names = ("mean_tpot_ms", "output_throughput", "mean_ttft_ms")
        means = (statistics.fmean(one["measured"][0][name] for one in turns) for name in names)
        pace, whole, wait = means
        lines.append(
            f"| {_SERVERS[server]} | {len(turns)} | {turns[0]['machine']['date']} "
            f"| {1000 / pace:.1f} | {whole:.1f} | {wait / 1000:.1f} s |"
        )
    return lines


def _turns(folder: Path, server: str) -> list[Path]:
    return [*folder.glob(f"{server}.json"), *sorted(folder.glob(f"{server}_[0-9].json"))]


def _quality() -> list[str]:
    """What loosened decodings keep of the answers, by the files of evaluate."""
    first = _read(next(iter(_QUALITY)))
    lines = [
        "",
        f"**Quality** ({_where(first)}, {first['setting']['batch_size']} items at a time; files "
        f"{', '.join(f'[{name[13:]}](../benchmarks/results/{name}.json)' for name in _QUALITY)}):",
        "",
        "| drafts | items | decoding | solved | retention (95% interval) | gained, lost | verdict "
        "(1 point) | mean accepted tokens | rescued per 100 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, drafts in _QUALITY.items():
        for task, decodings in _read(name)["tasks"].items():
            for decoding, one in decodings.items():
                kept = "| | | "
                if decoding != TARGET_ALONE:
                    kept = f"| {_kept(one)} | {one['gained']}, {one['lost']} | {one['verdict']} "
                lines.append(
                    f"| {drafts} | {task}, {len(one['right'])} | {_shown(decoding)} "
                    f"| {one['score']:.1%} {kept}| {one['mean_accepted_tokens']:.2f} "
                    f"| {one['rescued_per_100_tokens']:.1f} |"
                )
    return lines


def _kept(one: dict[str, Any]) -> str:
    return f"{one['retention']:.1%} ({one['low']:.1%} to {one['high']:.1%})"


def _fastest(found: dict[str, Any], rule: str) -> tuple[str, dict[str, Any]]:
    """The fastest decoding by a rule in a file of bench; of other figures, one."""
    ways: dict[str, dict[str, Any]] = found.get("decodings", found)
    chosen = (one for one in ways.items() if one[0].split(",")[0] == rule)
    return max(chosen, key=lambda one: float(one[1].get("tokens_per_second", 0)))


def _shown(name: str) -> str:
    name = name.replace("prompt_lookup_max=3", "lookup below").replace("|", "\\|")
    return name.replace("K = auto", "K = `auto`")


def _put(path: Path, lines: Sequence[str]) -> None:
    text = path.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    path.write_text(f"{text[:start]}{chr(10).join(lines)}\n{text[end:]}", encoding="utf-8")


def main() -> None:
    pair = _read("embedded/report")
    rules = _rules_all(_read("rules")) + _reference(_read("against_reference"))
    _put(ROOT / "README.md", _in_three_lines(pair) + _real_table())
    pages = {"model_card": _pair_table(pair), "rules": rules, "real_pair": _real_pair()}
    for page, lines in (pages | {"real_model": _measured(_REAL_MODEL)}).items():
        _put(ROOT / "docs" / f"{page}.md", lines)


if __name__ == "__main__":
    machine.run(main)
