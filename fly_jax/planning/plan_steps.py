"""The steps of decoding: compiled for a mesh whose devices need not be there, or counted."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax import ShapeDtypeStruct
from jax.errors import JaxRuntimeError
from jax.stages import Traced
from jaxtyping import Array

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.drafter import Terms
from fly_jax.decoding.round import verify_step
from fly_jax.decoding.state import DecodeState
from fly_jax.engine.engine import Engine
from fly_jax.engine.prefill import Chunk
from fly_jax.models.architectures import LlamaConfig, MatrixType
from fly_jax.models.cache import CACHE_AXES, KVCache
from fly_jax.models.layouts import Layouts, Workload, held_bytes, held_cache_bytes, parameter_bytes
from fly_jax.models.llama import Llama, Parameters
from fly_jax.planning.hlo import Copy, Exchange, copies, cycles, exchanges, large_shapes
from fly_jax.planning.plan_spec import PlanSpec, abstract_model
from fly_jax.planning.roofline import Work, model_exchanges, pass_work, roofline_seconds
from fly_jax.sharding.rules import Layout
from fly_jax.verification.evidence import TargetEvidence, evidence
from fly_jax.verification.rules import Exact

STEPS = ("prefill", "insert", "round", "draft", "verify", "autoregressive")
_NEEDED = re.compile(r"temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_Model = tuple[Layout, LlamaConfig, Workload]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step (of `STEPS`) on each chip; see `Plan.to_dict` for the names that JSON has.

    Exchanges are from the program, or from shapes where no compiler was asked or it does not fit:
    then the copies, of caches and stacks of matrices, are None, and the program's text is empty.
    """

    name: str
    peak_bytes: int  # most memory at a time, with what the engine holds beside the step
    argument_bytes: int  # parameters, caches and the like, read or not
    temporary_bytes: int
    exchanges: tuple[Exchange, ...]
    work: Work  # from shapes
    seconds: float  # roofline time of the work
    copies: tuple[Copy, ...] | None = None
    hlo: str = dataclasses.field(default="", repr=False)
    compile_seconds: float | None = None  # None where no compiler was asked
    cycles: int | None = None  # the compiler's estimate, without exchanges

    @property
    def source(self) -> str:
        """The source of its figures: "compiled", or "shapes" where no compiler was asked."""
        return "shapes" if self.compile_seconds is None else "compiled"

    def collectives(self) -> list[dict[str, object]]:
        """The exchanges by kind: how often they run, and the bytes of their results on a chip."""
        runs, sent = Counter[str](), Counter[str]()
        for one in self.exchanges:
            runs[one.kind] += one.count
            sent[one.kind] += one.count * one.num_bytes
        return [{"kind": kind, "count": runs[kind], "bytes": sent[kind]} for kind in sorted(runs)]

    def copied(self) -> list[dict[str, object]] | None:
        """The copies: of which array, how often, and whether a loop or a branch makes it."""
        if self.copies is None:
            return None
        names = ("operation", "shape", "count", "in_loop", "in_branch")
        return [
            {name: getattr(one, name) for name in names} | {"bytes": one.num_bytes}
            for one in self.copies
        ]


