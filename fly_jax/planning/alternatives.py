"""Alternatives to a plan: layouts and types that fit, by shapes and the compiler; and drafts."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator

from fly_jax.models.architectures import INT8, LlamaConfig, MatrixType
from fly_jax.models.layouts import Layouts, Workload, resident_bytes
from fly_jax.models.presets import PRESETS
from fly_jax.models.quantise import SELF, SELF_DRAFTS, self_draft_type
from fly_jax.planning.plan_spec import PlanSpec, abstract_mesh
from fly_jax.planning.plan_steps import counted_peak
from fly_jax.planning.roofline import draft_passes, model_exchanges, pass_work, roofline_seconds
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

_MOST_ROWS, _CONTEXT_STEP = 4096, 1024


def alternatives(spec: PlanSpec, peak_bytes: int) -> tuple[int, int, tuple[str, ...]]:
    """The largest batch and context, and the remedies for a plan of this peak; see `Plan`."""
    correction = peak_bytes - counted_peak(spec, spec.layouts())

    def fits(changed: PlanSpec) -> bool:
        return counted_peak(changed, changed.layouts()) + correction <= changed.chip.memory_bytes

    def fits_steps(steps: int) -> bool:
        context, prompt = _CONTEXT_STEP * steps, spec.prompt_length
        prompt = None if prompt is None else min(prompt, context - 1)
        return fits(dataclasses.replace(spec, context=context, prompt_length=prompt))

    def fits_rows(rows: int) -> bool:
        return fits(dataclasses.replace(spec, rows=rows))

    # As many as a mesh splits evenly take less of a chip than one row fewer may.
    even = spec.mesh.num_devices // dict(spec.mesh.axes).get("x", 1)
    whole = even * _largest(lambda times: fits_rows(even * times), _MOST_ROWS // even)
    rows = next(filter(fits_rows, range(whole + even - 1, whole, -1)), whole)
    context = _CONTEXT_STEP * _largest(fits_steps, spec.target.max_context // _CONTEXT_STEP)
    if peak_bytes <= spec.chip.memory_bytes:
        return max(rows, spec.rows), max(context, spec.context), ()
    return rows, context, tuple(_remedies(spec, fits, rows, context))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number that fits, of 1 to `most`; 0 if none does."""
    return bisect.bisect(range(1, most + 1), False, key=lambda number: not fits(number))


def _remedies(
    spec: PlanSpec, fits: Callable[[PlanSpec], bool], largest_batch: int, largest_context: int
) -> Iterator[str]:
    """Yields changes that would make it fit: int8, fewer rows, less context, a larger slice."""
    is_own = spec.self_draft == SELF_DRAFTS["int8"]  # which an int8 target would be itself
    if not (spec.int8 or is_own) and fits(dataclasses.replace(spec, int8=True)):
        yield "int8 matrices (--dtype int8)"
    if 0 < largest_batch < spec.rows:
        yield f"fewer rows: {largest_batch} (--batch_size {largest_batch})"
    if 0 < largest_context < spec.context:
        yield f"a context of {largest_context} (--context {largest_context})"
    for shape in spec.chip.slices or ("1", "2", "4", "8"):
        sizes = [int(size) for size in shape.split("x")]
        if len(sizes) == 3:  # a cube is two axes of the mesh
            first, second, third = sizes
            sizes = [second * third, first] if first < third else [first * second, third]
        mesh = parse_mesh("x".join(map(str, sizes)))
        if mesh.num_devices > spec.mesh.num_devices and fits(dataclasses.replace(spec, mesh=mesh)):
            yield f"a larger slice: {mesh} (--mesh {mesh})"
            return


@dataclasses.dataclass(frozen=True)
class DraftPass:
    """A draft model in one layout and type."""

    rules: str
    matrices: str
    seconds: float  # roofline time of a pass over one token, or over all of a round if so drafted
    network_seconds: float  # of these, between chips
    num_bytes: int  # that a chip holds of it, its cache included
    fits: bool  # with the target beside it


@dataclasses.dataclass(frozen=True)
class SmallerDraft:
    """A smaller preset, or the target's own matrices (self:int4), in the given draft's place."""

    name: str
    best: DraftPass  # its fastest layout, in the type of the plan's draft
    round_seconds: float
    # Mean accepted tokens from which it gives more tokens a second than the given draft does with
    # those of the plan.
    pays_from: float


