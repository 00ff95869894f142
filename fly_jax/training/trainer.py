"""Training: what a run is, its rows, its optimiser steps, and checkpoints that it resumes from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging
from jaxtyping import Array, Float, Float32, Int, Int32
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.llama import Llama

_STEPS_PER_REPORT = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and its training run.

    Attributes:
      row_length: tokens in a row.
      learning_rate: peak rate.
      warmup_steps: steps in which the rate rises from 0.
      decay_share: last part of the steps, in which the rate falls linearly to 0.
      seed: of the initial weights and of the data.
      stop_step: step at which the run ends before its schedule does; None for `num_steps`.
    """

    config: LlamaConfig
    num_steps: int
    batch_size: int = 16
    row_length: int = 256
    learning_rate: float
    warmup_steps: int = 60
    decay_share: float = 0.3
    seed: int
    stop_step: int | None = None

    @property
    def last_step(self) -> int:
        """Steps that are really done."""
        return self.num_steps if self.stop_step is None else self.stop_step


class Row(NamedTuple):
    """A row of packed documents, or with a leading axis a batch of them.

    Attributes:
      tokens: one more than there are predictions.
      weights: of the loss of predicting `tokens[t + 1]`; zero from one document to the next.
      segments: numbers of the row's documents, from 1 on.
      positions: of a token in its document, from 0 on.
      likely: tokens that a teacher expects instead of `tokens[t + 1]`; None without a teacher.
      shares: their probabilities.
    """

    tokens: Int32[np.ndarray, length + 1]
    weights: Float32[np.ndarray, " length"]
    segments: Int32[np.ndarray, length + 1]
    positions: Int32[np.ndarray, length + 1]
    likely: Int32[np.ndarray, "length few"] | None = None
    shares: Float32[np.ndarray, "length few"] | None = None


def stacked(rows: Iterator[Row], batch_size: int) -> Iterator[Row]:
    """Endless rows by the batch."""
    while True:
        batch = list(itertools.islice(rows, batch_size))
        yield jax.tree.map(lambda *parts: np.stack(parts), *batch)


