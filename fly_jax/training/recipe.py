"""The training run: resumable through Orbax, with a progress bar, ending in a HF checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from absl import logging
from tqdm import tqdm

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.load import save_hf
from fly_jax.models.llama import Llama
from fly_jax.training import dataset
from fly_jax.training.pair import Recipe
from fly_jax.training.step import TrainingState, initial_state, train_step

_STEPS_PER_REPORT = 10


def train(
    recipe: Recipe,
    tokenizer_model: Path,
    directory: Path,
    *,
    steps_per_checkpoint: int = 100,
) -> Path:
    """Trains one model of the pair, from the newest checkpoint in `directory` if there is one.

    The data are a function of the seed and the step, so an interrupted run continues as if it had
    not been: Ctrl-C loses at most `steps_per_checkpoint` steps.

    Args:
      recipe: the model and its run.
      tokenizer_model: the SentencePiece file of the pair.
      directory: takes `checkpoints/` and, at the end, `hf/`.
      steps_per_checkpoint: steps from one checkpoint to the next.

    Returns:
      The folder of the finished Hugging Face checkpoint, weights in bfloat16.

    Raises:
      FlyJaxError: the newest checkpoint is beyond the run's last step.
    """
    options = ocp.CheckpointManagerOptions(save_interval_steps=steps_per_checkpoint, max_to_keep=2)
    with ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options) as manager:
        state = _restore(manager, recipe)
        start = int(state.step)
        batches = dataset.batches(
            tokenizer_model,
            recipe.seed,
            recipe.batch_size,
            start_step=start,
            row_length=recipe.row_length,
            problem_share=recipe.problem_share,
            taste=recipe.taste,
        )
        tokens_per_step = recipe.batch_size * recipe.row_length
        with tqdm(
            total=recipe.last_step * tokens_per_step,
            initial=start * tokens_per_step,
            unit="tok",
            unit_scale=True,
        ) as bar:
            for step in range(start, recipe.last_step):
                batch = next(batches)
                state, loss = train_step(recipe, state, *batch)
                if (step + 1) % _STEPS_PER_REPORT == 0:
                    bar.set_postfix(step=step + 1, loss=f"{float(loss):.3f}", refresh=False)
                bar.update(tokens_per_step)
                manager.save(
                    step + 1,
                    args=ocp.args.StandardSave(state._asdict()),
                    force=step + 1 == recipe.last_step,
                )
    return export(recipe, state, directory / "hf")


def export(recipe: Recipe, state: TrainingState, folder: Path) -> Path:
    """Writes the parameters as a Hugging Face checkpoint in bfloat16."""
    save_hf(Llama(recipe.config, state.parameters), folder)
    return folder


def _restore(manager: ocp.CheckpointManager, recipe: Recipe) -> TrainingState:
    fresh = initial_state(recipe)
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