def compiled_steps(spec: PlanSpec, layouts: Layouts) -> Iterator[Step]:
    """Compiles the programs of `PlanSpec.engine`; a prefill that does not fit is the last."""
    models = models_of(spec, layouts)
    abstract = [abstract_model(config, at, of.matrices) for at, config, of in models]
    eos_token_ids = spec.target.eos_token_ids
    engine = spec.engine(abstract, spec.rounds.with_static(eos_token_ids=eos_token_ids))
    alone = spec.engine(abstract[:1], RoundSpec(Exact(), RoundStatic(0, None, eos_token_ids)))
    chunks = _chunks(spec, layouts)
    # The widest chunk, which attends to all before it, takes most memory.
    chunk = max(chunks, key=lambda one: (one.rows * one.size, one.attended))
    lies = [layout for layout, *_ in models]
    state = abstract_state(engine.trace_slots(), lies)
    rows = abstract_state(engine.trace_rows(chunk.rows), lies)
    caches = (state, rows)
    # A self-draft shares parameters with its target, which the compiler counts for both.
    parameters = sum(parameter_bytes(*matrices_of(model)) for model in models)
    shared = parameters - sum(held_bytes(*matrices_of(model)) for model in models)
    compiles = functools.partial(_compiled, spec, layouts)
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    times, beside = sum(chunks.values()), held - shared
    traced = engine.trace_prefill(rows, chunk)
    prefill = compiles("prefill", traced, caches, times=times, beside=beside)
    yield prefill
    if not prefill.hlo:
        return
    times, beside = sum(_group_bytes(spec, layouts).values()), parameters - shared
    yield compiles("insert", engine.trace_insert(state, rows), caches, times=times, beside=beside)
    yield compiles("round", engine.trace_rounds(state), [state], beside=-shared)
    yield compiles("draft", _trace_draft(engine, state), [state])
    yield compiles("verify", _trace_verify(abstract[0], state, engine.spec), [state])
    slots = abstract_state(alone.trace_slots(), lies)
    yield compiles("autoregressive", alone.trace_rounds(slots), [slots])


def counted_steps(spec: PlanSpec, layouts: Layouts) -> Iterator[Step]:
    """Counts every step from shapes, in the order in which they are compiled."""
    for name, (held, temporary) in _counted_memory(spec, layouts).items():
        works, sent = _counted(spec, layouts, name)
        seconds = _seconds(spec, works, sent)
        yield Step(name, held + temporary, held, temporary, tuple(sent), _whole(works), seconds)


class _Pass(NamedTuple):
    """A pass over so many tokens of each of the workload's rows, and how often a step makes it."""

    model: _Model
    tokens: int
    times: float = 1


def _passes(spec: PlanSpec, layouts: Layouts) -> dict[str, list[_Pass]]:
    """The passes of each step; those of prompts score no vocabulary."""
    target, *drafts = models = models_of(spec, layouts)
    drafted = [
        _Pass(model, width, times)
        for model, passes in zip(drafts, spec.draft_passes, strict=True)
        for width, times in passes.items()
    ]
    verified = [_Pass(target, spec.num_speculative_tokens + 1)]
    return {
        "prefill": [
            _Pass(_of_rows(model, chunk), chunk.size, times)
            for chunk, times in _chunks(spec, layouts).items()
            for model in models
        ],
        "insert": [],
        "round": drafted + verified,
        "draft": drafted,
        "verify": verified,
        "autoregressive": [_Pass(target, 1)],
    }


def _counted(spec: PlanSpec, layouts: Layouts, name: str) -> tuple[list[Work], list[Exchange]]:
    """The work of each pass of a step, and its exchanges."""
    groups = _group_bytes(spec, layouts).items() if name == "insert" else ()
    # Rows' caches are read, and written where the slots are.
    copied = 2.0 * sum(num_bytes * times for num_bytes, times in groups)
    works, sent = [Work(0.0, copied)], list[Exchange]()
    given: dict[str, Any] = {"logits": name != "prefill", "vector_memory": spec.chip.vector_memory}
    for model, tokens, times in _passes(spec, layouts)[name]:
        works.append(pass_work(*model, tokens, **given) * times)
        sent += _times(model_exchanges(*model, tokens, logits=given["logits"]), times)
    return works, sent


def _whole(works: Iterable[Work]) -> Work:
    return sum(works, Work(0.0, 0.0))


def counted_peak(spec: PlanSpec, layouts: Layouts) -> int:
    """The most bytes that a step takes of a chip's memory, counted from shapes."""
    return max(map(sum, _counted_memory(spec, layouts).values()))


def prefill_cache_bytes(spec: PlanSpec, layouts: Layouts) -> int:
    """Bytes of a chip for the caches of prompts that are run, beside those of the slots."""
    return max(_group_bytes(spec, layouts))


