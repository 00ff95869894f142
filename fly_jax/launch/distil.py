"""What train does with a teacher: makes a small drafter for it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from absl.flags import FlagValues

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, add_prompt_flags
from fly_jax.launch.inputs import encode_prompts, load_opened, read_prompts, say
from fly_jax.sharding.mesh import parse_mesh, prepare_devices

GROUP = "A drafter for a teacher"
_DIRECTORY = "runs/drafter"
# Says what the answers in the directory are answers to.
_KEY = "answers_to.json"


def add_distil_flags(into: Flags) -> None:
    """Adds the flags of a drafter for a teacher."""
    into.string(
        GROUP, "teacher", None,
        "folder, GGUF file or hub id of the model to make a drafter for, of any size and tokenizer",
    )  # fmt: skip
    into.string(GROUP, "mesh", "1x1", "where the teacher lies, such as 8x8")
    into.choice(
        GROUP, "dtype", None, ("float32", "bfloat16", "int8"), "of the teacher; the fastest "
        "here if not given",
    )  # fmt: skip
    into.number(GROUP, "temperature", 0.0, "of the teacher's answers; 0 is greedy")
    into.integer(
        GROUP, "draft_vocab_size", 8192,
        "rows of the drafter's embedding: its own vocabulary is the teacher's most frequent tokens",
        lower_bound=2,
    )  # fmt: skip
    into.integer(GROUP, "embed_size", 256, "width of the drafter, a multiple of 128", lower_bound=1)
    into.integer(GROUP, "num_layers", 4, "layers of the drafter", lower_bound=1)
    into.integer(GROUP, "seed", 0, "of the first weights, the data and the draws", lower_bound=0)
    add_prompt_flags(into, GROUP)


def distil(values: FlagValues) -> None:
    """Has the teacher continue prompts, reads along, and trains the drafter on what it said.

    Raises:
      FlyJaxError: a flag or a file that will not do, or a directory with another run.
    """
    _check(values)
    prompts = read_prompts(values.prompts_file, skip_bad=values.skip_bad_prompts)
    mesh = parse_mesh(values.mesh)
    prepare_devices(mesh, 1)

    import jax.numpy as jnp

    from fly_jax.decoding.pair import open_pair
    from fly_jax.models.checkpoints.convert import carry_tokenizer
    from fly_jax.models.checkpoints.identity import identity
    from fly_jax.models.checkpoints.load import save_hf
    from fly_jax.training import drafter, teacher
    from fly_jax.training.dataset import stacked
    from fly_jax.training.recipe import steps_done, train

    opened = open_pair(values.teacher)
    _, ids = encode_prompts(values, prompts, opened)
    directory = Path(values.directory or _DIRECTORY)
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
    documents = teacher.continued(
        pair.decoder(pair.spec(config), batch_size=rows),
        ids,
        directory / "continuations.jsonl",
        max_new_tokens=values.max_new_tokens,
        seed=values.seed,
    )
    heard = teacher.expected(
        pair.target, documents, directory / "expected", length=drafter.ROW_LENGTH + 1
    )
    shape = pair.target.config
    own, share = drafter.frequent_tokens(heard, shape.vocab_size, values.draft_vocab_size)
    say(
        f"{sum(len(one.answer) for one in documents)} tokens of answers to {len(ids)} prompts; the "
        f"drafter knows {len(own.known)} of {shape.vocab_size} tokens, which are {share:.1%} of "
        "the answers."
    )
    recipe = drafter.drafter_recipe(
        shape, own, embed_size=values.embed_size, num_layers=values.num_layers,
        num_steps=values.num_steps or 2000, seed=values.seed,
    )  # fmt: skip
    checkpoints = directory / f"checkpoints_{values.num_layers}x{values.embed_size}x{own.num_rows}"
    if steps_done(checkpoints) == recipe.last_step:
        say(f"The drafter has had its {recipe.last_step} steps; nothing was left to train.")
    embedding = drafter.first_embedding(pair.target, own, values.embed_size)
    trained = train(
        recipe,
        lambda step: stacked(
            drafter.distilled_rows(heard, own, recipe, step * recipe.batch_size), recipe.batch_size
        ),
        checkpoints,
        known={"embedding": jnp.asarray(embedding)},
    )
    made = drafter.for_teacher(trained, own, shape)
    folder = directory / "hf"
    save_hf(made, folder)
    carry_tokenizer(opened.target.path, opened.target.source, folder)
    say(f"The drafter is in {folder}: give --draft {directory}.")


def check_without_teacher(values: FlagValues) -> None:
    """Refuses flags of a teacher, where none was given.

    Raises:
      FlyJaxError: there is one.
    """
    names = Flags("")
    add_distil_flags(names)
    for name in names.values:
        if values[name].present:
            raise FlyJaxError(
                f"--{name} was given without --teacher, and is about a drafter for one; give "
                "--teacher as well, or leave it out."
            )


def _check(values: FlagValues) -> None:
    from fly_jax.training.drafter import HEAD_SIZE, HEADS_PER_KV_HEAD

    if values["model"].present:
        raise FlyJaxError(
            "--model was given with --teacher, and is about the pair that ships with the package; "
            "leave one of the two out."
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
