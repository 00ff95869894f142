"""The Python standard library as training text.

The sources are read from the running interpreter, whose version they depend on, and nothing of
them is stored here. They are Copyright (c) 2001 Python Software Foundation, under the PSF License
Agreement version 2.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path

from word_problems import Split, split_of

CHUNK_CHARACTERS = 1500
# A module with a longer line is a table rather than a program.
_LONGEST_LINE = 200

_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_pyrepl",
        "encodings",
        "ensurepip",
        "idlelib",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)

# Where a text may be cut, best first: before a class or a function of the module, before a method,
# after a blank line, after any line.
_BOUNDARIES = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^(?=(?:@|class |def |async def ))",
        r"^(?= {4}(?:@|class |def |async def ))",
        r"(?<=\n\n)(?=.)",
        r"(?<=\n)(?=.)",
    )
)


def _chunks(text: str, depth: int = 0) -> list[str]:
    """A text in pieces of at most `CHUNK_CHARACTERS`, as few as the boundaries allow."""
    if len(text) <= CHUNK_CHARACTERS or depth == len(_BOUNDARIES):
        return [text]
    chunks: list[str] = []
    for block in _BOUNDARIES[depth].split(text):
        if chunks and len(chunks[-1]) + len(block) <= CHUNK_CHARACTERS:
            chunks[-1] += block
        else:
            chunks.extend(_chunks(block, depth + 1))
    return chunks


@functools.cache
def _sources(library: Path) -> tuple[tuple[str, str], ...]:
    """The name and the text of every module that reads like a program, in order of name."""
    sources: list[tuple[str, str]] = []
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        if _SKIPPED_FOLDERS.intersection(module.parts) or module.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if all(len(line) <= _LONGEST_LINE for line in text.splitlines()):
            sources.append((module.as_posix(), text))
    return tuple(sources)


def documents(split: Split) -> list[str]:
    """The chunks of the library's modules of a split; a module lies in one split as a whole.

    Modules copy from each other: a chunk that occurs again counts only where it came first, so
    that it cannot stand in two splits.

    Args:
      split: which modules.
    """
    owners: dict[str, Split] = {}
    for module, text in _sources(Path(sysconfig.get_path("stdlib"))):
        for chunk in _chunks(text):
            owners.setdefault(chunk.rstrip(), split_of(module))
    return [chunk for chunk, owner in owners.items() if chunk and owner == split]
