"""The command train: makes a head that drafts for a model, its teacher."""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import DTYPES, Flags, ModelFlags, PromptFlags, flag_group
from fly_jax.launch.inputs import encode_prompts, load_opened, open_mesh, read_prompts, say
from fly_jax.parameters import parameter

if TYPE_CHECKING:
    from fly_jax.decoding.pair import Dtype

_HELP = """\
python -m fly_jax.launch train --teacher MODEL --prompts_file FILE [flags]

Makes a head that drafts for a model, the teacher: the teacher answers the prompts, and the head
learns what the teacher expects, token by token. A run that was interrupted goes on where it was
when it is started again.

Examples:
  python -m fly_jax.launch train --teacher model.gguf --prompts_file prompts.jsonl --batch_size 32
  python -m fly_jax.launch train --head pard --teacher MODEL --prompts_file prompts.txt
"""

# One of so many documents is held out, and at most so many in all.
_HELD_OUT_SHARE, _MOST_HELD_OUT = 16, 48


@flag_group("Training")
class _TrainFlags(PromptFlags):
    teacher: str | None = parameter(None, "folder, GGUF file or hub id to make a head for")
    head: Literal["eagle3", "pard", "dspark"] = parameter(
        "eagle3",
        "eagle3: a layer that reads the teacher's own; pard: a small model that drafts all tokens "
        "in one pass; dspark: layers that read the teacher's own and draft a block in one pass",
        choices=("eagle3", "pard", "dspark"),
    )
    directory: str = parameter("runs/head", "where answers, checkpoints and the head go")
    num_steps: int = parameter(2000, "optimiser steps", low=1)
    tokens_per_step: int = parameter(
        2048, "tokens of a step, in rows of 1024; 8192 suits an accelerator", low=1024
    )
    mesh: str = parameter("1x1", "where the teacher lies, such as 8x8")
    dtype: Dtype | None = parameter(
        None, "of the teacher; else float32 on CPUs and bfloat16 elsewhere", choices=DTYPES
    )
    temperature: float = parameter(0.0, "of the teacher's answers; 0 is greedy", low=0.0)
    draft_vocab_size: int = parameter(8192, "most frequent tokens, which the head knows", low=3)
    num_layers: int = parameter(2, "layers of a PARD drafter or a DSpark head", low=1)
    intermediate_size: int | None = parameter(
        None, "neurons of each layer's MLP, such as 2048; else the teacher's", low=1
    )
    seed: int = parameter(0, "of the data and the draws", low=0)


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("train", _TrainFlags).parse(arguments, _HELP)
    try:
        _make_head(values)
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["python", "-m", "fly_jax.launch", "train", *arguments])
        raise KeyboardInterrupt(f"Go on where it was with: {again}") from interrupt


