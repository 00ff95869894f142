"""A plan: what a pair needs on a slice, how fast it would be there, and what else would fit."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator

from fly_jax.models.layouts import Layouts, cache_bytes, held_bytes, parameter_bytes
from fly_jax.models.specs import parameter_specs
from fly_jax.planning.alternatives import alternatives
from fly_jax.planning.copies import Copy
from fly_jax.planning.counts import Work, draft_work, pass_work, roofline_seconds
from fly_jax.planning.drafters import Drafters, weigh_drafters
from fly_jax.planning.hlo import Exchange
from fly_jax.planning.request import Request
from fly_jax.planning.speed import (
    PUBLISHED_K,
    PUBLISHED_MEAN_ACCEPTED,
    StepTimes,
    acceptance_from,
    best_drafted,
    mean_accepted,
)
from fly_jax.planning.steps import Model, compiled_steps
from fly_jax.planning.topology import slice_mesh


@dataclasses.dataclass(frozen=True)
class Step:
    """One step on each chip; see `Plan.to_dict` for the names that JSON has.

    Attributes:
      name: prefill, draft, verify, round or autoregressive.
      source: "compiled", or "shapes" where no compiler was asked.
      peak_bytes: most memory at a time.
      argument_bytes: parameters, caches and the like.
      temporary_bytes: made on the way.
      exchanges: between chips.
      copies: of caches and stacks of matrices; None where no compiler was asked.
      work: operations and memory traffic, from shapes.
      seconds: its roofline time.
      compile_seconds: that the compiler took; None where it was not asked.
    """

    name: str
    source: str
    peak_bytes: int
    argument_bytes: int
    temporary_bytes: int
    exchanges: tuple[Exchange, ...]
    copies: tuple[Copy, ...] | None
    work: Work
    seconds: float
    compile_seconds: float | None

    def collectives(self) -> list[dict[str, object]]:
        """How often each kind of exchange runs, and the bytes of its results on a chip."""
        kinds: dict[str, list[int]] = {}
        for one in self.exchanges:
            total = kinds.setdefault(one.kind, [0, 0])
            total[0] += one.count
            total[1] += one.count * one.num_bytes
        return [
            {"kind": kind, "count": count, "bytes": num_bytes}
            for kind, (count, num_bytes) in sorted(kinds.items())
        ]

    def copied(self) -> list[dict[str, object]] | None:
        """What is copied, how often, and whether a loop or a branch does it."""
        if self.copies is None:
            return None
        return [
            {
                "operation": one.operation,
                "shape": list(one.shape),
                "bytes": one.num_bytes,
                "count": one.count,
                "in_loop": one.in_loop,
                "in_branch": one.in_branch,
            }
            for one in self.copies
        ]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer to a `Request`.

    Attributes:
      request: what was asked.
      layouts: how both models lie.
      steps: every step that was compiled or counted.
      largest_batch: rows that fit with this context; 0 for none.
      largest_context: tokens that fit with these rows; 0 for none.
      remedies: one line for each change with which it would fit; empty if it fits.
    """

    request: Request
    layouts: Layouts
    steps: tuple[Step, ...]
    largest_batch: int
    largest_context: int
    remedies: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Most memory that any step takes on a chip."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def left_bytes(self) -> int:
        """What is left of a chip's memory; negative by what is missing."""
        return int(self.request.chip.memory_bytes) - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Every step fits."""
        return self.left_bytes >= 0

    def step(self, name: str) -> Step | None:
        """The step of that name, if the plan got so far."""
        return next((step for step in self.steps if step.name == name), None)

    @property
    def mean_accepted(self) -> float:
        """Tokens of a round: as asked for, or as published for FLy."""
        request = self.request
        if request.mean_accepted_tokens is not None:
            return request.mean_accepted_tokens
        published = acceptance_from(PUBLISHED_MEAN_ACCEPTED, PUBLISHED_K)
        return mean_accepted(published, request.num_speculative_tokens)

    def speed(self) -> dict[str, float | int] | None:
        """What the roofline times mean for decoding; None where it does not fit."""
        draft, verify = self.step("draft"), self.step("verify")
        alone = self.step("autoregressive")
        if not self.fits or draft is None or verify is None or alone is None:
            return None
        k, rows = self.request.num_speculative_tokens, self.request.rows
        busy = verify.work.flops / self.request.chip.flops / (k + 1)
        times = StepTimes(draft.seconds / k, verify.seconds, alone.seconds, busy)
        mean = self.mean_accepted
        best, best_speed_up = best_drafted(times, acceptance_from(mean, k), k)
        return {
            "mean_accepted_tokens": mean,
            "tokens_per_second": rows * mean / times.round(k),
            "autoregressive_tokens_per_second": rows / times.autoregressive,
            "speed_up": times.speed_up(k, mean),
            "best_num_speculative_tokens": best,
            "best_speed_up": best_speed_up,
        }

    def drafters(self) -> Drafters | None:
        """What layouts and types of the draft, and smaller ones, take; None where it does not fit.

        Counted from shapes, whatever the steps come from.
        """
        verify = self.step("verify")
        if not self.fits or verify is None:
            return None
        memory = self.memory()
        return weigh_drafters(
            self.request,
            self.layouts.target_rules,
            self.layouts.draft_rules,
            memory["parameter_bytes"] + memory["cache_bytes"],
            verify.seconds,
            self.mean_accepted,
        )

    def memory(self) -> dict[str, int]:
        """Bytes on each chip, by what they are for."""
        request, layouts = self.request, self.layouts
        workload, drafting = request.workload, request.draft_workload
        return {
            "parameter_bytes": held_bytes(layouts.target, request.target, workload.matrices),
            "draft_parameter_bytes": held_bytes(layouts.draft, request.draft, drafting.matrices),
            "cache_bytes": cache_bytes(layouts.target, request.target, workload),
            "draft_cache_bytes": cache_bytes(layouts.draft, request.draft, drafting),
            "temporary_bytes": max(step.temporary_bytes for step in self.steps),
            "peak_bytes": self.peak_bytes,
            "left_bytes": self.left_bytes,
        }

    def replicated(self) -> list[str]:
        """One line for each kind of axis that the mesh does not divide as asked."""
        request = self.request
        pairs = (
            ("target", self.layouts.target, request.target, request.workload.matrices),
            ("draft", self.layouts.draft, request.draft, request.draft_workload.matrices),
        )
        return [
            f"{who} {line}"
            for who, layout, config, matrices in pairs
            for line in layout.fallbacks(parameter_specs(config, matrices))
        ]

    def to_dict(self) -> dict[str, object]:
        """The JSON object of the command."""
        request, drafters = self.request, self.drafters()
        return {
            "fits": self.fits,
            "chip": request.chip.name,
            "mesh": str(request.mesh),
            "dtype": "int8" if request.int8 else "bfloat16",
            "context": request.context,
            "batch_size": request.rows,
            "num_speculative_tokens": request.num_speculative_tokens,
            "target_layout": self.layouts.target_rules,
            "draft_layout": self.layouts.draft_rules,
            "chip_memory_bytes": int(request.chip.memory_bytes),
            "memory_per_chip": self.memory(),
            "steps": {
                step.name: {
                    "source": step.source,
                    "peak_bytes_per_chip": step.peak_bytes,
                    "argument_bytes_per_chip": step.argument_bytes,
                    "temporary_bytes_per_chip": step.temporary_bytes,
                    "collectives": step.collectives(),
                    "copies": step.copied(),
                    "flops": step.work.flops,
                    "bytes_accessed": step.work.num_bytes,
                    "roofline_seconds": step.seconds,
                    "compile_seconds": step.compile_seconds,
                }
                for step in self.steps
            },
            "speed": self.speed(),
            "drafters": None if drafters is None else dataclasses.asdict(drafters),
            "largest_batch_size": self.largest_batch,
            "largest_context": self.largest_context,
            "remedies": list(self.remedies),
            "replicated": self.replicated(),
        }


def make_plan(request: Request, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Plans: chooses the layouts, compiles or counts every step, and looks for what else fits.

    Args:
      request: what is asked.
      progress: told of every step that is done.

    Raises:
      FlyJaxError: no such slice, no compiler for it, or a request that no memory would satisfy.
    """
    request.check()
    request = request.without_padding()
    compiles = request.compiles and request.chip.is_tpu
    layouts = request.layouts(slice_mesh(request.chip, request.mesh) if compiles else None)
    steps = []
    for step in _compiled(request, layouts) if compiles else _counted(request, layouts):
        progress(step.name)
        steps.append(step)
    peak = max(step.peak_bytes for step in steps)
    others = alternatives(request, peak)
    return Plan(
        request,
        layouts,
        tuple(steps),
        others.largest_batch,
        others.largest_context,
        others.remedies,
    )


