"""The two compiled programs of decoding, prefill and rounds, and the models as they take them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped
from jaxtyping import Array, Float32, Int, UInt32

from fly_jax.decoding.deferral import no_windows
from fly_jax.decoding.depth import initial_pace
from fly_jax.decoding.dispatch import decode_rounds
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.round import RoundSpec
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama, Parameters
from fly_jax.sharding.rules import Layout
from fly_jax.verification.rules import RuleState

# Prompts are taken in by pieces of at most so many tokens: the scores of a layer, [rows, heads,
# piece, capacity] in float32, would otherwise be what fills a chip.
PREFILL_PIECE = 1024

# Beyond this many layers the compile time of separate layers outweighs what they save on a CPU.
_MOST_UNSTACKED_LAYERS = 16


def _for_backend(model: Llama) -> Llama:
    is_small = model.config.num_layers <= _MOST_UNSTACKED_LAYERS
    on_cpu = jax.default_backend() == "cpu" and model.layout is None
    return model.unstacked() if on_cpu and is_small else model


class Programs:
    """The pair as the jitted programs take it: plain arrays and static shapes."""

    def __init__(
        self, target: Llama, drafts: Sequence[Llama], cache_dtype: jnp.dtype | None
    ) -> None:
        models = [_for_backend(model) for model in (target, *drafts)]
        self._parameters = tuple(model.parameters() for model in models)
        self._is_abstract = isinstance(self._parameters[0]["embedding"], jax.ShapeDtypeStruct)
        self._shapes = _Shapes(
            tuple(model.config for model in models),
            tuple(model.layout for model in models),
            jnp.dtype(cache_dtype or target.dtype),
        )

    @property
    def config(self) -> LlamaConfig:
        """The target's."""
        return self._shapes.configs[0]

    @property
    def spans_processes(self) -> bool:
        """The mesh has devices of several processes."""
        layout = self._shapes.target_layout
        return layout is not None and layout.mesh.is_multi_process

    def place(self, value: np.ndarray, axes: tuple[str | None, ...]) -> Array:
        """Puts a host array where the programs expect it: said in words, never implicitly."""
        layout = self._shapes.target_layout
        if self._is_abstract:
            sharding = layout.sharding(axes, value.shape) if layout else None
            return cast(Array, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
        return layout.place(value, axes) if layout else jax.device_put(value)

    def admit(
        self,
        text: np.ndarray,
        lengths: np.ndarray,
        limits: np.ndarray,
        bucket: int,
        window_size: int,
        reports: bool,
        stop: EntropyStop | None,
        seed: int,
        budget: np.ndarray | None,
        seconds: np.ndarray | None,
    ) -> DecodeState:
        """Runs prompts, padded to `bucket` tokens, through all models.

        Args:
          text: [rows, capacity], the prompts.
          lengths: of the prompts.
          limits: length at which each row is done.
          bucket: tokens that are run.
          window_size: of the windows that may stay open after a round; 0 if none may.
          reports: the rounds report on every token.
          stop: what may end a row's drafting early.
          seed: of the draws.
          budget: risk budget of each row, for a rule with one.
          seconds: of a round of each depth, empty where K is fixed; None if no rate is to be kept.
        """
        piece = min(bucket, PREFILL_PIECE)
        state = self._call(
            _admit,
            self._shapes,
            piece,
            window_size,
            reports,
            stop,
            self._parameters,
            self.place(text, (None, None)),
            self.place(lengths, (None,)),
            self.place(limits, (None,)),
            self.place(np.asarray(seed % 2**32, np.uint32), ()),
            None if budget is None else self.place(budget, (None,)),
            None if seconds is None else self.place(seconds, (None,)),
        )
        if not self._is_abstract:  # of which the first piece stands for all
            for start in range(piece, bucket, piece):
                begin = self.place(np.asarray(start, np.int32), ())
                state = _take_in(self._shapes, piece, self._parameters, state, begin)
        return cast(DecodeState, state)

    def run(
        self, spec: RoundSpec, state: DecodeState, inputs: RuleInputs
    ) -> tuple[DecodeState, RoundOutput]:
        """One dispatch; the state is donated."""
        return self._call(_run, spec, self._shapes, self._parameters, state, inputs)

    def _call(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a program; one of abstract models is lowered instead."""
        run = cast(Wrapped, program).lower if self._is_abstract else program
        return run(*arguments)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What the programs know of the models when they are compiled: the target, then the drafts."""

    configs: tuple[LlamaConfig, ...]
    layouts: tuple[Layout | None, ...]
    cache_dtype: jnp.dtype

    @property
    def target_layout(self) -> Layout | None:
        return self.layouts[0]

    def models(self, parameters: tuple[Parameters, ...]) -> list[Llama]:
        parts = zip(self.configs, parameters, self.layouts, strict=True)
        return [Llama(*part) for part in parts]


@functools.partial(jax.jit, static_argnames=("shapes", "piece", "window_size", "reports", "stop"))
def _admit(
    shapes: _Shapes,
    piece: int,
    window_size: int,
    reports: bool,
    stop: EntropyStop | None,
    parameters: tuple[Parameters, ...],
    text: Int[Array, "rows capacity"],
    lengths: Int[Array, " rows"],
    limits: Int[Array, " rows"],
    seed: UInt32[Array, ""],
    budget: Float32[Array, " rows"] | None,
    seconds: Float32[Array, " depths"] | None,
) -> DecodeState:
    """Runs the prompts' first tokens through all models; logits are not needed yet."""
    rows, capacity = text.shape

    def prefill(model: Llama) -> KVCache:
        cache = empty_cache(model.config, rows, capacity, shapes.cache_dtype)
        return model.hidden(text[:, :piece], cache)[1].with_length(lengths)

    target, *drafts = (prefill(model) for model in shapes.models(parameters))
    key = jax.random.key(seed)
    rule = RuleState(budget)
    pace = None if seconds is None else initial_pace(rows, seconds)
    window = no_windows(rows, window_size, reports) if window_size else None
    threshold = None if stop is None else jnp.full((rows,), stop.first, jnp.float32)
    finished = lengths >= limits
    return DecodeState(
        text, lengths, limits, finished, target, tuple(drafts), key, rule, pace, window, threshold
    )


@functools.partial(jax.jit, static_argnames=("shapes", "piece"), donate_argnames=("state",))
def _take_in(
    shapes: _Shapes,
    piece: int,
    parameters: tuple[Parameters, ...],
    state: DecodeState,
    start: Int[Array, ""],
) -> DecodeState:
    """Runs the prompts' next tokens, from `start` on, through all models."""
    rows = state.tokens.shape[0]
    tokens = jax.lax.dynamic_slice(state.tokens, (0, start), (rows, piece))

    def extended(model: Llama, cache: KVCache) -> KVCache:
        after = model.hidden(tokens, cache.with_length(jnp.full((rows,), start)))[1]
        return after.with_length(cache.length)

    models, caches = shapes.models(parameters), (state.target, *state.drafts)
    target, *drafts = (extended(*both) for both in zip(models, caches, strict=True))
    return dataclasses.replace(state, target=target, drafts=tuple(drafts))


@functools.partial(jax.jit, static_argnames=("spec", "shapes"), donate_argnames=("state",))
def _run(
    spec: RoundSpec,
    shapes: _Shapes,
    parameters: tuple[Parameters, ...],
    state: DecodeState,
    inputs: RuleInputs,
) -> tuple[DecodeState, RoundOutput]:
    target, *drafts = shapes.models(parameters)
    state, output = decode_rounds(spec, target, tuple(drafts), state, inputs)
    layout = shapes.target_layout
    if layout is not None:  # whole on every device, so that every process can read it
        output = jax.tree.map(lambda leaf: layout.constrain(leaf, (None,) * leaf.ndim), output)
    return state, output
