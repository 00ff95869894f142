"""The compiled programs of decoding, prefill and rounds, and the models as they take them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Float32, Int, UInt32

from fly_jax.decoding.deferral import no_windows
from fly_jax.decoding.depth import initial_pace, row_begun
from fly_jax.decoding.dispatch import decode_rounds
from fly_jax.decoding.drafters.chain import for_backend
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.first_rows import inputs_of, put_back, row_axis, row_steps, taken
from fly_jax.decoding.spec import RoundSpec, RoundStructure
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.llama import Llama, Parameters
from fly_jax.sharding.rules import Layout
from fly_jax.verification.rules import RuleState

# Prompts are taken in by pieces of so many tokens of all rows together, and at most so many of a
# row: the scores of a layer, [rows, heads, piece, capacity] in float32, are what fills a chip.
_PREFILL_TOKENS = 2048
_LONGEST_PIECE = 1024


def prefill_piece(rows: int) -> int:
    """Tokens of each row that one pass takes in of long prompts: a power of two."""
    most = min(_LONGEST_PIECE, max(_PREFILL_TOKENS // rows, 1))
    return 1 << (most.bit_length() - 1)


class Rows(NamedTuple):
    """What is decoded; see `Programs.put_rows`."""

    text: Int[Array, "rows capacity"]
    lengths: Int[Array, " rows"]
    limits: Int[Array, " rows"]
    seeds: UInt32[Array, " rows"]
    budget: Float32[Array, " rows"] | None
    seconds: Float32[Array, " depths"] | None


class Programs:
    """Target and drafter as the jitted programs take them: plain arrays and static shapes.

    Attributes:
      structure: what is static about the rounds.
      room: positions beyond a row's last token that a round may write to.
    """

    def __init__(
        self,
        target: Llama,
        drafter: Drafter | None,
        spec: RoundSpec,
        cache_dtype: jnp.dtype | None,
    ) -> None:
        self.structure = spec.structure(drafter)
        k = spec.num_speculative_tokens
        self.room = k + 1 if drafter is None else drafter.room(k)
        target = for_backend(target)
        self._parameters, self._drafter = target.parameters(), drafter
        self._is_abstract = isinstance(self._parameters["embedding"], jax.ShapeDtypeStruct)
        dtype = jnp.dtype(cache_dtype or target.dtype)
        self._shapes = _Shapes(target.config, target.layout, dtype, self.structure)

    @property
    def config(self) -> LlamaConfig:
        """The target's."""
        return self._shapes.config

    @property
    def splits_positions(self) -> bool:
        """The mesh splits the positions of the target's cache, so that all of it is attended."""
        layout = self._shapes.layout
        return layout is not None and bool(layout.rules.cache_length)

    def row_steps(self, rows: int) -> tuple[int, ...]:
        """How many of a state's rows `run` may be asked for; on a mesh all, which it splits."""
        return (rows,) if self._shapes.layout is not None else row_steps(rows)

    @property
    def spans_processes(self) -> bool:
        """The mesh has devices of several processes."""
        layout = self._shapes.layout
        return layout is not None and layout.mesh.is_multi_process

    def put(self, value: np.ndarray, axes: tuple[str | None, ...]) -> Array:
        """Puts a host array where the programs expect it: said in words, never implicitly."""
        layout = self._shapes.layout
        if self._is_abstract:
            sharding = layout.sharding(axes, value.shape) if layout else None
            return cast(Array, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
        # Bound to a device as the parameters are: jit compiles anew for arrays that are free.
        bound = self._parameters["embedding"].sharding
        return layout.place(value, axes) if layout else jax.device_put(value, bound)

    def put_numbers(self, numbers: Any) -> Any:
        """Puts the numbers of a rule or a sampling, scalars or one per row, on the devices."""

        def put(leaf: Any) -> Array:
            value = np.asarray(leaf)
            if value.dtype.kind in "iu":
                value = value.astype(np.int32)
            elif value.dtype.kind == "f":
                value = value.astype(np.float32)
            return self.put(value, (None,) * value.ndim)

        return jax.tree.map(put, numbers)

    def put_protected(self, token_ids: Sequence[int], *rows: int) -> Bool[Array, "*rows vocab"]:
        """Puts a mask of tokens on the devices; ids beyond the vocabulary are left out."""
        protected = np.zeros((*rows, self.config.vocab_size), bool)
        protected[..., [token for token in token_ids if 0 <= token < protected.shape[-1]]] = True
        return self.put(protected, (None,) * protected.ndim)

    def put_rows(
        self,
        text: np.ndarray,
        lengths: np.ndarray,
        limits: np.ndarray,
        seeds: np.ndarray,
        budget: np.ndarray | None,
        seconds: np.ndarray | None,
    ) -> Rows:
        """Puts prompts on the devices.

        Args:
          text: [rows, capacity], the prompts.
          lengths: of the prompts.
          limits: length at which each row is done.
          seeds: of each row's draws, uint32.
          budget: risk budget of each row, for a rule with one.
          seconds: of a round of each depth, empty where K is fixed; None if no rate is to be kept.
        """
        return Rows(
            self.put(text, (None, None)),
            self.put(lengths, (None,)),
            self.put(limits, (None,)),
            self.put(seeds, (None,)),
            None if budget is None else self.put(budget, (None,)),
            None if seconds is None else self.put(seconds, (None,)),
        )

    def admit(self, rows: Rows, bucket: int) -> DecodeState:
        """Runs prompts, padded to `bucket` tokens, through all models."""
        piece = min(bucket, prefill_piece(len(rows.text)))
        state = self._call(_admit, self._shapes, piece, self._parameters, self._drafter, rows)
        if not self._is_abstract:  # whose first piece is traced, and no state comes of it
            for start in range(piece, bucket, piece):
                state = self.take_in(state, piece, start)
        return cast(DecodeState, state)

    def resume(
        self,
        state: DecodeState,
        rows: Rows,
        start: int,
        bucket: int,
    ) -> DecodeState:
        """`admit`, behind what the caches of a state hold already.

        Args:
          state: of rows whose tokens were the same before `start`; donated.
          rows: whose capacity is at least that of the state.
          start: tokens of each row that are not run again.
          bucket: tokens that are run.
        """
        number, capacity = rows.text.shape
        state = state.attending(None)
        if capacity > state.target.capacity:
            state = _grown(state, capacity)
        state = _resume(self._shapes, state, rows)
        piece = min(bucket, prefill_piece(number))
        for at in range(start, start + bucket, piece):
            state = self.take_in(state, piece, at)
        return state

    def begin(self, rows: Rows) -> DecodeState:
        """`admit`, of whose prompts nothing has been run yet."""
        return cast(DecodeState, _begin(self._shapes, self._drafter, rows))

    def copy_row(self, one: DecodeState, state: DecodeState, row: int) -> DecodeState:
        """One row with what the models hold of a row of a larger state; `one` is donated."""
        return _copy_row(self._shapes, one, state, self._index(row))

    def insert(self, state: DecodeState, one: DecodeState, row: int) -> DecodeState:
        """The state, which is donated, with another row in a place of its rows."""
        return _insert(self.structure.learns_pace, state, one, self._index(row))

    def release(self, state: DecodeState, row: int) -> DecodeState:
        """The state, which is donated, with a row that is done."""
        return _release(state, self._index(row))

    def _index(self, row: int) -> Array:
        return self.put(np.asarray(row, np.int32), ())

    def take_in(
        self, state: DecodeState, piece: int, start: int, attended: int | None = None
    ) -> DecodeState:
        """Runs `piece` more tokens of the prompts, from `start` on; the state is donated.

        Args:
          state: of the rows.
          piece: tokens that are run.
          start: those that were run before.
          attended: positions that attention reads, at least `start`; a power of two if not given.
        """
        attended = 1 << (start - 1).bit_length() if attended is None else attended
        begin = self.put(np.asarray(start, np.int32), ())
        return self._call(
            _take_in, self._shapes, piece, attended, self._parameters, self._drafter, state, begin
        )

    def run(
        self, state: DecodeState, inputs: RuleInputs, num_rows: int | None = None
    ) -> tuple[DecodeState, RoundOutput]:
        """One dispatch; the state is donated.

        Args:
          state: of the rows.
          inputs: of the same rows.
          num_rows: decodes the first of them alone, so many; None for all.
        """
        given = (self._shapes, num_rows, self._parameters, self._drafter, state, inputs)
        return self._call(_run, *given)

    def _call(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a program; one of abstract models is traced instead."""
        run = cast(Wrapped, program).trace if self._is_abstract else program
        return run(*arguments)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What the programs know when they are compiled: of the target, the caches and the rounds."""

    config: LlamaConfig
    layout: Layout | None
    cache_dtype: jnp.dtype
    structure: RoundStructure

    def target(self, parameters: Parameters) -> Llama:
        return Llama(self.config, parameters, self.layout)


@functools.partial(jax.jit, static_argnames=("shapes", "piece"))
def _admit(
    shapes: _Shapes,
    piece: int,
    parameters: Parameters,
    drafter: Drafter | None,
    rows: Rows,
) -> DecodeState:
    """Runs the prompts' first tokens through all models; logits are not needed yet."""
    state = _begun(shapes, drafter, rows)
    # Nothing has been taken in before that could be attended to.
    state = _fed(shapes, piece, parameters, drafter, state.attending(0), jnp.int32(0))
    return state.attending(None)


@functools.partial(jax.jit, static_argnames=("shapes",))
def _begin(shapes: _Shapes, drafter: Drafter | None, rows: Rows) -> DecodeState:
    return _begun(shapes, drafter, rows)


def _begun(shapes: _Shapes, drafter: Drafter | None, rows: Rows) -> DecodeState:
    """Rows of whose prompts nothing has been run."""
    number, capacity = rows.text.shape
    cache = empty_cache(shapes.config, number, capacity, shapes.cache_dtype, shapes.layout)
    drafting = None if drafter is None else drafter.init(number, capacity, shapes.cache_dtype)
    return _before_rounds(shapes.structure, rows, cache, drafting)


def _before_rounds(
    structure: RoundStructure, rows: Rows, target: KVCache, drafting: Any
) -> DecodeState:
    """Rows before the first round, with what the models hold of them."""
    number, window = len(rows.lengths), structure.deferred_window
    return DecodeState(
        tokens=rows.text,
        length=rows.lengths,
        limit=rows.limits,
        finished=rows.lengths >= rows.limits,
        target=target,
        drafter=drafting,
        keys=jax.vmap(jax.random.key)(rows.seeds),
        rule=RuleState(rows.budget),
        pace=None if rows.seconds is None else initial_pace(number, rows.seconds),
        window=no_windows(number, window, structure.reports, structure.needs.top)
        if window
        else None,
    )


def _like(shapes: _Shapes, drafter: Drafter | None, state: DecodeState, number: int) -> DecodeState:
    """A state of another number of rows, for its shapes."""
    zeros = jnp.zeros(number, jnp.int32)
    rows = Rows(
        text=jnp.zeros((number, state.tokens.shape[1]), jnp.int32),
        lengths=zeros,
        limits=zeros,
        seeds=zeros.astype(jnp.uint32),
        budget=None if state.rule.budget is None else zeros.astype(jnp.float32),
        seconds=None if state.pace is None else state.pace.seconds,
    )
    return _begun(shapes, drafter, rows)


@functools.partial(jax.jit, static_argnames=("shapes",), donate_argnames=("one",))
def _copy_row(
    shapes: _Shapes, one: DecodeState, state: DecodeState, row: Int[Array, ""]
) -> DecodeState:
    def copied(mine: Array, theirs: Array) -> Array:
        axis = row_axis(mine, theirs)
        if axis is None:
            return theirs
        if shapes.layout is None or not jnp.issubdtype(theirs.dtype, jnp.floating):
            return jax.lax.dynamic_slice_in_dim(theirs, row, 1, axis)
        # A mesh may split the rows: of a sum it exchanges one row, of a slice it collects them all.
        is_it = jax.lax.broadcasted_iota(jnp.int32, theirs.shape, axis) == row
        return jnp.sum(jnp.where(is_it, theirs, 0), axis, keepdims=True, dtype=theirs.dtype)

    held = (state.target, state.drafter)
    target, drafting = jax.tree.map(copied, (one.target, one.drafter), held)
    return dataclasses.replace(one, target=target, drafter=drafting)


@functools.partial(jax.jit, static_argnames=("learns_pace",), donate_argnames=("state",))
def _insert(
    learns_pace: bool, state: DecodeState, one: DecodeState, row: Int[Array, ""]
) -> DecodeState:
    def inserted(theirs: Array, mine: Array) -> Array:
        axis = row_axis(mine, theirs)
        if axis is None:
            return mine
        return jax.lax.dynamic_update_slice_in_dim(theirs, mine, row, axis)

    found = cast(DecodeState, jax.tree.map(inserted, state, one))
    if learns_pace and state.pace is not None:
        found = dataclasses.replace(found, pace=row_begun(state.pace, row))
    return found


@functools.partial(jax.jit, donate_argnames=("state",))
def _release(state: DecodeState, row: Int[Array, ""]) -> DecodeState:
    return dataclasses.replace(state, finished=state.finished.at[row].set(True))


@functools.partial(jax.jit, static_argnames=("capacity",))
def _grown(state: DecodeState, capacity: int) -> DecodeState:
    """The state with longer caches."""
    grow = ((0, 0),) * 3 + ((0, capacity - state.target.capacity), (0, 0))

    def grown(one: object) -> object:
        if not isinstance(one, KVCache):
            return one
        keys, values = (jnp.pad(entries, grow) for entries in (one.keys, one.values))
        return dataclasses.replace(one, keys=keys, values=values)

    return jax.tree.map(grown, state, is_leaf=lambda one: isinstance(one, KVCache))


@functools.partial(jax.jit, static_argnames=("shapes",), donate_argnames=("state",))
def _resume(shapes: _Shapes, state: DecodeState, rows: Rows) -> DecodeState:
    """Other prompts in the caches of a state."""
    return _before_rounds(shapes.structure, rows, state.target, state.drafter)


@functools.partial(
    jax.jit, static_argnames=("shapes", "piece", "attended"), donate_argnames=("state",)
)
def _take_in(
    shapes: _Shapes,
    piece: int,
    attended: int,
    parameters: Parameters,
    drafter: Drafter | None,
    state: DecodeState,
    start: Int[Array, ""],
) -> DecodeState:
    """Runs the prompts' next tokens, from `start` on, through all models."""
    state = _fed(shapes, piece, parameters, drafter, state.attending(attended), start)
    return state.attending(None)


def _fed(
    shapes: _Shapes,
    piece: int,
    parameters: Parameters,
    drafter: Drafter | None,
    state: DecodeState,
    start: Int[Array, ""],
) -> DecodeState:
    rows = state.tokens.shape[0]
    tokens = jax.lax.dynamic_slice(state.tokens, (0, start), (rows, piece))
    target = shapes.target(parameters)
    hidden, cache = target.fed(tokens, state.target.with_length(jnp.full((rows,), start)))
    state = dataclasses.replace(state, target=cache)
    if drafter is None:
        return state
    seen = hidden if drafter.needs_hidden else None
    taken = drafter.prefill(state.drafter, tokens, start, seen)
    return dataclasses.replace(state, drafter=taken)


@functools.partial(jax.jit, static_argnames=("shapes", "num_rows"), donate_argnames=("state",))
def _run(
    shapes: _Shapes,
    num_rows: int | None,
    parameters: Parameters,
    drafter: Drafter | None,
    state: DecodeState,
    inputs: RuleInputs,
) -> tuple[DecodeState, RoundOutput]:
    target, layout = shapes.target(parameters), shapes.layout
    if num_rows in (None, len(state.length)):
        state, output = decode_rounds(shapes.structure, target, drafter, state, inputs)
    else:
        few = jax.eval_shape(lambda: _like(shapes, drafter, state, num_rows))
        part, inputs = taken(state, few), inputs_of(inputs, num_rows)
        part, output = decode_rounds(shapes.structure, target, drafter, part, inputs)
        state = put_back(state, part)
    if layout is not None:  # whole on every device, so that every process can read it
        output = jax.tree.map(lambda leaf: layout.constrain(leaf, (None,) * leaf.ndim), output)
    return state, output
