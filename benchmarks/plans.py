"""Plans that docs/planner.md cites, as the command prints them with --json, and compile times.

JAX_PLATFORMS=cpu python benchmarks/plans.py
"""

from __future__ import annotations

import machine

from fly_jax.models.presets import preset
from fly_jax.planning.plan_spec import PlanSpec, default_round
from fly_jax.planning.planner import make_plan
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh

LARGE, MIDDLE, SMALL = (preset(f"llama-3.1-{size}") for size in ("405b", "70b", "8b"))
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
}  # fmt: skip


def main() -> None:
    plans = {}
    for name, spec in SPECS.items():
        plans[name] = make_plan(spec).to_dict()
        print(name, plans[name]["fits"], plans[name]["memory_per_chip"])
    print(machine.write("plans", plans))


if __name__ == "__main__":
    machine.run(main)
