"""The compiled programs of decoding, prefill and rounds, and the models as they take them."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced, Wrapped
from jaxtyping import Array, Bool, Float32, Int, UInt32

from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.deferral import most_provisional, no_windows
from fly_jax.decoding.depth import initial_stats, rows_begun
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.model import once
from fly_jax.decoding.round import RoundProgram
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs, map_caches, map_lengths
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.llama import Llama, Parameters, for_backend, lies_on_cpu, runs_unstacked
from fly_jax.shapes import Index
from fly_jax.sharding.processes import broadcast
from fly_jax.sharding.rules import Layout
from fly_jax.verification.data import narrowed
from fly_jax.verification.rules import RuleState

CAPACITY_STEP = 64
# To read a part of fewer cache positions saves nothing, with a large model on a CPU sooner.
LEAST_ATTENDED, _LEAST_OF_LARGE = 256, 512
# The rows of a large model may together have so many unused positions.
_WASTED_POSITIONS = 512
# Each step of `row_steps` is about this many times the one before it: few programs are compiled.
# A CPU's round takes longer for each row of a large model; others take as long to read the weights.
_GROWTH, _GROWTH_ON_CPU = 4, 2


def cache_capacity(length: int, room: int, step: int = CAPACITY_STEP) -> int:
    """The cache positions of a row of `length` tokens and `Programs.room`, in whole steps."""
    return -(-(length + room) // step) * step


def attention_steps(
    capacity: int, *, is_whole: bool, least: int = LEAST_ATTENDED
) -> tuple[int, ...]:
    """Positions of a cache that attention may read, ascending, from `least` on to all."""
    steps = [capacity]
    while not is_whole and steps[0] // 2 >= least:
        steps.insert(0, -(-steps[0] // 2 // CAPACITY_STEP) * CAPACITY_STEP)
    return tuple(steps)


class AttentionBuckets:
    """The numbers of cache positions that attention may read, and the one for the next dispatch.

    Each step is about twice the one before it: a row's attention then reads at most about twice
    what it holds, and few programs are compiled.
    """

    def __init__(self, static: RoundStatic, steps: Sequence[int], room: int) -> None:
        """Takes the numbers, of `attention_steps`."""
        self.steps = tuple(steps)
        window = static.deferred_window
        most_a_dispatch = static.rounds_per_dispatch * (static.num_speculative_tokens + 1)
        # One dispatch is on its way when the next one is made.
        self._growth = 2 * most_a_dispatch + (most_provisional(window) if window else 0)
        self._room = room

    def next_dispatch(self, rows: Iterable[tuple[int, int]]) -> int:
        """Positions for the next dispatch, by settled tokens and limit of each row that goes on."""
        return self._step(max(min(length + self._growth, limit) for length, limit in rows))

    def all(self, rows: Sequence[tuple[int, int]]) -> list[int]:
        """The values that `next_dispatch` may return, by the rows before anything has settled."""
        first = self._step(min(min(length + self._growth, limit) for length, limit in rows))
        last = self._step(max(limit for _, limit in rows))
        return [step for step in self.steps if first <= step <= last]

    def _step(self, length: int) -> int:
        return next(step for step in self.steps if step >= length + self._room)


class Rows(NamedTuple):
    """Prompts, on the host or on the devices."""

    text: Int[Any, "rows capacity"]
    lengths: Int[Any, " rows"]
    limits: Int[Any, " rows"]  # length at which each row is done
    seeds: UInt32[Any, " rows"]
    budget: Float32[Any, " rows"] | None  # in nats; None for a rule without one
    # See `AcceptanceStats`; empty where K is fixed, None if no rate is kept.
    costs: Float32[Any, "5 depths"] | None = None


class Programs:
    """The jitted programs of target and drafter; a round writes up to `room` positions further."""

    def __init__(self, target: Llama, drafter: Drafter | None, static: RoundStatic) -> None:
        self.static = static
        k = static.num_speculative_tokens
        self.room = k + 1 if drafter is None else drafter.room(k)
        target = for_backend(target)
        self.has_few_shapes = lies_on_cpu(target) and runs_unstacked(target) and target.is_large
        self._parameters, self._drafter = target.parameters(), drafter
        self._resting = None if drafter is None else drafter.at_rest()
        self._is_abstract = isinstance(self._parameters["embedding"], jax.ShapeDtypeStruct)
        self._traces = self._is_abstract
        window = static.deferred_window
        windows = (window, static.reports, static.max_logprobs) if window else None
        chooses = bool(static.depths) and not window
        self._shapes = _Shapes(target.config, target.layout, target.dtype, windows, chooses)

    @property
    def config(self) -> LlamaConfig:
        """The target's description."""
        return self._shapes.config

    def attention_buckets(self, length: int, rows: int) -> AttentionBuckets:
        """Buckets for caches of so many tokens; a mesh that splits the positions attends to all."""
        layout, step = self._shapes.layout, CAPACITY_STEP
        is_whole, least = layout is not None and bool(layout.rules.cache_length), LEAST_ATTENDED
        if self.has_few_shapes:
            step = max(_WASTED_POSITIONS >> (rows - 1).bit_length(), step)
            least = _LEAST_OF_LARGE
        capacity = cache_capacity(length, self.room, step)
        steps = attention_steps(capacity, is_whole=is_whole, least=least)
        return AttentionBuckets(self.static, steps, self.room)

    def row_steps(self, rows: int) -> tuple[int, ...]:
        """The numbers of rows that `run` may be asked for, ascending; the last is all.

        On a mesh, which splits the rows, there is no other.
        """
        steps, growth = [rows], _GROWTH_ON_CPU if self.has_few_shapes else _GROWTH
        while self._shapes.layout is None and steps[0] >= growth:
            steps.insert(0, steps[0] // growth)
        return tuple(steps)

    @property
    def spans_processes(self) -> bool:
        """Tells whether the mesh has devices of several processes."""
        layout = self._shapes.layout
        return layout is not None and layout.mesh.is_multi_process

    def agreed(self, decision: Any) -> Any:
        """Gives process 0's decision, where the mesh has devices of several."""
        return broadcast(decision) if self.spans_processes else decision

    def put(self, value: np.ndarray) -> Array:
        """Puts a host array on every device of the programs, explicitly."""
        layout, axes = self._shapes.layout, (None,) * value.ndim
        if self._is_abstract:
            sharding = layout.sharding(axes, value.shape) if layout else None
            return cast(Array, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
        # Committed to a device, as the parameters are: jit compiles anew for uncommitted arrays.
        bound = self._parameters["embedding"].sharding
        return layout.place(value, axes) if layout else jax.device_put(value, bound)

    def put_numbers(self, numbers: Any) -> Any:
        """Puts the numbers of a rule or a sampling, scalars or one per row, on the devices."""
        return jax.tree.map(lambda leaf: self.put(narrowed(leaf)), numbers)

    def put_protected(self, token_ids: Sequence[int], *rows: int) -> Bool[Array, "*rows vocab"]:
        """Puts a mask of tokens on the devices; ids beyond the vocabulary are left out."""
        protected = np.zeros((*rows, self.config.vocab_size), bool)
        protected[..., [token for token in token_ids if 0 <= token < protected.shape[-1]]] = True
        return self.put(protected)

    def begin(self, rows: Rows, positions: int) -> DecodeState:
        """A state of rows (on the host) whose prompts have not run; traced for abstract models."""
        depths = self.static.depths
        if depths or self.static.deferred_window:
            rows = rows._replace(costs=np.zeros((5, len(depths)), np.float32))
        rows = jax.tree.map(self.put, rows)
        return self._call(_begin, self._shapes, positions, self._resting, rows)

    def copy_row(self, some: DecodeState, state: DecodeState, row: int, at: int) -> DecodeState:
        """Copies into `some`, donated, at `at` what the models hold of a state's row."""
        indices = self._index(row), self._index(at)
        return _copy_row(self._shapes, self._resting, some, state, *indices)

    def insert(
        self, state: DecodeState, some: DecodeState, slots: Sequence[int]
    ) -> tuple[DecodeState, Array]:
        """Puts a few rows into `slots` of the state, donated; also returns an array ready with it.

        Where the few rows' caches have fewer positions, the slots keep what they hold in the rest.
        Of several rows with one slot the first stays there.
        """
        where = self.put(np.asarray(slots, np.int32))
        return self._call(_insert, self._shapes, self._resting, state, some, where)

    def release(self, state: DecodeState, row: int) -> DecodeState:
        """Marks a row of the state, which is donated, as finished."""
        return _release(state, self._index(row))

    def move(self, state: DecodeState, row: int, to: int) -> DecodeState:
        """Moves a row of the state, which is donated; its old place counts as finished."""
        return _move(self._shapes, self._resting, state, self._index(row), self._index(to))

    def _index(self, row: int) -> Array:
        return self.put(np.asarray(row, np.int32))

    @property
    def may_skip_prompts(self) -> bool:
        """Tells whether a drafter may lack prompts: one that rests, and reads text alone."""
        drafter = self._drafter
        return drafter is not None and drafter.rests and not drafter.needs_hidden

    def prefill_chunk(
        self, state: DecodeState, size: int, start: int, attended: int, *, drafts: bool = True
    ) -> DecodeState:
        """Runs `size` more tokens of all rows' prompts, from `start` on; the state is donated.

        Without `drafts` a drafter that may lack them (`may_skip_prompts`) is left out.
        """
        models, begin = (self._parameters, self._resting), self._index(start)
        given = begin, self.put(np.asarray(drafts)) if self.may_skip_prompts else None
        return self._call(_prefill_chunk, self._shapes, size, attended, *models, state, *given)

    def run(
        self, state: DecodeState, inputs: RuleInputs, num_rows: int | None = None
    ) -> tuple[DecodeState, RoundOutput]:
        """Runs a dispatch of the first `num_rows` rows, None for all; the state is donated."""
        models = (self._parameters, self._drafter)
        return self._call(_run, self._shapes, self.static, num_rows, *models, state, inputs)

    def tracing(self) -> Self:
        """Returns the same programs, each of which is traced instead of run."""
        made = copy.copy(self)
        made._traces = True
        return made

    def _call(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a program, or traces it; those of abstract models are never run."""
        run = cast(Wrapped, program).trace if self._traces else program
        return run(*arguments)


def compiled(jobs: Sequence[Callable[[], Traced]], at_a_time: int) -> Iterator[int]:
    """Compiles in threads, for `jax.jit`, what each job traces; yields how many are done."""
    pool = ThreadPoolExecutor(at_a_time)
    try:
        programs = pool.map(lambda job: job().lower().compile(), jobs)
        yield from (done for done, _ in enumerate(programs, 1))
    finally:  # also where Ctrl-C ends it
        pool.shutdown(cancel_futures=True)
        with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc, which else keeps
            ctypes.CDLL(None).malloc_trim(0)  # what XLA freed: 260 MB of a model of 1.5B parameters


def shape_of(leaf: Array) -> jax.ShapeDtypeStruct:
    """The shape, type and place of an array, for which programs are compiled without it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """The static facts of target and state, for which programs are compiled.

    Rounds that differ only in the rest of `RoundStatic` share all programs but their own.
    """

    config: LlamaConfig
    layout: Layout | None
    cache_dtype: jnp.dtype
    windows: tuple[int, bool, int] | None  # arguments of `no_windows`, if one crosses rounds
    chooses_depth: bool  # and no token depends on K

    def target(self, parameters: Parameters) -> Llama:
        return Llama(self.config, parameters, self.layout)


@functools.partial(jax.jit, static_argnames=("shapes", "positions"))
def _begin(shapes: _Shapes, positions: int, drafter: Drafter | None, rows: Rows) -> DecodeState:
    number, dtype = len(rows.text), shapes.cache_dtype
    state = DecodeState(
        tokens=rows.text, length=rows.lengths, limit=rows.limits,
        finished=rows.lengths >= rows.limits,
        target=empty_cache(shapes.config, number, positions, dtype, shapes.layout),
        drafter=None if drafter is None else drafter.init(number, positions, dtype),
        keys=jax.vmap(jax.random.key)(rows.seeds), rule=RuleState(rows.budget),
        stats=None if rows.costs is None else initial_stats(number, rows.costs),
        window=None if shapes.windows is None else no_windows(number, *shapes.windows),
    )  # fmt: skip
    return _whole_numbers(shapes.layout, state)


def _whole_numbers(layout: Layout | None, state: DecodeState) -> DecodeState:
    """The state with all but caches and a drafter's own arrays whole on every device of a mesh."""
    # Some programs would split them by rows, and the programs after these compile once more.
    if layout is None:
        return state

    def whole(leaf: Array) -> Array:
        return layout.constrain(leaf, (None,) * leaf.ndim)

    numbers = map_lengths(whole, dataclasses.replace(state, drafter=None), rest=whole)
    return dataclasses.replace(numbers, drafter=map_lengths(whole, state.drafter))


def _like(shapes: _Shapes, drafter: Drafter | None, state: DecodeState, number: int) -> DecodeState:
    """A state of another number of rows, for its shapes."""
    zeros = jnp.zeros(number, jnp.int32)
    rows = Rows(
        text=jnp.zeros((number, state.tokens.shape[1]), jnp.int32), lengths=zeros, limits=zeros,
        seeds=zeros.astype(jnp.uint32),
        budget=None if state.rule.budget is None else zeros.astype(jnp.float32),
        costs=None if state.stats is None else state.stats.costs,
    )  # fmt: skip
    return _begin(shapes, state.target.capacity, drafter, rows)


def _row_axes(shapes: _Shapes, drafter: Drafter | None, state: DecodeState) -> list[int | None]:
    """The axis of the rows in each array of a state, None where it has none."""
    one, two = (
        jax.tree.leaves(jax.eval_shape(lambda number=number: _like(shapes, drafter, state, number)))
        for number in (1, 2)
    )
    return [row_axis(few, many) for few, many in zip(one, two, strict=True)]


@functools.partial(jax.jit, static_argnames=("shapes",), donate_argnames=("some",))
def _copy_row(
    shapes: _Shapes, drafter: Drafter | None, some: DecodeState, state: DecodeState, row: Index,
    at: Index,
) -> DecodeState:  # fmt: skip
    axes = _row_axes(shapes, drafter, some)

    def copied(axis: int | None, mine: Array, theirs: Array) -> Array:
        if axis is None:
            return theirs
        sizes = [*mine.shape[:axis], theirs.shape[axis], *mine.shape[axis + 1 :]]
        theirs = jax.lax.slice(theirs, [0] * theirs.ndim, sizes)
        if shapes.layout is None or not jnp.issubdtype(theirs.dtype, jnp.floating):
            found = jax.lax.dynamic_slice_in_dim(theirs, row, 1, axis)
        else:
            # A mesh may split the rows: a sum exchanges one row, a slice would collect all.
            is_it = jax.lax.broadcasted_iota(jnp.int32, theirs.shape, axis) == row
            kept = jnp.where(is_it, theirs, 0)
            found = jnp.sum(kept, axis, keepdims=True, dtype=theirs.dtype)
        return jax.lax.dynamic_update_slice_in_dim(mine, found, at, axis)

    leaves, structure = jax.tree.flatten(some)
    both = zip(axes, leaves, jax.tree.leaves(state), strict=True)
    found = jax.tree.unflatten(structure, [copied(*one) for one in both])
    return dataclasses.replace(some, target=found.target, drafter=found.drafter)


@functools.partial(jax.jit, static_argnames=("shapes",), donate_argnames=("state",))
def _insert(
    shapes: _Shapes, drafter: Drafter | None, state: DecodeState, some: DecodeState,
    slots: Int[Array, " few"],
) -> tuple[DecodeState, Array]:  # fmt: skip
    axes = _row_axes(shapes, drafter, state)
    places = [jax.lax.index_in_dim(slots, at, keepdims=False) for at in range(len(slots))]

    def inserted(axis: int | None, theirs: Array, mine: Array) -> Array:
        if axis is None:
            return mine
        for at, place in reversed([*enumerate(places)]):  # the first of several in one slot stays
            one = jax.lax.slice_in_dim(mine, at, at + 1, axis=axis)
            theirs = jax.lax.dynamic_update_slice_in_dim(
                theirs, one, place, axis, allow_negative_indices=False
            )
        return theirs

    leaves, structure = jax.tree.flatten(state)
    both = zip(axes, leaves, jax.tree.leaves(some), strict=True)
    found = jax.tree.unflatten(structure, [inserted(*one) for one in both])
    if shapes.chooses_depth and state.stats is not None:
        # No token depends on the rates: a row that joins others begins with theirs.
        found = dataclasses.replace(found, stats=rows_begun(state.stats, slots))
    return _whole_numbers(shapes.layout, found), found.length[slots]


@functools.partial(jax.jit, donate_argnames=("state",))
def _release(state: DecodeState, row: Index) -> DecodeState:
    return dataclasses.replace(state, finished=state.finished.at[row].set(True))


@functools.partial(jax.jit, static_argnames=("shapes",), donate_argnames=("state",))
def _move(
    shapes: _Shapes, drafter: Drafter | None, state: DecodeState, row: Index, to: Index
) -> DecodeState:
    axes, (leaves, structure) = _row_axes(shapes, drafter, state), jax.tree.flatten(state)
    ones: list[Any] = [
        None if axis is None else jax.lax.dynamic_slice_in_dim(mine, row, 1, axis)
        for axis, mine in zip(axes, leaves, strict=True)
    ]

    def moved(_: Any, leaves: list[Array]) -> list[Array]:
        return [
            mine if axis is None else jax.lax.dynamic_update_slice_in_dim(mine, one, to, axis)
            for axis, mine, one in zip(axes, leaves, ones, strict=True)
        ]

    # Outside a loop XLA fuses the slice with the update of the same array, and copies all of it.
    leaves = jax.lax.fori_loop(0, jnp.not_equal(row, to).astype(jnp.int32), moved, leaves)
    found = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(found, finished=found.finished.at[row].set(True))


@functools.partial(  # the unembedding is there too, though not used: plans count what is held
    jax.jit, static_argnames=("shapes", "size", "attended"), donate_argnames=("state",),
    keep_unused=True,
)  # fmt: skip
def _prefill_chunk(
    shapes: _Shapes, size: int, attended: int, parameters: Parameters, drafter: Drafter | None,
    state: DecodeState, start: Index, drafts: Bool[Array, ""] | None,
) -> DecodeState:  # fmt: skip
    """Runs the prompts' next tokens, from `start` on, through the target and what `drafts`."""
    state = state.attending(attended)
    rows = state.tokens.shape[0]
    tokens = jax.lax.dynamic_slice(state.tokens, (0, start), (rows, size))
    target = shapes.target(parameters)
    cache = state.target.with_length(jnp.full((rows,), start))
    layers = () if drafter is None else drafter.hidden_layers
    _, new, inputs = target.hidden_and_inputs(tokens, cache, layers)
    cache, drafting = cache.written(new, target.layout), state.drafter
    if drafter is not None:
        seen = inputs if drafter.needs_hidden else None
        prefill = functools.partial(drafter.prefill, tokens=tokens, start=start, hidden=seen)
        if drafts is None:
            drafting = prefill(drafting)
        else:  # what it has copied of another row may be longer than what they have in common
            drafting = map_lengths(lambda length: jnp.minimum(length, start), drafting)
            drafting = once(drafts, prefill, drafting)
    state = dataclasses.replace(state, target=cache, drafter=drafting).attending(None)
    return _whole_numbers(shapes.layout, state)


@functools.partial(
    jax.jit, static_argnames=("shapes", "static", "num_rows"), donate_argnames=("state",)
)
def _run(
    shapes: _Shapes, static: RoundStatic, num_rows: int | None, parameters: Parameters,
    drafter: Drafter | None, state: DecodeState, inputs: RuleInputs,
) -> tuple[DecodeState, RoundOutput]:  # fmt: skip
    target, layout = shapes.target(parameters), shapes.layout
    if num_rows in (None, len(state.length)):
        state, output = RoundProgram(static, target, drafter, inputs).dispatch(state)
    else:
        few = jax.eval_shape(lambda: _like(shapes, drafter, state, num_rows))
        part, inputs = taken(state, few), inputs_of(inputs, num_rows)
        part, output = RoundProgram(static, target, drafter, inputs).dispatch(part)
        state = put_back(state, part)
    if layout is not None:  # whole on every device, so that every process can read it
        output = jax.tree.map(lambda leaf: layout.constrain(leaf, (None,) * leaf.ndim), output)
    return _whole_numbers(layout, state), output


# A round's time grows with its rows, used or not. Where only some are used they are the first ones,
# and the round is made for these. A cache stays whole: a pass reads and writes only the rows it is
# fed, and a copy of some would cost more than it saves.


def row_axis(few: Array | jax.ShapeDtypeStruct, many: Array) -> int | None:
    """The axis in which an array of some rows differs from that of more; None without one."""
    return next((axis for axis in range(few.ndim) if few.shape[axis] != many.shape[axis]), None)


def taken(whole: DecodeState, few: DecodeState) -> DecodeState:
    """The first rows of a state, as many as `few` has by its shapes, with whole caches."""

    def rows(shape: Any, one: Any) -> Any:
        axis = row_axis(shape, one)
        return one if axis is None else jax.lax.slice_in_dim(one, 0, shape.shape[axis], axis=axis)

    return map_caches(
        lambda shape, one: one.with_length(one.length[: len(shape.length)]), few, whole, rest=rows
    )


def put_back(whole: DecodeState, part: DecodeState) -> DecodeState:
    """A state whose first rows are replaced by what has become of those `taken`."""

    def cache(mine: KVCache, one: KVCache) -> KVCache:
        return mine.with_length(one.length.at[: len(mine.length)].set(mine.length))

    def rows(mine: Any, one: Any) -> Any:
        axis = row_axis(mine, one)
        return mine if axis is None else jax.lax.dynamic_update_slice_in_dim(one, mine, 0, axis)

    return map_caches(cache, part, whole, rest=rows)


def inputs_of(inputs: RuleInputs, rows: int) -> RuleInputs:
    """The inputs of the first rows; what all rows share stays as it is."""
    few = jax.tree.map(lambda leaf: leaf[:rows] if leaf.ndim else leaf, inputs)
    protected = few.protected if inputs.protected.ndim == 2 else inputs.protected
    return dataclasses.replace(
        few, protected=protected, memory=inputs.memory, earlier=inputs.earlier
    )
