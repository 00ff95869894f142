"""The tables of a real model, from the result files of real_model.py and ifeval.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from real_decodings import TARGET_ALONE, of_batch

ONE, _FOUR = of_batch(1), of_batch(4)
_HEADS = "| decoding | tokens/s | batch 4 | mean accepted tokens |"
_RULE = "|---|---|---|---|"


def page(real: Mapping[str, Any], ifeval: Mapping[str, Any], where: str) -> list[str]:
    """For docs/real_model.md: every way, by batch and by category, and IFEval.

    Args:
      real: what real_model.py wrote.
      ifeval: what ifeval.py wrote.
      where: the machine of `real`, in words.
    """
    categories = (line for batch in (ONE, _FOUR) for line in _categories(real, batch))
    return [*_ways(real, where), *categories, *_quality(ifeval)]


def _ways(real: Mapping[str, Any], where: str) -> list[str]:
    setting, alone = real["setting"], real["summaries"][ONE]
    return [
        f"{setting['target']}, {setting['prompts']} prompts, up to {setting['max_new_tokens']} new "
        f"tokens, {_turns(real)} ({where}; "
        "[file](../benchmarks/results/real_model.json)). Tokens/s are without what the prompts "
        f"take; *same* counts the answers that are those of '{real['answers_compared_with']}', "
        "one prompt at a time:",
        "",
        f"{_HEADS} rescued per 100 | same | batch 4: same |",
        f"{_RULE}---|---|---|",
        *(
            f"{_row(real, name)} {_number(one, 'rescued_per_100_tokens', 1)} "
            f"| {one['same_answers']} | {_of_four(real, name, 'same_answers', 0)} |"
            for name, one in alone.items()
        ),
    ]


def _turns(real: Mapping[str, Any]) -> str:
    turns = next(iter(real["summaries"][ONE].values()))["turns"]
    return f"{turns} turns" if turns > 1 else "one turn"


def _categories(real: Mapping[str, Any], batch: str) -> list[str]:
    ways = real["summaries"].get(batch, {})
    names = list(next(iter(ways.values()))["by_category"]) if ways else []
    rows = "one prompt" if batch == ONE else "four prompts"
    lines = [
        "",
        f"By category, {rows} at a time: tokens/s (mean accepted tokens).",
        "",
        f"| decoding | {' | '.join(name.replace('_', ' ') for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for way, one in ways.items():
        cells = []
        for name in names:
            found = one["by_category"][name]
            mean = _number(found, "mean_accepted_tokens", 2)
            cells.append(f"{found['tokens_per_second']:.1f}" + (f" ({mean})" if mean else ""))
        lines.append(f"| {_named(way)} | {' | '.join(cells)} |")
    return lines


def _quality(ifeval: Mapping[str, Any]) -> list[str]:
    judged = ifeval["decodings"]
    lines = [
        "",
        f"IFEval, strict, up to {ifeval['setting']['max_new_tokens']} new tokens "
        f"({ifeval['machine']['date']}; [file](../benchmarks/results/ifeval.json)): what is "
        "followed, beside what the target alone follows of the same prompts, and the difference in "
        "points with a paired 95% interval.",
        "",
        "| decoding | prompts | prompt level | instruction level | gained, lost | same text "
        "| mean accepted tokens | rescued per 100 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in judged.items():
        levels = []
        for level in ("prompt_level", "instruction_level"):
            score, points = one[level], ""
            if name != TARGET_ALONE:
                points = f" beside {score['baseline']:.1f}%: {_difference(score)}"
            levels.append(f"{score['this']:.1f}%{points}")
        changed = f"{len(one['gained'])}, {len(one['lost'])}" if name != TARGET_ALONE else ""
        lines.append(
            f"| {_named(name)} | {one['prompts']} | {levels[0]} | {levels[1]} | {changed} "
            f"| {one['same_text']} | {one['mean_accepted_tokens']:.2f} "
            f"| {one['rescued_per_100_tokens']:.1f} |"
        )
    return lines


def _row(real: Mapping[str, Any], name: str) -> str:
    one = real["summaries"][ONE][name]
    return (
        f"| {_named(name)} | {one['tokens_per_second']:.1f} "
        f"| {_of_four(real, name, 'tokens_per_second', 1)} "
        f"| {_number(one, 'mean_accepted_tokens', 2)} |"
    )


def _difference(score: Mapping[str, float]) -> str:
    return f"{score['points']:+.1f} ({score['low']:+.1f} to {score['high']:+.1f})"


def _of_four(real: Mapping[str, Any], name: str, field: str, digits: int) -> str:
    return _number(real["summaries"].get(_FOUR, {}).get(name, {}), field, digits)


def _number(one: Mapping[str, float], field: str, digits: int) -> str:
    return f"{one[field]:.{digits}f}" if field in one else ""


def _named(way: str) -> str:
    return ("one token at a time" if way == TARGET_ALONE else way).replace("|", "\\|")
