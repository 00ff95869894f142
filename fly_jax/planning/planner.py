"""A plan: what a pair needs on a slice, how fast it would be there, and what else would fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fly_jax.models.architectures import ParameterSpec, parameter_specs
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.models.head_config import Block
from fly_jax.models.layouts import Layouts, cache_bytes, held_bytes, held_cache_bytes
from fly_jax.planning import plan_steps, roofline
from fly_jax.planning.alternatives import Drafters, alternatives, weigh_drafters
from fly_jax.planning.plan_spec import PlanSpec, slice_mesh
from fly_jax.planning.plan_steps import Step

_GIB = 2**30
_SPEED_UPS = (2, 5, 10)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer to a `PlanSpec`."""

    spec: PlanSpec
    layouts: Layouts
    steps: tuple[Step, ...]
    largest_batch: int  # rows that fit with this context; 0 for none
    largest_context: int  # tokens that fit with these rows; 0 for none
    remedies: tuple[str, ...]  # a line for each change with which it would fit; empty if it fits

    @property
    def peak_bytes(self) -> int:
        """The most memory that any step takes on a chip."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def left_bytes(self) -> int:
        """Bytes of a chip that are left; negative by those that are missing."""
        return int(self.spec.chip.memory_bytes) - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Tells whether every step fits."""
        return self.left_bytes >= 0

    def step(self, name: str) -> Step | None:
        """The step of that name, if the plan got so far."""
        return next((step for step in self.steps if step.name == name), None)

    @property
    def verify_seconds(self) -> float | None:
        """Of a round beside its draft: a verify that hands a head features may exchange more."""
        verify, whole, draft = map(self.step, ("verify", "round", "draft"))
        if verify is None or whole is None or draft is None:
            return None if verify is None else verify.seconds
        return max(verify.seconds, whole.seconds - draft.seconds)

    def speed(self) -> dict[str, Any] | None:
        """Tokens per second by the roofline times; None where it does not fit.

        Without mean accepted tokens only how many would make it 2, 5 and 10 times as fast.
        """
        draft, verify, alone = map(self.step, ("draft", "verify", "autoregressive"))
        if not self.fits or draft is None or verify is None or alone is None:
            return None
        k, rows = self.spec.num_speculative_tokens, self.spec.rows
        busy = verify.work.arithmetic_seconds(self.spec.chip) / (k + 1)
        # Levels below shorten the draft of any K alike.
        head = self.spec.draft.head
        at_once = self.spec.draft.pard_token is not None or isinstance(head, Block)
        assert self.verify_seconds is not None
        seconds = draft.seconds / (1 if at_once else k), self.verify_seconds, alone.seconds
        times = roofline.StepTimes(*seconds, busy, drafts_at_once=at_once)
        mean, source = self.spec.accepted
        needed = {str(many): many / times.speed_up(k, 1.0) for many in _SPEED_UPS}
        found: dict[str, Any] = {
            "mean_accepted_tokens": mean, "source": source,
            "autoregressive_tokens_per_second": rows / times.autoregressive,
            "accepted_tokens_for": {many: one for many, one in needed.items() if one <= k + 1},
        }  # fmt: skip
        if mean is None:
            return found
        acceptance = roofline.acceptance_from(mean, k)
        limit = {"max_speculative_tokens": head.most_tokens} if isinstance(head, Block) else {}
        best, best_speed_up = roofline.best_num_speculative_tokens(times, acceptance, k, **limit)
        return found | {
            "tokens_per_second": rows * mean / times.round(k), "speed_up": times.speed_up(k, mean),
            "best_num_speculative_tokens": best, "best_speed_up": best_speed_up,
        }  # fmt: skip

    def drafters(self) -> Drafters | None:
        """Layouts and types of the draft, and smaller drafts, by shapes; None beside levels."""
        verify = self.verify_seconds
        if not self.fits or verify is None or self.spec.below:
            return None
        return weigh_drafters(self.spec, self.layouts, verify)

    def memory(self) -> dict[str, int]:
        """Bytes on each chip, by what they are for."""
        models = plan_steps.models_of(self.spec, self.layouts)
        target, *drafts = (held_bytes(*plan_steps.matrices_of(one)) for one in models)
        return {
            "parameter_bytes": target, "draft_parameter_bytes": sum(drafts),
            "cache_bytes": cache_bytes(*models[0]),
            "draft_cache_bytes": sum(held_cache_bytes(*one) for one in models[1:]),
            "prefill_cache_bytes": plan_steps.prefill_cache_bytes(self.spec, self.layouts),
            "temporary_bytes": max(step.temporary_bytes for step in self.steps),
            "peak_bytes": self.peak_bytes, "left_bytes": self.left_bytes,
        }  # fmt: skip

    def replicated(self) -> list[str]:
        """Lines on the kinds of axes that the mesh does not divide as asked."""
        pair = zip(("target", "draft"), plan_steps.models_of(self.spec, self.layouts), strict=False)
        found = list[str]()
        for who, (layout, config, workload) in pair:
            shape = cache_shape(config, workload.rows, workload.capacity)
            keys = {"keys": ParameterSpec(shape, CACHE_AXES)}
            specs = parameter_specs(config, workload.matrices) | keys
            found += [f"{who} {line}" for line in layout.fallbacks(specs)]
        return found

    def to_dict(self) -> dict[str, object]:
        """The JSON object of the command."""
        spec, drafters = self.spec, self.drafters()
        steps = {
            step.name: {
                "source": step.source, "peak_bytes_per_chip": step.peak_bytes,
                "argument_bytes_per_chip": step.argument_bytes,
                "temporary_bytes_per_chip": step.temporary_bytes,
                "collectives": step.collectives(), "copies": step.copied(), "cycles": step.cycles,
                "flops": step.work.flops, "bytes_accessed": step.work.num_bytes,
                "roofline_seconds": step.seconds, "compile_seconds": step.compile_seconds,
            }
            for step in self.steps
        }  # fmt: skip
        return {
            "fits": self.fits, "chip": spec.chip.name, "mesh": str(spec.mesh),
            "dtype": "int8" if spec.int8 else "bfloat16", "context": spec.context,
            "batch_size": spec.rows, "num_speculative_tokens": spec.num_speculative_tokens,
            "level_accepted_tokens": spec.level_accepted[0] if spec.below else None,
            "draft_passes": spec.draft_passes, "target_layout": self.layouts.target_rules,
            "draft_layout": self.layouts.draft_rules,
            "chip_memory_bytes": int(spec.chip.memory_bytes), "memory_per_chip": self.memory(),
            "steps": steps, "speed": self.speed(),
            "drafters": None if drafters is None else dataclasses.asdict(drafters),
            "largest_batch_size": self.largest_batch, "largest_context": self.largest_context,
            "remedies": list(self.remedies), "replicated": self.replicated(),
        }  # fmt: skip


