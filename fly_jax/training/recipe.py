"""The training run: resumable through Orbax, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from absl import logging
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama
from fly_jax.training.dataset import Row
from fly_jax.training.pair import Recipe
from fly_jax.training.step import TrainingState, initial_state, train_step

_STEPS_PER_REPORT = 10


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
      recipe: the model and its run.
      batches: what it learns from, from a step on.
      directory: takes the checkpoints.
      known: parameters that do not begin at random.
      steps_per_checkpoint: steps from one checkpoint to the next.

    Returns:
      The trained model.

    Raises:
      FlyJaxError: the newest checkpoint is beyond the run's last step.
    """
    options = ocp.CheckpointManagerOptions(save_interval_steps=steps_per_checkpoint, max_to_keep=2)
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        state = _restore(manager, recipe, known)
        start = int(state.step)
        rows = batches(start)
        tokens_per_step = recipe.batch_size * recipe.row_length
        with tqdm(
            total=recipe.last_step * tokens_per_step,
            initial=start * tokens_per_step,
            unit="tok",
            unit_scale=True,
        ) as bar:
            for step in range(start, recipe.last_step):
                state, loss = train_step(recipe, state, *next(rows))
                if (step + 1) % _STEPS_PER_REPORT == 0:
                    bar.set_postfix(step=step + 1, loss=f"{float(loss):.3f}", refresh=False)
                bar.update(tokens_per_step)
                manager.save(
                    step + 1,
                    args=ocp.args.StandardSave(state._asdict()),
                    force=step + 1 == recipe.last_step,
                )
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
    fresh = initial_state(recipe, known)
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