def _make_head(values: _TrainFlags) -> None:
    if values.teacher is None:
        raise FlyJaxError(
            "No --teacher was given, and train makes a head for one; give the model's folder, GGUF "
            "file or hub id."
        )
    if values.prompts_file is None:
        raise FlyJaxError("--teacher was given without prompts to continue; give --prompts_file.")
    prompts = read_prompts(values.prompts_file, skip_bad=values.skip_bad_prompts)
    mesh = open_mesh(values.mesh)

    from fly_jax.decoding.pair import open_pair
    from fly_jax.engine.engine import Engine
    from fly_jax.models.checkpoints.source import identity
    from fly_jax.models.checkpoints.write import carry_tokenizer, save_hf
    from fly_jax.training import expectations, heads
    from fly_jax.training.trainer import steps_done, train

    opened = open_pair(values.teacher)
    if opened.target.config.draft_vocab_size is not None:
        raise FlyJaxError(
            f"--teacher={values.teacher} is a drafter that knows a part of its tokens; give a "
            "model that knows all of them."
        )
    most_layers = opened.target.config.num_layers
    if values.head != "eagle3" and values.num_layers > most_layers:
        raise FlyJaxError(
            f"--num_layers is {values.num_layers} and the teacher has {most_layers} layers, of "
            "which a head begins as some: give at most as many."
        )
    _, ids = encode_prompts(values, prompts, opened)
    directory = Path(values.directory).expanduser()
    dtype = values.dtype or opened.float_dtype  # whole texts are run, and those of floats
    _claim(directory, {
        "teacher": identity(opened.target.path),
        "dtype": dtype,
        "prompts_file": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "temperature": values.temperature,
        "max_new_tokens": values.max_new_tokens,
        "seed": values.seed,
    })  # fmt: skip
    config = DecodingConfig(rule="autoregressive", temperature=values.temperature)
    slots = min(values.batch_size, len(ids))
    longest = max(map(len, ids)) + values.max_new_tokens
    models = ModelFlags(dtype=dtype, weights_cache="off")
    pair = load_opened(models, config, opened, mesh, rows=slots, longest=longest)
    most, path = values.max_new_tokens, directory / "continuations.jsonl"
    engine = Engine.of(
        pair, config, prompts=ids, max_new_tokens=most, num_slots=slots, with_texts=False
    )
    documents = expectations.continued(engine, ids, path, max_new_tokens=most, seed=values.seed)
    del engine  # and its caches
    shape = pair.target.config
    layers = heads.layers_read(shape.num_layers)
    heard = expectations.expected(
        pair.target, documents, directory / "expected", expectations.ROW_LENGTH + 1, layers
    )
    number = min(values.draft_vocab_size, shape.vocab_size) - 1
    known, share = expectations.frequent_tokens(heard, shape.vocab_size, number)
    say(
        f"{sum(len(one.answer) for one in documents)} tokens of answers to {len(ids)} prompts; the "
        f"head knows {len(known)} of {shape.vocab_size} tokens, which are {share:.1%} of the "
        "answers."
    )
    own, start = heads.beginning(
        values.head, pair.target, known,
        num_layers=values.num_layers, intermediate_size=values.intermediate_size,
    )  # fmt: skip
    del pair
    recipe = heads.recipe_of(
        values.head, own,
        tokens_per_step=values.tokens_per_step, num_steps=values.num_steps, seed=values.seed,
    )  # fmt: skip
    sizes = f"{own.num_layers}_{own.ffw_size}_{len(known)}_{values.tokens_per_step}"
    checkpoints = directory / f"checkpoints_{values.head}_{sizes}"
    if steps_done(checkpoints) == recipe.last_step:
        say(f"The head has had its {recipe.last_step} steps; nothing was left to train.")
    # From all over the file, which may be sorted.
    places = range(0, len(heard), _HELD_OUT_SHARE)[:_MOST_HELD_OUT]
    held_out = [heard[at] for at in places]
    learned = [one for at, one in enumerate(heard) if at not in places] or heard
    made = train(
        recipe, functools.partial(expectations.batches, learned, recipe), checkpoints, start=start,
        measured=lambda one: heads.mean_accepted_tokens(values.head, one, held_out),
        steps_per_checkpoint=heads.steps_per_checkpoint(recipe),
    )  # fmt: skip
    folder = directory / values.head
    is_folder = Path(values.teacher).expanduser().exists()  # and a hub id may name a revision
    save_hf(made, folder, of=values.teacher if is_folder else values.teacher.partition("@")[0])
    carry_tokenizer(opened.target.path, opened.target.source, folder)
    say(f"The head is in {folder}: give --draft {folder}.")


def _claim(directory: Path, wanted: dict[str, object]) -> None:
    """Claims the directory for this run; FlyJaxError if it is another run's."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "answers_to.json"
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    try:
        before = json.loads(file.read_bytes())
        other = next((name for name, value in wanted.items() if before.get(name) != value), None)
    except (ValueError, AttributeError) as error:
        raise FlyJaxError(
            f"{file} is damaged; remove it if the run is the same, or give another --directory."
        ) from error
    if other is not None:
        also = " (or --chat, --system)" if other == "prompts_file" else ""
        raise FlyJaxError(
            f"{directory} holds the answers of a run with another --{other}{also}; give another "
            "--directory, or remove that one."
        )
