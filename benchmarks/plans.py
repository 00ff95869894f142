"""Plans that docs/planner.md cites, as the command prints them with --json, and compile times.

Drafts' worth too, counted from shapes. A plan in the file is not compiled again.

JAX_PLATFORMS=cpu python benchmarks/plans.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import machine

from fly_jax.decoding.config import RoundSpec
from fly_jax.models.presets import preset
from fly_jax.planning.plan_spec import PlanSpec, default_round
from fly_jax.planning.plan_steps import STEPS
from fly_jax.planning.planner import make_plan
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.verification.rules import Exact, Fly
from fly_jax.verification.rules.loosened import Margin

LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
PARD, HEAD, LARGE_HEAD = "pard-llama-3.2-1b", "eagle3-llama-3.1-8b", "eagle3-llama-3.3-70b"
BLOCKS = ("dflash-qwen-3-8b", "dspark-qwen-3-8b", "eagle3-qwen-3-8b")
DFLASH, HEAD_TOKENS = "dflash-llama-3.1-8b", 7  # a head proposes to a target, DFlash as below
BELOW_TOKENS = {PARD: 8, HEAD: 6, DFLASH: 9}  # what stands below a draft model, at a time


def _rounds(k: int, below: str | None = None) -> RoundSpec:
    sizes = () if below is None else (BELOW_TOKENS[below],)
    return default_round(k).with_static(level_speculative_tokens=sizes)


ON_64 = PlanSpec(target=LARGE, draft=SMALL, chip=CHIPS["v5e"], mesh=parse_mesh("8x8"))
SPECS = {
    "405B bf16, v5e 8x8": ON_64,
    "405B int8, 8 rows, v5e 8x8": replace(ON_64, int8=True, rows=8),
    "405B int8, 8 rows, v5e 8x8, served": replace(
        ON_64, int8=True, rows=8, prefill_chunk=256, rules=(Exact(), Margin())
    ),
    "70B bf16, 8 H200 (shapes)": replace(
        ON_64, target=MIDDLE, chip=CHIPS["h200"], mesh=parse_mesh("8"), rounds=default_round(15)
    ),
    **{
        f"405B bf16, 8B over {what}, v5e 8x8": replace(
            ON_64, below=(preset(below),), rounds=_rounds(25, below), level_accepted_tokens=5.0
        )
        for what, below in (("PARD", PARD), ("its head", HEAD), ("DFlash", DFLASH))
    },
    **{
        f"Qwen3 8B bf16, {draft}, v5e 2x2": replace(
            ON_64, target=preset("qwen-3-8b"), draft=preset(draft), mesh=parse_mesh("2x2"),
            rounds=default_round(HEAD_TOKENS),
        )
        for draft in BLOCKS
    },
}  # fmt: skip

SLICES = (
    ("llama-3.1-405b", "v5e", "8x8"), ("llama-3.1-405b", "v6e", "8x8"),
    ("llama-3.1-70b", "v5e", "4x4"), ("llama-3.1-70b", "v5e", "2x8"),
    ("llama-3.1-8b", "v5e", "1"), ("llama-3.1-8b", "v5e", "2x2"),  # on one chip in int8
)  # fmt: skip
# Where two stand, what a pass of the first gives over a proposal of the second; None as published.
DRAFTS = (
    (("llama-3.1-8b",), None), *((("llama-3.1-8b", PARD), one) for one in (None, 5.0, 9.0)),
    *((("llama-3.1-8b", HEAD), one) for one in (None, 5.0, 7.0)),
    (("llama-3.1-8b", DFLASH), None), (("llama-3.2-1b",), None), (("llama-3.2-1b", PARD), 3.0),
    ((PARD,), None), ((HEAD,), None), ((DFLASH,), None), ((LARGE_HEAD,), None),
)  # fmt: skip
MOST = {"llama-3.1-405b": 25, "llama-3.1-70b": 15, "llama-3.1-8b": 8}  # K of draft models
RULES = {"exact": Exact(), "fly": Fly()}


def drafts_on(target: str, chip: str, mesh: str) -> Iterator[dict[str, Any]]:
    """A row for each draft or stack of drafts of a target on a slice."""
    for drafts, level_accepted in DRAFTS:
        first, *below = map(preset, drafts)
        k = MOST[target] if first.head is None else 9 if DFLASH in drafts else HEAD_TOKENS
        if first.head is not None and first.head.target_embed_size != preset(target).embed_size:
            continue
        spec = PlanSpec(
            target=preset(target), draft=first, below=tuple(below), chip=CHIPS[chip],
            mesh=parse_mesh(mesh), rounds=_rounds(k, *drafts[1:]),
            level_accepted_tokens=level_accepted, compiles=False, int8=mesh == "1",
        )  # fmt: skip
        if target in drafts or not (plan := make_plan(spec)).fits:
            continue
        seconds = {step.name: step.seconds for step in plan.steps}
        rounds = {name: RoundSpec(rule, spec.rounds.static) for name, rule in RULES.items()}
        all_known = {name: replace(spec, rounds=one).accepted for name, one in rounds.items()}
        known = {name: mean for name, (mean, _) in all_known.items() if mean is not None}
        times = seconds["autoregressive"] / seconds["round"]
        level, source = spec.level_accepted
        yield {
            "target": target, "chip": chip, "mesh": mesh, "int8": spec.int8, "drafts": drafts,
            "K": k, "level_accepted_tokens": level, "level_source": source,
            "milliseconds": {name: seconds[name] * 1e3 for name in STEPS[2:]},
            "mean_accepted_tokens": known, "sources": [one for _, one in all_known.values() if one],
            "speed_up": {rule: mean * times for rule, mean in known.items()},
            "accepted_tokens_for": plan.speed()["accepted_tokens_for"],
        }  # fmt: skip


def row_of(one: dict[str, Any]) -> str:
    """A row of the table in docs/planner.md."""
    took, known, ups = (one[key] for key in ("milliseconds", "mean_accepted_tokens", "speed_up"))
    draft, level = " over ".join(one["drafts"]), one["level_accepted_tokens"]
    if level is not None:
        draft += f", m = {level:.1f}{' (p)' * (one['level_source'] != 'as given')}"
    needed = (one["accepted_tokens_for"].get(times) for times in ("2", "5", "10"))
    cells = (
        f"{one['target']}{', int8' * one['int8']}, {one['chip']} {one['mesh']}",
        draft, one["K"], *(f"{took[name]:.1f}" for name in ("autoregressive", "draft", "round")),
        *(f"{ups[rule]:.1f} ({known[rule]:g})" if rule in known else "" for rule in RULES),
        ", ".join("never" if each is None else f"{each:.1f}" for each in needed),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    drafts = [row for one in SLICES for row in drafts_on(*one)]
    print(*map(row_of, drafts), sep="\n")
    found = json.loads((machine.RESULTS / "plans.json").read_text(encoding="utf-8"))
    plans: dict[str, object] = {"drafts": drafts}
    for name, spec in SPECS.items():
        print(name)
        plans[name] = found.get(name) or make_plan(spec).to_dict()
    print(machine.write("plans", plans))


if __name__ == "__main__":
    machine.run(main)