@dataclasses.dataclass(frozen=True)
class Drafters:
    """Draft models, sorted by their worth."""

    # The given draft in every layout and type, the fastest first; those that do not fit come last.
    # A target's own draft has one layout, the target's.
    passes: tuple[DraftPass, ...]
    # Those of its architecture and vocabulary that pay with at most K + 1 tokens a round, as far as
    # the given draft's mean accepted tokens are known.
    smaller: tuple[SmallerDraft, ...]


def weigh_drafters(spec: PlanSpec, layouts: Layouts, verify: float) -> Drafters:
    """Weighs the draft's layouts and types, and smaller models, by `verify` seconds."""
    mean, _ = spec.accepted
    left = spec.chip.memory_bytes - resident_bytes(layouts.target, spec.target, spec.workload)
    k = spec.num_speculative_tokens
    wide = "int8" if spec.int8 else "bfloat16"
    own = {
        f"{SELF}{name}": _pass(spec, spec.target, layouts.target_rules, matrices, left)
        for name, matrices in SELF_DRAFTS.items()
        if name != wide
    }
    if spec.self_draft is not None:
        given = own.pop(next(name for name in own if spec.self_draft == self_draft_type(name)))
        passes: tuple[DraftPass, ...] = (given,)
    else:
        passes, its = _passes(spec, spec.draft, left), (layouts.draft_rules, wide)
        given = next(one for one in passes if (one.rules, one.matrices) == its)
    given_round = verify + _num_passes(spec.draft, k) * given.seconds
    others = {
        name: next(one for one in _passes(spec, config, left) if one.matrices == wide)
        for name, config in PRESETS.items()
        if _replaces(config, spec.draft)
    }
    smaller = []
    for name, best in (others | own).items():
        if best.fits and mean is not None:
            times = _num_passes(PRESETS.get(name, spec.target), k)
            seconds = verify + times * best.seconds
            pays_from = mean * seconds / given_round
            if pays_from <= k + 1:  # more no round settles
                smaller.append(SmallerDraft(name, best, seconds, pays_from))
    return Drafters(passes, tuple(smaller))


def _num_passes(config: LlamaConfig, num_speculative_tokens: int) -> float:
    return sum(draft_passes([config], num_speculative_tokens)[0].values())


def _replaces(config: LlamaConfig, draft: LlamaConfig) -> bool:
    """Tells whether a preset drafts for the same targets with less work."""
    return (
        config.head is None  # which is one target's own
        and config.architecture == draft.architecture
        and draft.vocab_size <= config.vocab_size < 1.01 * draft.vocab_size
        and config.eos_token_ids == draft.eos_token_ids
        and config.max_context >= draft.max_context
        and config.num_layers * config.embed_size < draft.num_layers * draft.embed_size
    )


def _passes(spec: PlanSpec, config: LlamaConfig, left: float) -> tuple[DraftPass, ...]:
    """The layouts and types of a draft model in the bytes left of a chip, the best first."""
    found = (_pass(spec, config, *way, left) for way in itertools.product(RULES, (None, INT8)))
    return tuple(sorted(found, key=lambda one: (not one.fits, one.seconds)))


def _pass(
    spec: PlanSpec, config: LlamaConfig, rules: str, matrices: MatrixType | None, left: float
) -> DraftPass:
    layout = Layout(abstract_mesh(spec.mesh), RULES[rules])
    workload: Workload = dataclasses.replace(spec.workload, matrices=matrices)
    chip, sizes = spec.chip, dict(spec.mesh.axes)
    width = min(draft_passes([config], spec.num_speculative_tokens)[0])
    work = pass_work(layout, config, workload, width, vector_memory=chip.vector_memory)
    sent = model_exchanges(layout, config, workload, width)
    seconds = roofline_seconds([work], sent, chip, sizes)
    held = resident_bytes(layout, config, workload)
    alone = roofline_seconds([work], [], chip, sizes)
    name = "bfloat16" if matrices is None else matrices.dtype.name
    return DraftPass(rules, name, seconds, seconds - alone, held, held <= left)