def make_plan(spec: PlanSpec, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Chooses layouts, compiles or counts steps; raises FlyJaxError where no slice would do."""
    spec.check()
    spec = spec.without_padding()
    compiles = spec.compiles and spec.chip.is_tpu
    layouts = spec.layouts(slice_mesh(spec.chip, spec.mesh) if compiles else None)
    steps, made = [], plan_steps.compiled_steps if compiles else plan_steps.counted_steps
    for step in made(spec, layouts):
        progress(step.name)
        steps.append(step)
    peak = max(step.peak_bytes for step in steps)
    return Plan(spec, layouts, tuple(steps), *alternatives(spec, peak))


def table(plan: Plan) -> str:
    """The plan as text: memory, steps, exchanges, speed, and what else fits."""
    spec = plan.spec
    lines = [
        f"{spec.chip.name}, mesh {spec.mesh}, {'int8' if spec.int8 else 'bfloat16'}, "
        f"context {spec.context}, {spec.rows} rows, K = {spec.num_speculative_tokens}",
        f"layouts: target {plan.layouts.target_rules}, draft {plan.layouts.draft_rules}",
        *plan.replicated(),
        "",
        f"GiB on each chip, of {spec.chip.memory_bytes / _GIB:.2f}",
    ]
    for name, num_bytes in plan.memory().items():
        label = name.removesuffix("_bytes").replace("_", " ")
        lines.append(f"  {label:<18}{num_bytes / _GIB:8.2f}")
    lines += ["", *_steps(plan), "", *_exchanges(plan), *_copies(plan), "", *_speed(plan), ""]
    largest = (
        f"largest batch with this context: {plan.largest_batch}; largest context with this batch: "
        f"{plan.largest_context} (by shapes, corrected by the plan above)"
    )
    return "\n".join([*lines, *_drafters(plan), largest])


def _steps(plan: Plan) -> list[str]:
    source = "compiled" if plan.steps[0].source == "compiled" else "counted from shapes"
    lines = [
        f"Steps on each chip ({source})",
        f"  {'':<16}{'arguments':>10}{'temporary':>10}{'peak GiB':>10}{'TFLOP':>9}"
        f"{'GB read':>9}{'roofline ms':>13}{'Mcycles':>9}",
    ]
    for step in plan.steps:
        sizes = (step.argument_bytes, step.temporary_bytes, step.peak_bytes)
        cells = "".join(f"{size / _GIB:10.2f}" for size in sizes)
        cells += f"{step.work.flops / 1e12:9.3f}{step.work.num_bytes / 1e9:9.2f}"
        estimate = "" if step.cycles is None else f"{step.cycles / 1e6:9.1f}"
        lines.append(f"  {step.name:<16}{cells}{step.seconds * 1e3:13.2f}{estimate}")
    return lines


def _exchanges(plan: Plan) -> list[str]:
    lines = ["Between chips", f"  {'':<16}{'kind':<20}{'count':>8}{'MB':>12}"]
    for step in plan.steps:
        for one in step.collectives():
            lines.append(
                f"  {step.name:<16}{one['kind']:<20}{one['count']:>8}{one['bytes'] / 1e6:12.2f}"  # type: ignore[operator]
            )
    return lines if len(lines) > 2 else ["Nothing travels between chips"]


def _copies(plan: Plan) -> list[str]:
    """Lines on the steps that copy a cache or a stack of matrices again and again."""
    found = [(step, step.copies) for step in plan.steps if step.copies is not None]
    if not found:
        return []
    label, lines = "Copies of a cache or a stack of matrices", []
    for step, made in found:
        if repeated := [one for one in made if one.is_repeated]:
            count = sum(one.count for one in repeated)
            num_bytes = sum(one.count * one.num_bytes for one in repeated)
            lines.append(f"  {step.name:<16}{count} in loops or branches, {num_bytes / 1e9:.2f} GB")
    once = sum(one.num_bytes for _, made in found for one in made if not one.is_repeated)
    lines = [f"{label}:", *lines] if lines else [f"{label} in a loop or a branch: none"]
    return [*lines, f"{label} once a step: {once / 1e9:.2f} GB"] if once else lines


def _speed(plan: Plan) -> list[str]:
    if (speed := plan.speed()) is None:
        return ["No speed is given for what does not fit."]
    passes = ", ".join(f"{sum(some.values()):.1f}" for some in plan.spec.draft_passes)
    level, source = plan.spec.level_accepted
    below = "" if level is None else f"; {level:.2f} tokens of a pass of it ({source})"
    needed = (f"{many} times with {one:.1f}" for many, one in speed["accepted_tokens_for"].items())
    lines = [
        f"Passes of a round: 1 of the target, {passes} of what drafts, the nearest first{below}",
        f"Over one token at a time, by mean accepted tokens: {', '.join(needed) or 'never twice'}",
    ]
    if speed["mean_accepted_tokens"] is None:
        return [*lines, "None are published of this pair and rule; give --mean_accepted_tokens"]
    return [
        *lines,
        f"At best, with {speed['mean_accepted_tokens']:.2f} ({speed['source']}): "
        f"{speed['tokens_per_second']:.0f} tokens/s, {speed['speed_up']:.2f} times the "
        f"{speed['autoregressive_tokens_per_second']:.0f} tokens/s of one token at a time",
        f"best K: {speed['best_num_speculative_tokens']} ({speed['best_speed_up']:.2f} times), if "
        "every draft token were kept with one probability",
    ]


def _drafters(plan: Plan) -> list[str]:
    if (drafters := plan.drafters()) is None:
        return ["No other draft is weighed for what does not fit, nor with levels below the draft."]
    types = sorted({one.matrices for one in drafters.passes})
    lines = [
        "A draft pass (counted from shapes), in ms, of which the network; an asterisk does not fit",
        f"  {'':<16}" + "".join(f"{name:>20}" for name in types),
    ]
    for name in dict.fromkeys(one.rules for one in drafters.passes):
        row = {one.matrices: one for one in drafters.passes if one.rules == name}
        cells = (
            f"{one.seconds * 1e3:.2f} ({one.network_seconds * 1e3:.2f}){' ' if one.fits else '*'}"
            for one in (row[kind] for kind in types)
        )
        lines.append(f"  {name:<16}" + "".join(f"{cell:>20}" for cell in cells))
    for one in drafters.smaller:
        lines.append(
            f"{one.name}, {one.best.rules}, {one.best.seconds * 1e3:.2f} ms a pass: pays from "
            f"{one.pays_from:.1f} mean accepted tokens"
        )
    return lines