class TrainingState(NamedTuple):
    """Contents of a checkpoint: parameters by name, the optimiser's state, steps done."""

    parameters: dict[str, Array]
    optimizer: optax.OptState
    step: Int[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bfloat16_matmul(equation: str, x: Array, weights: Array) -> Array:
    """A product with bfloat16 operands, summed in float32, both ways: on CPUs twice as fast."""
    return _narrow_einsum(equation, x, weights)


def _narrow_einsum(equation: str, left: Array, right: Array) -> Array:
    narrow = jnp.bfloat16
    return jnp.einsum(
        equation, left.astype(narrow), right.astype(narrow), preferred_element_type=jnp.float32
    )


def _forward(equation: str, x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    narrow = x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)
    return _narrow_einsum(equation, *narrow), narrow


def _backward(equation: str, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    x, weights = saved
    return (
        _narrow_einsum(f"{output},{right}->{left}", gradient, weights),
        _narrow_einsum(f"{left},{output}->{right}", x, gradient),
    )


bfloat16_matmul.defvjp(_forward, _backward)


def weighted_loss(model: Llama, batch: Row) -> Float[Array, ""]:
    """Cross entropy of what comes next, in nats, averaged by weight, within a token's segment."""
    tokens, weights, segments, positions, likely, shares = jax.tree.map(jnp.asarray, batch)
    length = weights.shape[1]
    segment = segments[:, :-1]
    before = jnp.tril(jnp.ones((length, length), bool))
    visible = (segment[:, :, None] == segment[:, None, :]) & before
    hidden = model.hidden_uncached(tokens[:, :-1], positions[:, :-1], visible, bfloat16_matmul)
    logits = model.logits(hidden, bfloat16_matmul)
    if likely is None or shares is None:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    else:
        log_mass = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        expected = jnp.take_along_axis(logits, likely, axis=-1) - log_mass
        losses = -jnp.sum(shares * expected, axis=-1)
    return jnp.sum(losses * weights) / jnp.sum(weights)


_DIMENSIONS = optax.contrib.MuonDimensionNumbers
_MATRICES = {
    **dict.fromkeys(("query", "key", "value"), _DIMENSIONS((1,), (2, 3))),
    "output": _DIMENSIONS((1, 2), (3,)),
    **dict.fromkeys(("gate", "up", "down"), _DIMENSIONS((1,), (2,))),
}


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for the rest.

    Muon's updates are scaled to the usual size of Adam's (Liu et al. 2025, 2502.16982), so that
    both share one learning rate: a linear rise, a plateau, a linear fall to 0.
    """
    decay = int(recipe.num_steps * recipe.decay_share)
    peak, warmup = recipe.learning_rate, recipe.warmup_steps
    rise, fall = optax.linear_schedule(0.0, peak, warmup), optax.linear_schedule(peak, 0.0, decay)
    phases = (rise, optax.constant_schedule(peak), fall)
    schedule = optax.join_schedules(phases, (warmup, recipe.num_steps - decay))
    muon = optax.contrib.muon(
        schedule, weight_decay=0.1, consistent_rms=0.2, adam_b2=0.98,
        muon_weight_dimension_numbers=lambda names: {name: _MATRICES.get(name) for name in names},
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


@functools.partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def _train_step(
    recipe: Recipe, state: TrainingState, batch: Row
) -> tuple[TrainingState, Float[Array, ""]]:
    """One step on one batch: the new state, and the loss before it."""

    def loss(parameters: dict[str, Array]) -> Float[Array, ""]:
        return weighted_loss(Llama(recipe.config, parameters), batch)

    value, gradients = jax.value_and_grad(loss)(state.parameters)
    updates, optimizer = _optimizer(recipe).update(gradients, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    return TrainingState(parameters, optimizer, state.step + 1), value


def train(
    recipe: Recipe,
    batches: Callable[[int], Iterator[Row]],
    directory: Path,
    *,
    known: dict[str, jax.Array] | None = None,
    steps_per_checkpoint: int = 100,
) -> Llama:
    """Trains a model, from the newest checkpoint in `directory` if there is one.

    The data are a function of the seed and the step, so an interrupted run continues as if it had
    not been: Ctrl-C loses at most `steps_per_checkpoint` steps.

    Args:
      batches: what it learns from, from a step on.
      known: parameters that do not begin at random.

    Raises:
      FlyJaxError: the newest checkpoint is beyond the run's last step.
    """
    options = ocp.CheckpointManagerOptions(save_interval_steps=steps_per_checkpoint, max_to_keep=2)
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        state = _restore(manager, recipe, known)
        start = int(state.step)
        rows = batches(start)
        tokens_per_step = recipe.batch_size * recipe.row_length
        total, initial = recipe.last_step * tokens_per_step, start * tokens_per_step
        with tqdm(total=total, initial=initial, unit="tok", unit_scale=True) as bar:
            for step in range(start, recipe.last_step):
                state, loss = _train_step(recipe, state, next(rows))
                if (step + 1) % _STEPS_PER_REPORT == 0:
                    bar.set_postfix(step=step + 1, loss=f"{float(loss):.3f}", refresh=False)
                bar.update(tokens_per_step)
                is_last = step + 1 == recipe.last_step
                manager.save(step + 1, args=ocp.args.StandardSave(state._asdict()), force=is_last)
    return Llama(recipe.config, state.parameters)


def steps_done(directory: Path) -> int:
    """Steps of the newest checkpoint in a directory that `train` writes to; 0 without one."""
    if not directory.is_dir():
        return 0
    with ocp.CheckpointManager(directory.absolute()) as manager:
        return manager.latest_step() or 0


def _restore(
    manager: ocp.CheckpointManager, recipe: Recipe, known: dict[str, jax.Array] | None
) -> TrainingState:
    """The newest checkpoint; else random parameters in float32, but for those that are known."""
    model = Llama.random(recipe.config, jax.random.key(recipe.seed))
    parameters = model.parameters() | (known or {})
    fresh = TrainingState(parameters, _optimizer(recipe).init(parameters), jnp.int32(0))
    step = manager.latest_step()
    if step is None:
        return fresh
    if step > recipe.last_step:
        raise FlyJaxError(
            f"{manager.directory} holds a checkpoint of step {step} and a run of "
            f"{recipe.last_step} steps was asked for; give another directory, or more steps."
        )
    logging.info("Continuing after step %d of %d.", step, recipe.last_step)
    shapes = jax.eval_shape(lambda: fresh._asdict())
    return TrainingState(**manager.restore(step, args=ocp.args.StandardRestore(shapes)))
