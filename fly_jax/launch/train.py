"""The command train: makes a small drafter for a model, its teacher."""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, add_prompt_flags
from fly_jax.launch.inputs import encode_prompts, load_opened, read_prompts, say
from fly_jax.sharding.mesh import parse_mesh, prepare_devices

_HELP = """\
python -m fly_jax.launch train --teacher MODEL --prompts_file FILE [flags]

Makes a small drafter for a model, the teacher: the teacher continues the prompts, and the drafter
learns what the teacher expects, token by token. A run that was interrupted goes on where it was
when it is started again.

Examples:
  python -m fly_jax.launch train --teacher model.gguf --prompts_file prompts.jsonl --batch_size 32
  python -m fly_jax.launch train --teacher MODEL --prompts_file prompts.txt --num_layers 2

{flags}
"""

_DIRECTORY = "runs/drafter"
# Says what the answers in the directory are answers to.
_KEY = "answers_to.json"


def main(arguments: Sequence[str]) -> None:
    """Runs the command.

    Raises:
      FlyJaxError: a flag or a file that will not do, or a directory with another run.
      KeyboardInterrupt: with the way to go on.
    """
    flags = _flags()
    values = flags.parse(arguments)
    if values.help:
        print(_HELP.format(flags=flags.help()))
        return
    try:
        _distil(values)
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["python", "-m", "fly_jax.launch", "train", *arguments])
        raise KeyboardInterrupt(f"Go on where it was with: {again}") from interrupt


def _flags() -> Flags:
    into, group = Flags("train"), "Training"
    into.string(
        group, "teacher", None,
        "folder, GGUF file or hub id of the model to make a drafter for, of any size and tokenizer",
    )  # fmt: skip
    into.string(group, "directory", _DIRECTORY, "where answers, checkpoints and the drafter go")
    into.integer(group, "num_steps", 2000, "optimiser steps of the drafter", lower_bound=1)
    into.string(group, "mesh", "1x1", "where the teacher lies, such as 8x8")
    into.choice(
        group, "dtype", None, ("float32", "bfloat16", "int8"), "of the teacher; the fastest "
        "here if not given",
    )  # fmt: skip
    into.number(group, "temperature", 0.0, "of the teacher's answers; 0 is greedy")
    into.integer(
        group, "draft_vocab_size", 8192,
        "rows of the drafter's embedding: its own vocabulary is the teacher's most frequent tokens",
        lower_bound=2,
    )  # fmt: skip
    into.integer(group, "embed_size", 256, "width of the drafter, a multiple of 128", lower_bound=1)
    into.integer(group, "num_layers", 4, "layers of the drafter", lower_bound=1)
    into.integer(group, "seed", 0, "of the first weights, the data and the draws", lower_bound=0)
    into.boolean(group, "help", "show this")
    add_prompt_flags(into, group)
    return into


def _distil(values: FlagValues) -> None:
    """Has the teacher continue prompts, reads along, and trains the drafter on what it said."""
    _check(values)
    prompts = read_prompts(values.prompts_file, skip_bad=values.skip_bad_prompts)
    mesh = parse_mesh(values.mesh)
    prepare_devices(mesh, 1)

    import jax.numpy as jnp

    from fly_jax.decoding.pair import open_pair
    from fly_jax.engine.engine import Engine
    from fly_jax.models.checkpoints.load import carry_tokenizer, save_hf
    from fly_jax.models.checkpoints.source import identity
    from fly_jax.training import distillation
    from fly_jax.training.trainer import steps_done, train

    opened = open_pair(values.teacher)
    _, ids = encode_prompts(values, prompts, opened)
    directory = Path(values.directory)
    _claim(directory, {
        "teacher": identity(opened.target.path),
        "dtype": values.dtype or opened.default_dtype,
        "prompts_file": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        **{name: values[name].value for name in ("temperature", "max_new_tokens", "seed")},
    })  # fmt: skip
    config = DecodingConfig(rule="autoregressive", temperature=values.temperature)
    rows = min(values.batch_size, len(ids))
    longest = max(map(len, ids)) + values.max_new_tokens
    pair = load_opened(values, config, opened, mesh, rows=rows, longest=longest)
    documents = distillation.continued(
        Engine.of(
            pair,
            config,
            prompts=ids,
            max_new_tokens=values.max_new_tokens,
            num_slots=rows,
            with_texts=False,
        ),
        ids,
        directory / "continuations.jsonl",
        max_new_tokens=values.max_new_tokens,
        seed=values.seed,
    )
    heard = distillation.expected(
        pair.target, documents, directory / "expected", length=distillation.ROW_LENGTH + 1
    )
    shape = pair.target.config
    own, share = distillation.frequent_tokens(heard, shape.vocab_size, values.draft_vocab_size)
    say(
        f"{sum(len(one.answer) for one in documents)} tokens of answers to {len(ids)} prompts; the "
        f"drafter knows {len(own.known)} of {shape.vocab_size} tokens, which are {share:.1%} of "
        "the answers."
    )
    recipe = distillation.drafter_recipe(
        shape, own, embed_size=values.embed_size, num_layers=values.num_layers,
        num_steps=values.num_steps, seed=values.seed,
    )  # fmt: skip
    checkpoints = directory / f"checkpoints_{values.num_layers}x{values.embed_size}x{own.num_rows}"
    if steps_done(checkpoints) == recipe.last_step:
        say(f"The drafter has had its {recipe.last_step} steps; nothing was left to train.")
    embedding = distillation.first_embedding(pair.target, own, values.embed_size)
    trained = train(
        recipe,
        functools.partial(distillation.batches, heard, own, recipe),
        checkpoints,
        known={"embedding": jnp.asarray(embedding)},
    )
    made = distillation.for_teacher(trained, own, shape)
    folder = directory / "hf"
    save_hf(made, folder)
    carry_tokenizer(opened.target.path, opened.target.source, folder)
    say(f"The drafter is in {folder}: give --draft {directory}.")


def _check(values: FlagValues) -> None:
    from fly_jax.training.distillation import HEAD_SIZE, HEADS_PER_KV_HEAD

    if values.teacher is None:
        raise FlyJaxError(
            "No --teacher was given, and train makes a drafter for one; give the model's folder, "
            "GGUF file or hub id."
        )
    if values.prompts_file is None:
        raise FlyJaxError(
            "--teacher was given without prompts for it to continue; give --prompts_file."
        )
    if values.embed_size % (HEAD_SIZE * HEADS_PER_KV_HEAD):
        raise FlyJaxError(
            f"--embed_size is {values.embed_size}; the drafter has heads of {HEAD_SIZE} in pairs: "
            f"give a multiple of {HEAD_SIZE * HEADS_PER_KV_HEAD}."
        )
    if values.temperature < 0:
        raise FlyJaxError(f"--temperature is {values.temperature}; give 0 or more.")


def _claim(directory: Path, wanted: dict[str, object]) -> None:
    """Makes the directory this run's, or finds that it is."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / _KEY
    text = json.dumps(wanted, indent=2) + "\n"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        before = json.loads(file.read_bytes())
        name = next(name for name, value in wanted.items() if before.get(name) != value)
        raise FlyJaxError(
            f"{directory} holds the answers of a run with another --{name}; give another "
            "--directory, or remove that one."
        )
    file.write_text(text, encoding="utf-8")
