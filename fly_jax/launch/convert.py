"""The command convert: writes a checkpoint in Orbax's format, quantised if wanted."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, flag_group
from fly_jax.parameters import parameter

_HELP = """\
python -m fly_jax.launch convert --target MODEL --output FOLDER [flags]

Writes a Hugging Face checkpoint as Orbax checkpoints, one for each layer, which load under any
mesh: give the folder as --target or --draft. It needs memory for one layer at a time. A conversion
that was interrupted goes on where it stopped when the same command is run again.

Examples:
  python -m fly_jax.launch convert --target meta-llama/Llama-3.1-8B-Instruct --output llama-8b
  python -m fly_jax.launch convert --target ./llama-70b --output llama-70b-int8 --dtype int8
"""


@flag_group("Conversion")
class _ConvertFlags:
    target: str | None = parameter(None, "folder, GGUF file or hub id of the model to convert")
    revision: str | None = parameter(None, "branch, tag or commit of the hub id")
    output: str | None = parameter(None, "folder to write; new, or of an interrupted conversion")
    dtype: Literal["bfloat16", "bf16", "float32", "int8"] = parameter(
        "bfloat16",
        "type of the weights; bf16 is short for bfloat16, which is taken if not given; int8 has a "
        "scale for each output of a matrix",
        choices=("bfloat16", "bf16", "float32", "int8"),
    )


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("convert", _ConvertFlags).parse(arguments, _HELP)
    if not values.target or not values.output:
        name = "output" if values.target else "target"
        raise FlyJaxError(f"convert needs --{name}; see python -m fly_jax.launch convert --help.")
    if not os.environ.get("JAX_PLATFORMS"):  # no accelerator is needed, nor waited for
        jax.config.update("jax_platforms", "cpu")
    from fly_jax.models.checkpoints.source import resolve
    from fly_jax.models.checkpoints.write import convert  # starts JAX's own imports

    try:
        source = resolve(values.target, values.revision)
        dtype = "bfloat16" if values.dtype == "bf16" else values.dtype
        convert(source, Path(values.output).expanduser(), dtype)
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["python", "-m", "fly_jax.launch", "convert", *arguments])
        raise KeyboardInterrupt(f"Go on where it stopped with: {again}") from interrupt
    print(f"The converted model is in {values.output}.", file=sys.stderr)
