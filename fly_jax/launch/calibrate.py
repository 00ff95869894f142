"""The command calibrate: fills a memory of corrections for the rule csd."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fly_jax.decoding.config import DecodeConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags
from fly_jax.launch.prompts import Prompt, read_prompts

if TYPE_CHECKING:  # JAX is imported only when the flags and the prompts are good
    from absl.flags import FlagValues

_HELP = """\
python -m fly_jax.launch calibrate --prompts_file FILE --memory OUT [flags]

Continues the prompts exactly and counts which draft token the target puts which of its own in the
place of. The rule csd then keeps what was corrected often and matters little. A run that was
interrupted goes on where it was when it is started again.

Examples:
  python -m fly_jax.launch calibrate --prompts_file prompts.jsonl --memory corrections.npz
  python -m fly_jax.launch --rule csd --memory corrections.npz --prompts_file questions.jsonl

{flags}
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command.

    Raises:
      FlyJaxError: anything wrong with the flags, the files, the prompts or the models.
      KeyboardInterrupt: with the way to go on.
    """
    flags = _flags()
    values = flags.parse(arguments)
    if values.help:
        print(_HELP.format(flags=flags.help()))
        return
    for name, what in (("prompts_file", "prompts to learn from"), ("memory", "file to fill")):
        if getattr(values, name) is None:
            raise FlyJaxError(f"calibrate needs the {what}; give --{name}.")
    if values.target is not None and values.draft is None:
        raise FlyJaxError(
            "--target was given without --draft, and without a draft model there is nothing to "
            "correct; give --draft."
        )
    prompts = read_prompts(values.prompts_file, lambda error: _refuse(values, error))
    try:
        _calibrate(values, prompts)
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["python", "-m", "fly_jax.launch", "calibrate", *arguments])
        raise KeyboardInterrupt(f"Go on where it was with: {again}") from interrupt


def _flags() -> Flags:
    flags = Flags("calibrate")
    group = "Models"
    flags.string(group, "target", None, "folder or hub id of the model whose text is wanted")
    flags.string(group, "draft", None, "folder or hub id of the model that proposes")
    flags.string(group, "mesh", "1x1", "devices along each axis, such as 8x8")
    flags.choice(
        group, "dtype", None, ("float32", "bfloat16"),
        "type of weights and caches; if not given, float32 for the pair that ships with the "
        "package and bfloat16 for others",
    )  # fmt: skip
    group = "Calibration"
    flags.string(
        group, "prompts_file", None,
        "a prompt on each line, as plain text or as a JSON object with prompt; - is standard input",
    )  # fmt: skip
    flags.boolean(group, "skip_bad_prompts", "warn of a bad line in the file and go on")
    flags.string(group, "memory", None, "where the memory goes; one that was begun is continued")
    flags.integer(
        group, "num_speculative_tokens", DecodeConfig().most_drafted,
        "draft tokens of a round (K)", lower_bound=1,
    )  # fmt: skip
    flags.integer(group, "max_new_tokens", 128, "most tokens to add to a prompt", lower_bound=1)
    flags.integer(group, "batch_size", 1, "prompts decoded together", lower_bound=1)
    flags.boolean(group, "help", "show this")
    return flags


def _calibrate(values: FlagValues, prompts: list[Prompt]) -> None:
    from fly_jax.sharding.mesh import parse_mesh, prepare_devices

    prepare_devices(parse_mesh(values.mesh))  # before anything below can start a JAX backend

    from fly_jax.decoding.decoder import check_prompt
    from fly_jax.decoding.pair import load_pair
    from fly_jax.evaluation.calibration import begin_memory, fill_memory
    from fly_jax.models.checkpoint import check_checkpoint
    from fly_jax.models.loading import embedded_pair, resolve
    from fly_jax.models.tokenizer import load_tokenizer

    folder = embedded_pair()[0] if values.target is None else resolve(values.target)
    model, tokenizer = check_checkpoint(folder), load_tokenizer(folder)
    if values.num_speculative_tokens >= model.max_context:
        raise FlyJaxError(
            f"num_speculative_tokens is {values.num_speculative_tokens} and the model's context is "
            f"{model.max_context}; give a smaller number."
        )
    fitting: list[list[int]] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        try:
            check_prompt(ids, model, name=prompt.source)
        except FlyJaxError as error:
            _refuse(values, error)
        else:
            fitting.append(ids)
    if not fitting:
        raise FlyJaxError("No prompt is left; give at least one that fits the model's context.")
    path = Path(values.memory)
    # A file that will not do is refused before the weights are read.
    begin_memory(
        path, tokenizer.digest, fitting, values.num_speculative_tokens, values.max_new_tokens
    )
    pair = load_pair(
        None if values.target is None else folder, values.draft, mesh=values.mesh,
        dtype=values.dtype,
    )  # fmt: skip
    memory = fill_memory(
        pair,
        fitting,
        path,
        num_speculative_tokens=values.num_speculative_tokens,
        max_new_tokens=values.max_new_tokens,
        batch_size=values.batch_size,
    )
    _say(f"{path} counts {len(memory)} pairs.")


def _refuse(values: FlagValues, error: FlyJaxError) -> None:
    """Raises the error, or only says it where bad prompts are to be skipped."""
    if not values.skip_bad_prompts:
        raise error
    _say(f"Skipped: {error}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
