"""The steps of decoding, compiled for a mesh whose devices need not be there."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.stages import Compiled, Traced
from jaxtyping import Array, Int

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.depth import initial_pace
from fly_jax.decoding.drafters.drafter import Draft, Drafter
from fly_jax.decoding.round import verify_step
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import DecodeState
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import CACHE_AXES, KVCache
from fly_jax.models.llama import Llama, Parameters
from fly_jax.models.specs import MatrixType, parameter_specs
from fly_jax.planning.copies import Copy, copies, large_shapes
from fly_jax.planning.hlo import Exchange, exchanges
from fly_jax.sharding.rules import Layout
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.evidence import TargetEvidence, evidence
from fly_jax.verification.rules import Exact
from fly_jax.verification.sampling import Sampling

_NEEDED = re.compile(r"temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the plan: its shape, how it lies, and its matrices' type, if not bfloat16."""

    config: LlamaConfig
    layout: Layout
    matrices: MatrixType | None

    def abstract(self) -> Llama:
        """The model with shapes for parameters: nothing is allocated."""
        parameters = {
            name: jax.ShapeDtypeStruct(
                spec.shape,
                spec.dtype or jnp.bfloat16,
                sharding=self.layout.sharding(spec.axes, spec.shape),
            )
            for name, spec in parameter_specs(self.config, self.matrices).items()
        }
        return Llama(self.config, parameters, self.layout)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of one step, on each chip.

    Attributes:
      name: prefill, draft, verify, round or autoregressive.
      peak_bytes: most memory that it takes at a time, arguments included.
      argument_bytes: of what it is given.
      temporary_bytes: of what it makes on the way.
      exchanges: between the chips.
      copies: of caches and stacks of matrices.
      hlo: the program's text; empty where it does not fit.
      seconds: that compiling took.
    """

    name: str
    peak_bytes: int
    argument_bytes: int
    temporary_bytes: int
    exchanges: tuple[Exchange, ...]
    copies: tuple[Copy, ...]
    hlo: str
    seconds: float


def compiled_steps(
    target: Model,
    draft: Model,
    spec: RoundSpec,
    *,
    rows: int,
    capacity: int,
    prompt_length: int,
) -> Iterator[CompiledStep]:
    """Compiles every step, one after the other; ends early where prefilling does not fit.

    Args:
      target: the model whose text is wanted.
      draft: the model that proposes.
      spec: the round; the ends of a text are the target's.
      rows: decoded together.
      capacity: cache positions of a row.
      prompt_length: tokens that prefilling takes in.
    """
    models = (target.abstract(), draft.abstract())
    spec = dataclasses.replace(spec, eos_token_ids=target.config.eos_token_ids)
    large = _large_shapes((target, draft), rows, capacity)
    # A loop that data ends makes a pass for every draft token at the most.
    compiles = functools.partial(
        _compile, layout=target.layout, large=large, most=spec.num_speculative_tokens
    )
    memory = CorrectionMemory("") if spec.rule.uses_memory or spec.reports_mismatches else None
    decoder = Decoder(*models, spec, capacity=capacity, batch_size=rows, memory=memory)
    first = decoder.trace_prefill(prompt_length)
    begun = abstract_state(decoder, (target.layout, draft.layout), first)
    # The last piece of a long prompt takes most: it attends to all pieces before it.
    prefill = decoder.trace_last_piece(begun, prompt_length) or first
    step, compiled = compiles("prefill", prefill)
    yield step
    if compiled is None:
        return
    state = _with_pace(decoder, _left_by(prefill, compiled))
    yield compiles("round", decoder.trace_rounds(state))[0]
    yield compiles("draft", _trace_draft(decoder, state))[0]
    yield compiles("verify", _trace_verify(models[0], state, spec))[0]
    none = RoundSpec(Exact(), 0, None, spec.eos_token_ids)
    alone = Decoder(models[0], None, none, capacity=capacity, batch_size=rows)
    traced = alone.trace_rounds(dataclasses.replace(state, drafter=None, pace=None, window=None))
    yield compiles("autoregressive", traced)[0]


def _large_shapes(models: Sequence[Model], rows: int, capacity: int) -> set[tuple[int, ...]]:
    shapes: set[tuple[int, ...]] = set()
    for model in models:
        shapes |= large_shapes(model.layout, model.config, rows, capacity)
    return shapes


def _compile(
    name: str, traced: Traced, *, layout: Layout, large: set[tuple[int, ...]], most: int
) -> tuple[CompiledStep, Compiled | None]:
    """Compiles a step.

    Args:
      name: of the step.
      traced: the program.
      layout: with the mesh that it is compiled for.
      large: shapes of what is not to be copied.
      most: trips of a loop that nothing but data ends.
    """
    start = time.perf_counter()
    try:
        compiled = traced.lower().compile()
    except JaxRuntimeError as error:
        needed = _NEEDED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or needed is None:
            raise
        peak = int(float(needed[1]) * _UNITS[needed[2]])
        return CompiledStep(name, peak, 0, 0, (), (), "", time.perf_counter() - start), None
    seconds = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert hlo is not None
    arguments = int(memory.argument_size_in_bytes)
    peak = max(int(memory.peak_memory_in_bytes), arguments)
    step = CompiledStep(
        name=name,
        peak_bytes=peak,
        argument_bytes=arguments,
        temporary_bytes=int(memory.temp_size_in_bytes),
        exchanges=tuple(exchanges(hlo, layout.mesh.size, unknown_trips=most)),
        copies=tuple(copies(hlo, large, unknown_trips=most)),
        hlo=hlo,
        seconds=seconds,
    )
    return step, compiled


def _left_by(traced: Traced, compiled: Compiled) -> DecodeState:
    """The state that prefilling leaves, with the shardings that the compiler gave it."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        traced.out_info,
        compiled.output_shardings,
    )


