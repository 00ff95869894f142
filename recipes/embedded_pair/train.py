"""Trains the pair that ships with the package: tokenizer, target and draft.

    python recipes/embedded_pair/train.py --directory runs/embedded_pair

The tokenizer is trained if there is none yet. A run that was interrupted goes on where it was when
it is started again. On two CPU cores the target takes about an hour when nothing else runs.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import optax
from absl import app, flags
from jaxtyping import Array, Float
from pair_rows import PROBLEM_SHARE, batches
from pair_tokenizer import train_tokenizer

from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.checkpoints.write import WEIGHTS, save_hf
from fly_jax.models.llama import Llama
from fly_jax.training.trainer import Recipe, Row, bfloat16_matmul, seen_within, steps_done, train

_MODEL = flags.DEFINE_enum("model", "all", ["all", "target", "draft", "tokenizer"], "what to train")
_DIRECTORY = flags.DEFINE_string(
    "directory", "runs/embedded_pair", "where checkpoints and results go"
)
_STEPS = flags.DEFINE_integer(
    "num_steps", None, "optimiser steps of a model; the recipe's if not given", lower_bound=1
)
_TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json")


def next_token_loss(
    config: LlamaConfig, parameters: dict[str, Array], row: Row
) -> Float[Array, ""]:
    """Cross entropy of what comes next, in nats, averaged by weight, within a token's segment."""
    model, tokens = Llama(config, parameters), jnp.asarray(row.tokens)
    given = tokens[:, :-1], jnp.asarray(row.positions)[:, :-1], seen_within(row)
    logits = model.logits(model.uncached_and_inputs(*given, bfloat16_matmul)[0], bfloat16_matmul)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * row.weights) / jnp.sum(row.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairRecipe(Recipe):
    """One model of the pair, and its training run.

    Attributes:
      problem_share: share of the rows that begin with word problems.
      taste: style of their solutions; None if every wording is as likely as the others.
    """

    problem_share: float = PROBLEM_SHARE
    taste: int | None = None
    loss: Callable[[LlamaConfig, dict[str, Array], Row], Array] = next_token_loss


VOCAB_SIZE = 2048

TARGET = PairRecipe(
    config=LlamaConfig(
        vocab_size=VOCAB_SIZE,
        embed_size=384,
        ffw_size=1280,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_size=48,
        max_context=1024,
        tied_embeddings=True,
    ),
    num_steps=2400,
    decay_share=0.35,
    learning_rate=0.004,
    seed=1,
)

DRAFT = PairRecipe(
    config=LlamaConfig(
        vocab_size=VOCAB_SIZE,
        embed_size=128,
        ffw_size=448,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        max_context=1024,
        tied_embeddings=True,
    ),
    num_steps=1600,
    # Chosen on development text: later the draft solves most problems too, earlier it knows less of
    # the library.
    stop_step=1250,
    learning_rate=0.006,
    seed=2,
    # What a small model prefers to say is not what a large one does, and it is no specialist.
    problem_share=0.6,
    taste=7,
)

RECIPES = {"target": TARGET, "draft": DRAFT}


def train_pair(model: str, directory: Path, num_steps: int | None = None) -> None:
    """Trains what is not there yet, and says where it is.

    Args:
      model: "target", "draft", "tokenizer" or "all".
      directory: takes checkpoints and results.
      num_steps: of each model; None for those of its recipe.
    """
    tokenizer = directory / "tokenizer"
    if not all((tokenizer / name).exists() for name in _TOKENIZER_FILES):
        print("Training the tokenizer ...", file=sys.stderr)
        train_tokenizer(tokenizer, VOCAB_SIZE)
    if model == "tokenizer":
        print(f"The tokenizer is in {tokenizer}.", file=sys.stderr)
        return
    for name in RECIPES if model == "all" else (model,):
        recipe = RECIPES[name]
        if num_steps is not None:
            recipe = dataclasses.replace(recipe, num_steps=num_steps, stop_step=None)
        folder, checkpoints = directory / name / "hf", directory / name / "checkpoints"
        is_written = all((folder / file).exists() for file in (*_TOKENIZER_FILES, WEIGHTS))
        if is_written and steps_done(checkpoints) == recipe.last_step:
            print(f"The {name} has had its {recipe.last_step} steps.", file=sys.stderr)
        else:
            print(f"Training the {name} for {recipe.last_step} steps ...", file=sys.stderr)
            save_hf(train(recipe, _rows(recipe, tokenizer), checkpoints), folder)
            for file in _TOKENIZER_FILES:
                shutil.copy(tokenizer / file, folder / file)
        print(f"The {name} is in {folder}.", file=sys.stderr)


def _rows(recipe: PairRecipe, tokenizer: Path) -> functools.partial[Iterator[Row]]:
    """The rows of each step, from one on."""
    return functools.partial(
        batches,
        tokenizer / _TOKENIZER_FILES[0],
        recipe.seed,
        recipe.batch_size,
        row_length=recipe.row_length,
        problem_share=recipe.problem_share,
        taste=recipe.taste,
    )


def main(arguments: list[str]) -> None:
    """Runs the script."""
    if len(arguments) > 1:
        raise app.UsageError(f"'{arguments[1]}' is no flag; see --help.")
    try:
        train_pair(_MODEL.value, Path(_DIRECTORY.value), _STEPS.value)
    except KeyboardInterrupt:
        sys.exit(f"Go on where it was with: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    app.run(main)