def _group_bytes(spec: PlanSpec, layouts: Layouts) -> dict[int, int]:
    """The bytes of a chip for the caches of a group of prompts, with the number of such groups."""
    plan, found = spec.chunk_plan(layouts.target), Counter[int]()
    for (chunk, *_), times in plan.groups(spec.prefilled, spec.rows):
        whole = chunk._replace(attended=plan.positions(chunk.rows))
        held = (held_cache_bytes(*_of_rows(model, whole)) for model in models_of(spec, layouts))
        found[sum(held)] += times
    return found


def _counted_memory(spec: PlanSpec, layouts: Layouts) -> dict[str, tuple[int, int]]:
    """Bytes of arguments and of temporaries of each step."""
    models, rows = models_of(spec, layouts), prefill_cache_bytes(spec, layouts)
    alone, *each = (held_bytes(*matrices_of(model)) + held_cache_bytes(*model) for model in models)
    both = alone + sum(each)
    held = {"prefill": both + rows, "insert": both + rows, "round": both, "draft": sum(each)}
    passes = _passes(spec, layouts)
    passes["round"] = passes["verify"]
    found = {}
    for name, made in passes.items():
        sizes = (_temporaries(*one[:2], logits=name != "prefill") for one in made)
        found[name] = held.get(name, alone), max(sizes, default=0)
    return found


def models_of(spec: PlanSpec, layouts: Layouts) -> tuple[_Model, ...]:
    """The layout, shape and workload (rows, positions, matrices) of target and drafts."""
    workload = spec.workload
    drafting = dataclasses.replace(workload, matrices=spec.self_draft or workload.matrices)
    drafts = ((layouts.draft, one, drafting) for one in spec.drafts)
    return ((layouts.target, spec.target, workload), *drafts)


def matrices_of(model: _Model) -> tuple[Layout, LlamaConfig, MatrixType | None]:
    """A model as `held_bytes` takes it."""
    layout, config, workload = model
    return layout, config, workload.matrices


def _chunks(spec: PlanSpec, layouts: Layouts) -> dict[Chunk, int]:
    """The number of runs of each chunk; those that differ only in their start count as one."""
    found = Counter[Chunk]()
    for chunks, times in spec.chunk_plan(layouts.target).groups(spec.prefilled, spec.rows):
        for chunk in chunks:
            found[chunk._replace(start=0)] += times
    return found


def _of_rows(model: _Model, chunk: Chunk) -> _Model:
    """A model with the rows of a chunk, and the positions that are read for it."""
    layout, config, workload = model
    of_chunk = dataclasses.replace(workload, rows=chunk.rows, capacity=chunk.attended)
    return layout, config, of_chunk


def _seconds(spec: PlanSpec, works: Iterable[Work], sent: Iterable[Exchange]) -> float:
    return roofline_seconds(works, sent, spec.chip, dict(spec.mesh.axes))


def _times(found: Iterable[Exchange], times: float) -> list[Exchange]:
    return [dataclasses.replace(one, count=round(one.count * times)) for one in found]


def _temporaries(model: _Model, tokens: int, *, logits: bool) -> int:
    """The residual stream twice and an MLP once in float32, one layer's scores, the logits."""
    layout, config, workload = model
    rows = workload.rows // layout.devices(layout.axes_of("rows", workload.rows))
    ffw = config.ffw_size // layout.devices(layout.axes_of("ffw", config.ffw_size))
    heads = config.num_heads // layout.devices(layout.axes_of("q_heads", config.num_heads))
    vocab = config.vocab_size // layout.devices(layout.axes_of("vocab", config.vocab_size))
    numbers = 2 * config.embed_size + ffw + heads * workload.capacity + (vocab if logits else 0)
    return 4 * rows * tokens * numbers


