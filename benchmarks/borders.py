"""Counts the borders that a prompt crosses between files, from the command to the printed text.

    python benchmarks/borders.py

A border is a file from which a function of another file is called, and that file. What runs while
a file is imported does not count, nor what is called within `PROGRAMS`, which compiles into the
programs.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType

from absl import app

import fly_jax
from fly_jax.launch.__main__ import main

PACKAGE = Path(fly_jax.__file__).parent
PROGRAMS = (
    "decoding/deferral.py", "decoding/dispatch.py", "decoding/drafters/", "decoding/programs.py",
    "decoding/round.py", "decoding/settling.py", "decoding/state.py", "models/attention.py",
    "models/cache.py", "models/llama.py", "verification/data.py",
    "verification/evidence.py", "verification/reductions.py", "verification/rules/",
    "verification/sampling.py",
)  # fmt: skip


@functools.cache
def _name(file: str) -> str | None:
    """A file's path within the package, if it is there."""
    path = Path(file).resolve()
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


class Borders:
    """Notes each pair of files of which one calls the other."""

    def __init__(self) -> None:
        """Nothing has been called."""
        self.seen: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """To be given to `sys.setprofile`."""
        called = _name(frame.f_code.co_filename) if event == "call" else None
        if called is None or frame.f_code.co_name == "<module>":
            return
        caller, outer = None, frame.f_back
        while outer is not None:
            name = _name(outer.f_code.co_filename)
            if name is not None and outer.f_code.co_name == "<module>":
                return  # an import
            caller, outer = caller or name, outer.f_back
        if caller is None or caller == called:
            return
        if not (caller.startswith(PROGRAMS) or called.startswith(PROGRAMS)):
            self.seen.add((caller, called))


def run(_: list[str]) -> None:
    """Decodes a prompt and prints the borders."""
    borders = Borders()
    sys.setprofile(borders)
    status = main(["--prompt=import os", "--max_new_tokens=4"])
    sys.setprofile(None)
    for caller, called in sorted(borders.seen):
        print(f"{caller} -> {called}")
    files = {name for border in borders.seen for name in border}
    print(f"{len(borders.seen)} borders between {len(files)} files")
    sys.exit(status)


if __name__ == "__main__":
    app.run(run)
