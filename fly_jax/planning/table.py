"""A plan for people to read."""

from __future__ import annotations

from fly_jax.planning.plan import Plan

_GIB = 2**30


def table(plan: Plan) -> str:
    """The plan as text: memory, steps, exchanges, speed, and what else fits."""
    request = plan.request
    lines = [
        f"{request.chip.name}, mesh {request.mesh}, {'int8' if request.int8 else 'bfloat16'}, "
        f"context {request.context}, {request.rows} rows, K = {request.num_speculative_tokens}",
        f"layouts: target {plan.layouts.target_rules}, draft {plan.layouts.draft_rules}",
        *plan.replicated(),
        "",
        f"GiB on each chip, of {request.chip.memory_bytes / _GIB:.2f}",
    ]
    for name, num_bytes in plan.memory().items():
        label = name.removesuffix("_bytes").replace("_", " ")
        lines.append(f"  {label:<18}{num_bytes / _GIB:8.2f}")
    lines += [
        "",
        *_steps(plan),
        "",
        *_exchanges(plan),
        *_copies(plan),
        "",
        *_speed(plan),
        "",
        *_drafters(plan),
    ]
    lines += [
        f"largest batch with this context: {plan.largest_batch}; largest context with this batch: "
        f"{plan.largest_context} (by shapes, corrected by the plan above)",
    ]
    return "\n".join(lines)


def _steps(plan: Plan) -> list[str]:
    source = "compiled" if plan.steps[0].source == "compiled" else "counted from shapes"
    lines = [
        f"Steps on each chip ({source})",
        f"  {'':<16}{'arguments':>10}{'temporary':>10}{'peak GiB':>10}{'TFLOP':>9}"
        f"{'GB read':>9}{'roofline ms':>13}",
    ]
    for step in plan.steps:
        sizes = (step.argument_bytes, step.temporary_bytes, step.peak_bytes)
        lines.append(
            f"  {step.name:<16}"
            + "".join(f"{size / _GIB:10.2f}" for size in sizes)
            + f"{step.work.flops / 1e12:9.3f}{step.work.num_bytes / 1e9:9.2f}"
            + f"{step.seconds * 1e3:13.2f}"
        )
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
    """One line for each step that copies a cache or a stack of matrices again and again."""
    found = [(step, step.copies) for step in plan.steps if step.copies is not None]
    if not found:
        return []
    label, lines = "Copies of a cache or a stack of matrices", []
    for step, made in found:
        repeated = [one for one in made if one.is_repeated]
        if repeated:
            count = sum(one.count for one in repeated)
            num_bytes = sum(one.count * one.num_bytes for one in repeated)
            lines.append(f"  {step.name:<16}{count} in loops or branches, {num_bytes / 1e9:.2f} GB")
    once = sum(one.num_bytes for _, made in found for one in made if not one.is_repeated)
    lines = [f"{label}:", *lines] if lines else [f"{label} in a loop or a branch: none"]
    return [*lines, f"{label} once a step: {once / 1e9:.2f} GB"] if once else lines


def _speed(plan: Plan) -> list[str]:
    speed = plan.speed()
    if speed is None:
        return ["No speed is given for what does not fit."]
    return [
        f"At best, with {speed['mean_accepted_tokens']:.2f} mean accepted tokens: "
        f"{speed['tokens_per_second']:.0f} tokens/s, {speed['speed_up']:.2f} times the "
        f"{speed['autoregressive_tokens_per_second']:.0f} tokens/s of one token at a time",
        f"best K: {speed['best_num_speculative_tokens']} ({speed['best_speed_up']:.2f} times), if "
        "every draft token were kept with one probability",
    ]


def _drafters(plan: Plan) -> list[str]:
    drafters = plan.drafters()
    if drafters is None:
        return ["No draft is weighed for what does not fit."]
    types = sorted({one.matrices for one in drafters.passes})
    lines = [
        "A draft pass (counted from shapes), in ms, of which the network; an asterisk does not fit",
        f"  {'':<16}" + "".join(f"{name:>20}" for name in types),
    ]
    rules = dict.fromkeys(one.rules for one in drafters.passes)
    for name in rules:
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
