"""The planner's speed model against published pairs of mean accepted tokens and speed-up.

The pairs are FLy's own (arXiv 2511.22972, tables as in public notes on it): Llama targets with an
8B draft on AMD MI355X, batch 1, Hugging Face Transformers. One constant, the time that the host
needs for a layer in that stack, is fitted to one row (strict speculation); every other row is then
a prediction.

    JAX_PLATFORMS=cpu python benchmarks/planner_validation.py
"""

from __future__ import annotations

import machine

from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.layouts import Workload, pass_seconds
from fly_jax.models.presets import preset
from fly_jax.planning.plan_spec import abstract_mesh
from fly_jax.planning.roofline import StepTimes
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

# Target, K, mean accepted tokens, speed-up. K is 15 for 70B and 25 for 405B, as published.
ROWS = {
    "3.1-70B strict, out of domain": ("llama-3.1-70b", 15, 10.91, 2.04),
    "3.1-70B FLy, out of domain": ("llama-3.1-70b", 15, 12.41, 2.74),
    "3.3-70B FLy, out of domain": ("llama-3.3-70b", 15, 11.35, 2.53),
    "3-70B FLy, in domain": ("llama-3-70b", 15, 11.87, 2.69),
    "3.1-405B FLy, out of domain": ("llama-3.1-405b", 25, 17.13, 4.80),
    "3.1-405B FLy, in domain": ("llama-3.1-405b", 25, 17.14, 5.34),
}
FITTED_TO = "3.1-70B strict, out of domain"
CHIP = CHIPS["mi355x"]
# Transformers spreads a model that one chip cannot hold over several, one after the other.
ALONE = Layout(abstract_mesh(parse_mesh("1")), RULES["tensor"])
WORKLOAD = Workload(rows=1, capacity=2048)


def times(target: LlamaConfig, seconds_per_layer: float) -> StepTimes:
    draft = preset("llama-3.1-8b")
    one, drafted = (
        pass_seconds(ALONE, config, WORKLOAD, CHIP) + config.num_layers * seconds_per_layer
        for config in (target, draft)
    )
    return StepTimes(draft_pass=drafted, verify=one, autoregressive=one)


def predicted(row: str, seconds_per_layer: float) -> float:
    name, drafted, mean, _ = ROWS[row]
    return times(preset(name), seconds_per_layer).speed_up(drafted, mean)


def fitted() -> float:
    """Seconds per layer with which the strict row comes out as published, by bisection."""
    low, high = 0.0, 1e-2
    for _ in range(60):
        middle = (low + high) / 2
        too_fast = predicted(FITTED_TO, middle) > ROWS[FITTED_TO][3]
        low, high = (middle, high) if too_fast else (low, middle)
    return low


def main() -> None:
    overhead = fitted()
    rows = {}
    for row, (_, drafted, mean, published) in ROWS.items():
        roofline, model = predicted(row, 0.0), predicted(row, overhead)
        rows[row] = {
            "num_speculative_tokens": drafted,
            "mean_accepted_tokens": mean,
            "published_speed_up": published,
            "roofline_speed_up": round(roofline, 2),
            "roofline_error": round(roofline / published - 1, 3),
            "fitted_speed_up": round(model, 2),
            "fitted_error": round(model / published - 1, 3),
        }
        print(row, rows[row])
    result = {"fitted_to": FITTED_TO, "microseconds_per_layer": round(overhead * 1e6, 1)}
    print(result, "->", machine.write("planner_validation", {**result, "rows": rows}))


if __name__ == "__main__":
    machine.run(main)