def _compiled(
    spec: PlanSpec, layouts: Layouts, name: str, traced: Traced, caches: Iterable[DecodeState], *,
    times: int = 1, beside: int = 0,
) -> Step:  # fmt: skip
    """Compiles a step that runs `times`, with `beside` bytes held beside its arguments.

    It reports copies of the caches and of the models' stacks of matrices: there should be none.
    """
    large = {
        shape
        for layout, config, _ in models_of(spec, layouts)
        for one in caches
        for shape in large_shapes(layout, config, len(one.length), one.target.capacity)
    }
    # A loop that data ends makes a pass for every draft token at the most.
    k, (works, counted) = spec.num_speculative_tokens, _counted(spec, layouts, name)
    start = time.perf_counter()
    try:
        compiled = traced.lower().compile()
    except JaxRuntimeError as error:
        needed = _NEEDED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
            raise
        peak = int(float(needed[1]) * _UNITS[needed[2]]) + beside
        took, seconds = time.perf_counter() - start, _seconds(spec, works, counted)
        return Step(name, peak, 0, 0, tuple(counted), _whole(works), seconds, compile_seconds=took)
    took = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert hlo is not None
    arguments = int(memory.argument_size_in_bytes)
    found = exchanges(hlo, layouts.target.mesh.size, unknown_trips=k)
    by_data = spec.drafts_by_data and name in ("round", "draft")
    sent = tuple(counted if by_data else _times(found, times))
    return Step(
        name=name, peak_bytes=max(int(memory.peak_memory_in_bytes), arguments) + beside,
        argument_bytes=arguments + beside, temporary_bytes=int(memory.temp_size_in_bytes),
        exchanges=sent, work=_whole(works), seconds=_seconds(spec, works, sent),
        copies=tuple(copies(hlo, large, unknown_trips=k)), hlo=hlo, compile_seconds=took,
        cycles=times * cycles(hlo, unknown_trips=k),
    )  # fmt: skip


def abstract_state(traced: Traced, layouts: Sequence[Layout | None]) -> DecodeState:
    """The state that a traced program makes; `layouts` are the models', the target's first."""
    state, placed = cast(DecodeState, traced.out_info), [one for one in layouts if one is not None]
    if not placed:
        return state
    remaining = iter(placed)

    def put(part: Any) -> Any:
        is_cache = isinstance(part, KVCache)
        layout = next(remaining, placed[-1]) if is_cache else placed[0]

        def lying(leaf: ShapeDtypeStruct) -> ShapeDtypeStruct:
            has_axes = is_cache and leaf.ndim == len(CACHE_AXES)  # whole on every device otherwise
            axes = CACHE_AXES if has_axes else (None,) * leaf.ndim
            where = layout.sharding(axes, leaf.shape)
            return ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(lying, part)

    # The target's cache comes first, each drafter's before those of the levels below it, and a
    # head's features last.
    return cast(DecodeState, jax.tree.map(put, state, is_leaf=lambda one: isinstance(one, KVCache)))


def _trace_draft(engine: Engine, state: DecodeState) -> Traced:
    drafter, spec = engine.drafter, engine.spec
    assert drafter is not None
    propose = jax.jit(type(drafter).propose, static_argnums=4, donate_argnames="state")
    terms = Terms(None, spec.sampling, None if spec.sampling is None else state.keys)
    k = spec.static.num_speculative_tokens
    return propose.trace(drafter, state.drafter, state.tokens, state.length, k, terms)


def _trace_verify(target: Llama, state: DecodeState, spec: RoundSpec) -> Traced:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        cache: KVCache, parameters: Parameters, text: Array, length: Array, drafted: Array
    ) -> tuple[TargetEvidence, KVCache]:
        model = Llama(target.config, parameters, target.layout)
        logits, cache = verify_step(model, cache, text, length, drafted)
        needs = spec.static.needs(spec.rule)
        return evidence(logits, drafted, needs=needs, layout=target.layout), cache

    assert target.layout is not None
    shape = (state.length.shape[0], spec.static.num_speculative_tokens)
    whole = target.layout.sharding((None, None), shape)
    drafted = ShapeDtypeStruct(shape, np.int32, sharding=whole)
    return step.trace(state.target, target.parameters(), state.tokens, state.length, drafted)
