"""Training: what a run is, its rows, its optimiser steps, and checkpoints that it resumes from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging
from jaxtyping import Array, Bool, Float, Float32, Int, Int32
from orbax.checkpoint import checkpoint_managers as managers
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.llama import Llama

_STEPS_PER_REPORT = 10
# Checkpoints after the best one.
PATIENCE = 5
# Figures that order checkpoints: of equally good ones the first is the best.
_MEASURED, _BEFORE = "mean_accepted_tokens", "negative_step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and its training run.

    The learning rate rises in `warmup_steps` to its peak, and falls from it to 0 in the last part
    of the steps, the `decay_share`. The loss of a batch is by the model's shape and its parameters.
    """

    config: LlamaConfig
    num_steps: int
    batch_size: int = 16
    row_length: int = 256
    learning_rate: float
    warmup_steps: int = 60
    decay_share: float = 0.3
    seed: int
    stop_step: int | None = None  # where the run ends before its schedule does
    loss: Callable[[LlamaConfig, dict[str, Array], Any], Array]

    @property
    def last_step(self) -> int:
        """The last step that is run."""
        return self.num_steps if self.stop_step is None else self.stop_step


class Row(NamedTuple):
    """A row of packed documents, or with a leading axis a batch of them."""

    tokens: Int32[np.ndarray, length + 1]  # one more than there are predictions
    weights: Float32[np.ndarray, " length"]  # of predicting the next token; 0 between documents
    segments: Int32[np.ndarray, length + 1]  # numbers of the row's documents from 1 on
    positions: Int32[np.ndarray, length + 1]  # within each document, from 0


# A `Row`, or a tree of arrays that has one and what is said of its tokens.
Batch = TypeVar("Batch")


def stacked(rows: Iterator[Batch], batch_size: int) -> Iterator[Batch]:
    """Yields batches of rows without end."""
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
    return _forward(equation, x, weights)[0]


def _forward(equation: str, x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    narrow = x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)
    return jnp.einsum(equation, *narrow, preferred_element_type=jnp.float32), narrow


