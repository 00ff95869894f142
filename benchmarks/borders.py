"""Counts the borders that a prompt crosses between files, from the command to the printed text.

    python benchmarks/borders.py

A border is a file from which a function of another is called, and that other; imports do not count.
Three counts: with nothing exempt, outside of tracing, and of these between files of the host.
"""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from types import FrameType

import machine

import fly_jax
from fly_jax.launch.__main__ import main

PACKAGE = Path(fly_jax.__file__).parent
# While this runs, JAX traces a function into a program. No prompt crosses the borders within: they
# are crossed once for a shape, whatever is asked, and what runs then is one program without files.
TRACING = "jax/_src/interpreters/partial_eval.py"
# What the programs are made of. The host hands these files a structure, a rule or a state, and
# reads them as mathematics; the way of a prompt is what happens between the other files.
PROGRAMS = (
    "decoding/deferral.py", "decoding/drafters/", "decoding/programs.py", "decoding/round.py",
    "decoding/state.py", "models/attention.py",
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
    """For `sys.setprofile`: notes which file calls which, and if it only does while JAX traces."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], bool] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        called = _name(frame.f_code.co_filename) if event == "call" else None
        if called is None or frame.f_code.co_name == "<module>":
            return
        caller, outer, is_traced = None, frame.f_back, False
        while outer is not None:
            name = _name(outer.f_code.co_filename)
            if name is not None and outer.f_code.co_name == "<module>":
                return  # an import
            is_traced |= outer.f_code.co_filename.endswith(TRACING)
            caller, outer = caller or name, outer.f_back
        if caller is not None and caller != called:
            self.seen[caller, called] = is_traced and self.seen.get((caller, called), True)


def run() -> None:
    """Decodes a prompt and prints the borders."""
    borders = Borders()
    threading.setprofile(borders)  # programs are traced in threads
    sys.setprofile(borders)
    status = main(["--prompt=import os", "--max_new_tokens=4"])
    sys.setprofile(None)
    crossed = [one for one, is_traced in borders.seen.items() if not is_traced]
    host = [one for one in crossed if not any(file.startswith(PROGRAMS) for file in one)]
    print(*sorted(" -> ".join(one) for one in host), sep="\n")
    for kind, some in {"in all": borders.seen, "crossed": crossed, "of the host": host}.items():
        print(f"{len(some)} borders between {len(set().union(*some))} files {kind}")
    sys.exit(status)


if __name__ == "__main__":
    machine.run(run)
