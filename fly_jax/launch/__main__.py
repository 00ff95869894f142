"""The entry: it picks the command, and turns whatever goes wrong for the user into one line."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import logging

from fly_jax.errors import FlyJaxError, file_trouble
from fly_jax.launch import crash_handler
from fly_jax.launch.crash_handler import EXIT_FAILED, EXIT_WRONG_INPUT

# Each is a module of this package, imported only when asked for. Its `main(arguments)` raises
# FlyJaxError for whatever is wrong with flags, files and models.
COMMANDS = {
    "generate": "continue prompts, and compare the rules (the default)",
    "chat": "talk to an instruct model in the terminal",
    "serve": "answer requests over HTTP, with the endpoints of OpenAI's API, and a page to try it",
    "convert": "write a checkpoint in a format that loads under any mesh, or as int8",
    "plan": "memory and speed of a pair on a slice of chips, without the slice",
    "bench": "speed of several decodings on the same prompts, in turns; or of any server",
    "evaluate": "quality of several decodings on the same items of tasks, and what each retains",
    "report": "what bench and evaluate measured as one page: speed beside quality, paired",
    "calibrate": "fill the memory of corrections that the rule csd looks things up in",
    "audit": "sum up what generate --audit wrote of every mismatch, or show it as a page",
    "train": "make a head that drafts for a model",
}

_USAGE = """\
python -m fly_jax.launch [command] [flags]

Commands:
{commands}

Each has its own --help.
"""

_EXIT_INTERRUPTED = 128 + 2  # SIGINT
_EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE


def main(arguments: Sequence[str]) -> int:
    """Runs a command; 0, 2 for wrong input, 130 after Ctrl-C, 141 where the reader went away."""
    logging.set_verbosity(logging.ERROR)  # what libraries say of their own work is not for users
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started it has closed it
            setattr(sys, name, Path(os.devnull).open(mode, errors="replace"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # a locale without the character is no reason to stop
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = EXIT_FAILED
    try:
        status = _status(list(arguments))
    finally:
        if crash_handler.installed is not None:
            crash_handler.installed.shutdown(status)
    return status


def _status(arguments: list[str]) -> int:
    try:
        _run_command(arguments)
        sys.stdout.flush()
    except FlyJaxError as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_INPUT
    except SystemExit as ended:  # of the help with 0
        if ended.code:
            raise
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted. {interrupt}".rstrip(), file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return _EXIT_BROKEN_PIPE
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = "The device's memory is full ({}); give fewer rows (--batch_size or --num_slots), "
        more = "shorter texts, --dtype int8 or a larger --mesh; the command plan tells what fits."
        print(said.format(" ".join(str(error).split())[:200]) + more, file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        _drop_output()
        print(file_trouble(error), file=sys.stderr)
        return EXIT_WRONG_INPUT
    return 0


def _drop_output() -> None:
    """Drops buffered output that cannot be written; Python would complain about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(arguments: list[str]) -> None:
    command = "generate"
    if arguments and not arguments[0].startswith("-"):
        command = arguments.pop(0)
    if command == "help":
        width = max(map(len, COMMANDS))
        listed = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        print(_USAGE.format(commands=listed))
        return
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise FlyJaxError(f"There is no command '{command}'; the commands are {known}.")
    importlib.import_module(f"fly_jax.launch.{command}").main(arguments)


def run() -> NoReturn:
    """Runs the console script."""
    # Tracing makes many objects and little garbage: Python would look for it most of a second.
    gc.set_threshold(100_000, 20, 50)
    status = main(sys.argv[1:])
    gc.freeze()  # nor as long at the end of the process
    if status == _EXIT_INTERRUPTED:
        # XLA's threads go on, and would crash in an interpreter that is being taken down.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
