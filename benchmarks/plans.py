"""Plans that docs/planner.md cites, as the command prints them with --json, and compile times.

Also what drafts and stacks of drafts would be worth, counted from shapes.

JAX_PLATFORMS=cpu python benchmarks/plans.py
"""

from __future__ import annotations

from collections.abc import Iterator

import machine

from fly_jax.decoding.config import RoundSpec
from fly_jax.models.presets import preset
from fly_jax.planning.plan_spec import PlanSpec, default_round
from fly_jax.planning.plan_steps import STEPS
from fly_jax.planning.planner import make_plan
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh

LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
PARD, LEVEL_TOKENS = "pard-llama-3.2-1b", 8


def _rounds(k: int, num_below: int) -> RoundSpec:
    return default_round(k).with_static(level_speculative_tokens=(LEVEL_TOKENS,) * num_below)


SPECS = {
    "405B bf16, v5e 8x8": PlanSpec(
        target=LARGE, draft=SMALL, chip=CHIPS["v5e"], mesh=parse_mesh("8x8")
    ),
    "405B int8, 8 rows, v5e 8x8": PlanSpec(
        target=LARGE, draft=SMALL, chip=CHIPS["v5e"], mesh=parse_mesh("8x8"), int8=True, rows=8
    ),
    "70B bf16, 8 H200 (shapes)": PlanSpec(
        target=MIDDLE, draft=SMALL, chip=CHIPS["h200"], mesh=parse_mesh("8"),
        rounds=default_round(15),
    ),
    "405B bf16, 8B over PARD, v5e 8x8": PlanSpec(
        target=LARGE, draft=SMALL, below=(preset(PARD),), chip=CHIPS["v5e"], mesh=parse_mesh("8x8"),
        rounds=_rounds(25, 1), level_accepted_tokens=5.0,
    ),
}  # fmt: skip

SLICES = (
    ("llama-3.1-405b", "v5e", "8x8"), ("llama-3.1-405b", "v6e", "8x8"),
    ("llama-3.1-70b", "v5e", "4x4"), ("llama-3.1-70b", "v5e", "2x8"),
    ("llama-3.1-8b", "v5e", "1"), ("llama-3.1-8b", "v5e", "2x2"),
)  # fmt: skip
# Drafts and K; where two stand, what a pass of the first gives over a proposal of the second is
# assumed. Nobody has published that.
DRAFTS = (
    (("llama-3.1-8b",), None), (("llama-3.1-8b", PARD), 3.0), (("llama-3.1-8b", PARD), 5.0),
    (("llama-3.2-1b",), None), (("llama-3.2-1b", PARD), 3.0), ((PARD,), None),
    (("eagle3-llama-3.1-8b",), None), (("eagle3-llama-3.3-70b",), None),
)  # fmt: skip
HEAD_TOKENS = 5  # a head proposes
# Mean accepted tokens of an 8B draft with FLy and without, out of domain (arXiv 2511.22972).
PUBLISHED = {
    "llama-3.1-405b": (25, {"fly": 17.13}),
    "llama-3.1-70b": (15, {"exact": 10.91, "fly": 12.41}),
}
SPEED_UPS = (2, 5, 10)


def drafts_on(target: str, chip: str, mesh: str) -> Iterator[dict[str, object]]:
    """A row for each draft or stack of drafts of a target on a slice."""
    most, published = PUBLISHED.get(target, (8, {}))
    for drafts, level_accepted in DRAFTS:
        first, *below = map(preset, drafts)
        known = published if drafts[0] == "llama-3.1-8b" else {}
        k = most if first.head is None else HEAD_TOKENS
        if first.head is not None and first.head.target_embed_size != preset(target).embed_size:
            continue
        spec = PlanSpec(
            target=preset(target), draft=first, below=tuple(below), chip=CHIPS[chip],
            mesh=parse_mesh(mesh), rounds=_rounds(k, len(below)),
            level_accepted_tokens=level_accepted, compiles=False,
        )  # fmt: skip
        if target in drafts or not (plan := make_plan(spec)).fits:
            continue
        seconds = {step.name: step.seconds for step in plan.steps}
        ratio = seconds["autoregressive"] / seconds["round"]
        yield {
            "target": target, "chip": chip, "mesh": mesh, "drafts": drafts, "K": k,
            "level_accepted_tokens": level_accepted,
            "milliseconds": {name: seconds[name] * 1e3 for name in STEPS[2:]},
             "speed_up": {rule: mean * ratio for rule, mean in known.items()},
            "accepted_tokens_for": {one: one / ratio for one in SPEED_UPS if one / ratio <= k + 1},
        }  # fmt: skip


def main() -> None:
    drafts = [row for one in SLICES for row in drafts_on(*one)]
    for row in drafts:
        print(*row.values())
    plans: dict[str, object] = {"drafts": drafts}
    for name, spec in SPECS.items():
        plans[name] = plan = make_plan(spec).to_dict()
        print(name, plan["fits"], plan["memory_per_chip"])
    print(machine.write("plans", plans))


if __name__ == "__main__":
    machine.run(main)