def _work(request: Request, layouts: Layouts, name: str) -> Work:
    workload, k = request.workload, request.num_speculative_tokens
    target = (layouts.target, request.target, workload)
    draft = (layouts.draft, request.draft, request.draft_workload)
    fast = request.chip.vector_memory
    if name == "prefill":
        passes = [
            pass_work(*model, tokens, logits=False, vector_memory=fast)
            for tokens in request.prefill_pieces
            for model in (target, draft)
        ]
        return functools.reduce(operator.add, passes)
    if name == "autoregressive":
        return pass_work(*target, 1, vector_memory=fast)
    verified = pass_work(*target, k + 1, vector_memory=fast)
    drafted = draft_work(*draft, vector_memory=fast)
    return {"draft": drafted, "verify": verified, "round": drafted + verified}[name]


def _compiled(request: Request, layouts: Layouts) -> Iterator[Step]:
    chip = request.chip
    for found in compiled_steps(
        Model(request.target, layouts.target, request.workload.matrices),
        Model(request.draft, layouts.draft, request.draft_workload.matrices),
        request.spec,
        rows=request.rows,
        capacity=request.workload.capacity,
        prompt_length=request.prefilled,
    ):
        work = _work(request, layouts, found.name)
        # A target's own draft shares parameters with it, which the compiler counts for both.
        both = found.name in ("prefill", "round")
        twice = _shared_bytes(request, layouts) if both else 0
        passes = len(request.prefill_pieces) if found.name == "prefill" else 1
        exchanged = tuple(
            dataclasses.replace(one, count=one.count * passes) for one in found.exchanges
        )
        yield Step(
            name=found.name,
            source="compiled",
            peak_bytes=found.peak_bytes - twice,
            argument_bytes=found.argument_bytes - twice,
            temporary_bytes=found.temporary_bytes,
            exchanges=exchanged,
            copies=found.copies,
            work=work,
            seconds=roofline_seconds(work, exchanged, chip, dict(request.mesh.axes)),
            compile_seconds=found.seconds,
        )


def _shared_bytes(request: Request, layouts: Layouts) -> int:
    """What a chip holds of the target that is the draft's as well."""
    model = (layouts.draft, request.draft, request.draft_workload.matrices)
    return parameter_bytes(*model) - held_bytes(*model)


def _counted(request: Request, layouts: Layouts) -> Iterator[Step]:
    for found in request.estimate(layouts):
        work = _work(request, layouts, found.name)
        yield Step(
            name=found.name,
            source="shapes",
            peak_bytes=found.peak_bytes,
            argument_bytes=found.argument_bytes,
            temporary_bytes=found.temporary_bytes,
            exchanges=found.exchanges,
            copies=None,
            work=work,
            seconds=roofline_seconds(work, found.exchanges, request.chip, dict(request.mesh.axes)),
            compile_seconds=None,
        )
