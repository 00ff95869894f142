"""The command train: makes the pair that ships with the package, or a drafter for a model."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fly_jax.launch.distil import add_distil_flags, check_without_teacher, distil
from fly_jax.launch.flags import Flags

_HELP = """\
python -m fly_jax.launch train [flags]
python -m fly_jax.launch train --teacher MODEL --prompts_file FILE [flags]

Trains the pair that ships with the package: the tokenizer if there is none yet, the target, then
the draft. With --teacher it makes a small drafter for that model instead: the teacher continues the
prompts, and the drafter learns what the teacher expects, token by token. A run that was interrupted
goes on where it was when it is started again.

Examples:
  python -m fly_jax.launch train
  python -m fly_jax.launch train --model draft --directory runs/small --num_steps 200
  python -m fly_jax.launch train --teacher model.gguf --prompts_file prompts.jsonl --batch_size 32

{flags}
"""

_DIRECTORY = "runs/embedded_pair"
_TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json")


def main(arguments: Sequence[str]) -> None:
    """Runs the command.

    Raises:
      FlyJaxError: a wrong flag.
      KeyboardInterrupt: with the way to go on.
    """
    flags = _flags()
    values = flags.parse(arguments)
    if values.help:
        print(_HELP.format(flags=flags.help()))
        return
    try:
        if values.teacher is not None:
            distil(values)
        else:
            check_without_teacher(values)
            _train(values.model, Path(values.directory or _DIRECTORY), values.num_steps)
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["python", "-m", "fly_jax.launch", "train", *arguments])
        raise KeyboardInterrupt(f"Go on where it was with: {again}") from interrupt


def _flags() -> Flags:
    flags = Flags("train")
    group = "Training"
    flags.choice(
        group, "model", "all", ("all", "target", "draft", "tokenizer"), "what to train; all if not "
        "given",
    )  # fmt: skip
    flags.string(
        group, "directory", None,
        "where checkpoints and results go; runs/embedded_pair, or runs/drafter with a teacher, if "
        "not given",
    )  # fmt: skip
    flags.integer(
        group, "num_steps", None, "optimiser steps of a model; those of the recipe, or 2000 for a "
        "drafter, if not given",
        lower_bound=1,
    )  # fmt: skip
    flags.boolean(group, "help", "show this")
    add_distil_flags(flags)
    return flags


def _train(model: str, directory: Path, num_steps: int | None) -> None:
    tokenizer = directory / "tokenizer"
    if not all((tokenizer / name).exists() for name in _TOKENIZER_FILES):
        _train_tokenizer(tokenizer)
    if model == "tokenizer":
        _say(f"The tokenizer is in {tokenizer}.")
        return
    # These start JAX's own imports, which the tokenizer does without.
    from fly_jax.models.checkpoints.load import WEIGHTS, save_hf
    from fly_jax.training.dataset import batches
    from fly_jax.training.pair import RECIPES
    from fly_jax.training.recipe import steps_done, train

    for name in RECIPES if model == "all" else (model,):
        recipe = RECIPES[name]
        if num_steps is not None:
            recipe = dataclasses.replace(recipe, num_steps=num_steps, stop_step=None)
        folder, checkpoints = directory / name / "hf", directory / name / "checkpoints"
        is_written = all((folder / file).exists() for file in (*_TOKENIZER_FILES, WEIGHTS))
        if is_written and steps_done(checkpoints) == recipe.last_step:
            _say(f"The {name} has had its {recipe.last_step} steps; nothing was left to do.")
            _say(f"The {name} is in {folder}.")
            continue
        _say(f"Training the {name} for {recipe.last_step} steps ...")
        rows = functools.partial(
            batches,
            tokenizer / _TOKENIZER_FILES[0],
            recipe.seed,
            recipe.batch_size,
            row_length=recipe.row_length,
            problem_share=recipe.problem_share,
            taste=recipe.taste,
        )
        save_hf(train(recipe, rows, checkpoints), folder)
        for file in _TOKENIZER_FILES:
            shutil.copy(tokenizer / file, folder / file)
        _say(f"The {name} is in {folder}.")


def _train_tokenizer(folder: Path) -> None:
    from fly_jax.training.pair import VOCAB_SIZE
    from fly_jax.training.tokenizer import train_tokenizer

    _say("Training the tokenizer ...")
    train_tokenizer(folder, VOCAB_SIZE)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