def _backward(equation: str, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    x, weights = saved
    of_x = bfloat16_matmul(f"{output},{right}->{left}", gradient, weights)
    return of_x, bfloat16_matmul(f"{left},{output}->{right}", x, gradient)


bfloat16_matmul.defvjp(_forward, _backward)


def seen_within(row: Row) -> Bool[Array, "batch length length"]:
    """Tells which tokens each one sees: those before it in its document, and itself."""
    segment = jnp.asarray(row.segments)[:, :-1]
    before = jnp.tril(jnp.ones((segment.shape[1],) * 2, bool))
    return (segment[:, :, None] == segment[:, None, :]) & before


_DIMENSIONS = optax.contrib.MuonDimensionNumbers
_MATRICES = {
    **dict.fromkeys(("query", "key", "value"), _DIMENSIONS((1,), (2, 3))),
    "output": _DIMENSIONS((1, 2), (3,)),
    **dict.fromkeys(("gate", "up", "down"), _DIMENSIONS((1,), (2,))),
    "fusion": _DIMENSIONS((0,), (1,)),
}


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for the rest.

    Muon's updates are scaled to the usual size of Adam's (Liu et al. 2025, 2502.16982), so that
    both share one learning rate: a linear rise, a plateau, a linear fall to 0.
    """
    decay = int(recipe.num_steps * recipe.decay_share)
    warmup = min(recipe.warmup_steps, recipe.num_steps - decay)
    peak = recipe.learning_rate
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
    recipe: Recipe, state: TrainingState, frozen: dict[str, Array], batch: Any
) -> tuple[TrainingState, Float[Array, ""]]:
    """Runs a step on a batch; returns the new state, and the loss before it."""

    def loss(parameters: dict[str, Array]) -> Float[Array, ""]:
        return recipe.loss(recipe.config, parameters | frozen, batch)

    value, gradients = jax.value_and_grad(loss)(state.parameters)
    updates, optimizer = _optimizer(recipe).update(gradients, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    return TrainingState(parameters, optimizer, state.step + 1), value


class Start(NamedTuple):
    """Parameters that a run begins with, by name: those that it trains, and those that it keeps."""

    trained: dict[str, Array]
    frozen: dict[str, Array]


def train(
    recipe: Recipe, batches: Callable[[int], Iterator[Any]], directory: Path, *,
    start: Start | None = None, measured: Callable[[Llama], float] | None = None,
    steps_per_checkpoint: int = 100,
) -> Llama:  # fmt: skip
    """Trains a model, from the newest checkpoint in `directory` if there is one.

    The data are a function of the seed and the step, so an interrupted run continues as if it had
    not been: Ctrl-C loses at most `steps_per_checkpoint` steps. Raises FlyJaxError for a checkpoint
    beyond the run's last step, or a disk without room for any.

    Args:
      batches: what it learns from, from a step on.
      start: where it begins; None for parameters at random, all of them trained.
      measured: tells how good a model is, before each checkpoint. The run ends where the last
        `PATIENCE` checkpoints were no better than one before them, and the best one is returned.
    """
    if start is None:
        start = Start(Llama.random(recipe.config, jax.random.key(recipe.seed)).parameters(), {})

    def begun() -> TrainingState:
        return TrainingState(start.trained, _optimizer(recipe).init(start.trained), jnp.int32(0))

    def model(state: TrainingState) -> Llama:
        return Llama(recipe.config, state.parameters | start.frozen)

    with _manager(directory, is_measured=measured is not None) as manager:
        state = _restored(manager, recipe, begun, manager.latest_step())
        first, free = int(state.step), shutil.disk_usage(directory).free
        needed = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))  # two are kept
        if free < needed and not first:
            raise FlyJaxError(
                f"The checkpoints need {needed / 1e9:.1f} GB and {directory} has room for "
                f"{free / 1e9:.1f}; give a --directory on a larger disk."
            )
        if first:
            logging.info("Continuing after step %d of %d.", first, recipe.last_step)
        rows = batches(first)
        tokens_per_step = recipe.batch_size * recipe.row_length
        total, initial = recipe.last_step * tokens_per_step, first * tokens_per_step
        shown: dict[str, str] = {}
        with tqdm(total=total, initial=initial, unit="tok", unit_scale=True) as bar:
            for step in range(first + 1, recipe.last_step + 1):
                best = manager.best_step() if manager.latest_step() == step - 1 else None
                if best is not None and step - 1 - best >= PATIENCE * steps_per_checkpoint:
                    break
                state, loss = _train_step(recipe, state, start.frozen, next(rows))
                if step % _STEPS_PER_REPORT == 0:
                    shown |= {"step": str(step), "loss": f"{float(loss):.3f}"}
                    bar.set_postfix(shown, refresh=False)
                bar.update(tokens_per_step)
                if step < recipe.last_step and step % steps_per_checkpoint:
                    continue
                metrics = None
                if measured is not None:
                    metrics = {_MEASURED: measured(model(state)), _BEFORE: -step}
                    found = f"Step {step}: {metrics[_MEASURED]:.3f} mean accepted tokens."
                    bar.write(found, file=sys.stderr)
                arguments = ocp.args.StandardSave(state._asdict())
                manager.save(step, args=arguments, metrics=metrics, force=True)
        manager.wait_until_finished()
        if measured is not None:
            state = _restored(manager, recipe, begun, manager.best_step())
    return model(state)


def steps_done(directory: Path) -> int:
    """Steps of the newest checkpoint in a directory that `train` writes to; 0 without one."""
    if not directory.is_dir():
        return 0
    with ocp.CheckpointManager(directory.absolute()) as manager:
        return manager.latest_step() or 0


def _manager(directory: Path, *, is_measured: bool) -> ocp.CheckpointManager:
    """A manager that keeps the newest checkpoint, to continue from, and the best one."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    if is_measured:
        measure = operator.itemgetter(_MEASURED, _BEFORE)
        kept = [managers.LatestN(1), managers.BestN(get_metric_fn=measure, n=1)]
        policy = managers.AnyPreservationPolicy(kept)
        options = ocp.CheckpointManagerOptions(best_fn=measure, preservation_policy=policy)
    return ocp.CheckpointManager(directory.absolute(), options=options)


def _restored(
    manager: ocp.CheckpointManager, recipe: Recipe, begun: Callable[[], TrainingState],
    step: int | None,
) -> TrainingState:  # fmt: skip
    """A checkpoint, of the shapes that a fresh state has; such a state if there is none."""
    if step is None:
        return begun()
    if step > recipe.last_step:
        raise FlyJaxError(
            f"{manager.directory} holds a checkpoint of step {step} and a run of "
            f"{recipe.last_step} steps was asked for; give another directory, or more steps."
        )
    shapes = jax.eval_shape(lambda: begun()._asdict())
    return TrainingState(**manager.restore(step, args=ocp.args.StandardRestore(shapes)))