def abstract_state(
    decoder: Decoder, layouts: Sequence[Layout | None], prefill: Traced
) -> DecodeState:
    """The state that prefilling leaves, without compiling it: caches lie as their models do.

    Args:
      decoder: of abstract models.
      layouts: of the target and the drafts.
      prefill: from `Decoder.trace_prefill`.
    """
    state = _with_pace(decoder, cast(DecodeState, prefill.out_info))
    placed = [layout for layout in layouts if layout is not None]
    if not placed:
        return state
    remaining = iter(placed)

    def put(part: Any) -> Any:
        layout, axes = (
            (next(remaining), CACHE_AXES) if isinstance(part, KVCache) else (placed[0], ())
        )
        return jax.tree.map(functools.partial(_placed, layout, axes), part)

    # The target's cache comes first, and each drafter's before those of what lies below it.
    whole = jax.tree.map(functools.partial(_placed, placed[0], ()), state)
    models = (whole.target, whole.drafter)
    target, drafter = jax.tree.map(put, models, is_leaf=lambda one: isinstance(one, KVCache))
    return dataclasses.replace(whole, target=target, drafter=drafter)


def _placed(
    layout: Layout, axes: Sequence[str], leaf: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
    """An abstract array with these axes, or whole on every device where it has others."""
    names = axes if leaf.ndim == len(axes) else (None,) * leaf.ndim
    sharding = layout.sharding(names, leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _with_pace(decoder: Decoder, state: DecodeState) -> DecodeState:
    """Adds what a K is chosen from: figures that only a running decoder has."""
    depths = decoder.spec.depths
    if not depths or state.pace is not None:
        return state
    seconds = jax.ShapeDtypeStruct((len(depths),), np.float32)
    pace = jax.eval_shape(functools.partial(initial_pace, decoder.batch_size), seconds)
    return dataclasses.replace(state, pace=pace)


def _trace_draft(decoder: Decoder, state: DecodeState) -> Traced:
    drafter, spec = decoder.drafter, decoder.spec
    assert drafter is not None
    is_drawn = spec.sampling is not None

    @_donating
    def step(
        drafter_state: Any,
        drafter: Drafter,
        sampling: Sampling | None,
        text: Array,
        length: Array,
        keys: Array,
    ) -> tuple[Draft, Any]:
        return drafter.propose(
            drafter_state,
            text,
            length,
            spec.num_speculative_tokens,
            sampling=sampling,
            keys=keys if is_drawn else None,
        )

    return step.trace(state.drafter, drafter, spec.sampling, state.tokens, state.length, state.keys)


def _trace_verify(target: Llama, state: DecodeState, spec: RoundSpec) -> Traced:
    @_donating
    def step(
        cache: KVCache,
        parameters: Parameters,
        text: Array,
        length: Array,
        drafted: Int[Array, "rows draft"],
    ) -> tuple[TargetEvidence, KVCache]:
        model = Llama(target.config, parameters, target.layout)
        logits, cache = verify_step(model, cache, text, length, drafted)
        return evidence(logits, drafted, needs=spec.needs, layout=target.layout), cache

    assert target.layout is not None
    shape = (state.length.shape[0], spec.num_speculative_tokens)
    drafted = jax.ShapeDtypeStruct(
        shape, np.int32, sharding=target.layout.sharding((None, None), shape)
    )
    return step.trace(state.target, target.parameters(), state.tokens, state.length, drafted)


def _donating(step: Callable[..., object]) -> jax.stages.Wrapped:
    return jax.jit(step, donate_argnums=0)
