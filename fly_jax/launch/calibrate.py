"""The command calibrate: fills a memory of corrections for the rule csd."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fly_jax.decoding.config import DecodeConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, add_model_flags, add_prompt_flags
from fly_jax.launch.joining import add_process_flags, joined
from fly_jax.launch.prompts import Prompt
from fly_jax.launch.reading import Reading, load, prompts_of_file, read, say

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
    try:
        with joined(values):
            _run(values)
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["python", "-m", "fly_jax.launch", "calibrate", *arguments])
        raise KeyboardInterrupt(f"Go on where it was with: {again}") from interrupt


def _flags() -> Flags:
    flags = Flags("calibrate")
    add_model_flags(flags)
    group = "Calibration"
    add_prompt_flags(flags, group)
    flags.string(group, "memory", None, "where the memory goes; one that was begun is continued")
    flags.integer(
        group, "num_speculative_tokens", DecodeConfig().most_drafted,
        "draft tokens of a round (K)", lower_bound=1,
    )  # fmt: skip
    add_process_flags(flags)
    flags.boolean("Output", "help", "show this")
    return flags


def _run(values: FlagValues) -> None:
    """What each process does. Only the first one reads prompts and is heard."""
    from fly_jax.sharding.processes import process_id, together

    def prompts() -> list[Prompt]:
        return prompts_of_file(values) if process_id() == 0 else []

    config = DecodeConfig(rule="exact", num_speculative_tokens=values.num_speculative_tokens)
    _fill(values, config, read(values, config, together(prompts)))


def _fill(values: FlagValues, config: DecodeConfig, reading: Reading) -> None:
    from fly_jax.evaluation.calibration import begin_memory, fill_memory
    from fly_jax.models.identity import identity
    from fly_jax.models.loading import embedded_pair, resolve
    from fly_jax.sharding.processes import process_id, share, together

    def models() -> str:
        if process_id() != 0:
            return ""
        draft = embedded_pair()[1] if values.draft is None else resolve(values.draft)
        return " ".join([identity(reading.target), identity(draft), str(values.dtype)])

    path, which = Path(values.memory), share(together(models))
    sizes = (values.num_speculative_tokens, values.max_new_tokens)
    # A file that will not do is refused before the weights are read.
    begin_memory(path, reading.tokenizer.digest, reading.ids, *sizes, which)
    memory = fill_memory(
        load(values, config, reading),
        reading.ids,
        path,
        num_speculative_tokens=values.num_speculative_tokens,
        max_new_tokens=values.max_new_tokens,
        batch_size=values.batch_size,
        models=which,
    )
    say(f"{path} counts {len(memory)} pairs.")
