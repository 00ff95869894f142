"""The prompts: from flags, from a file, or built in."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fly_jax.errors import FlyJaxError
from fly_jax.training.problems import Problem, problems

_BUILT_IN_PROBLEMS = 8
_BUILT_IN_SEED = 2511
_BUILT_IN_TEXT = "class Queue:\n    def __init__(self, maxsize=0):\n"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What to continue.

    Attributes:
      text: the prompt.
      source: where it comes from, as an error names it.
      problem: what the continuation can be checked against, if anything.
    """

    text: str
    source: str
    problem: Problem | None = None


def built_in_prompts() -> list[Prompt]:
    """Word problems that no model of the embedded pair was trained on, and a bit of code."""
    drawn = itertools.islice(problems(_BUILT_IN_SEED, "held_out"), _BUILT_IN_PROBLEMS)
    worded = [Prompt(problem.prompt, "A built-in prompt", problem) for problem in drawn]
    return [*worded, Prompt(_BUILT_IN_TEXT, "A built-in prompt")]


def prompts_from_flags(texts: list[str]) -> list[Prompt]:
    """The prompts of --prompt.

    Raises:
      FlyJaxError: one is empty or not UTF-8.
    """
    named = [Prompt(text, f"Prompt {index}") for index, text in enumerate(texts, 1)]
    for prompt in named:
        _check_text(prompt.text, prompt.source)
    return named


def read_prompts(path: str, bad: Callable[[FlyJaxError], None]) -> list[Prompt]:
    """The prompts of a file: an object with `prompt` on each line, or plain text line by line.

    A file has JSON lines if its name ends in .jsonl or .json, or its first line begins with "{".
    Lines of nothing but white space are passed over.

    Args:
      path: the file; "-" is standard input.
      bad: told of every line that is no prompt; it may raise.

    Raises:
      FlyJaxError: the file cannot be read, or has no prompt.
    """
    name = "Standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise FlyJaxError(
            f"The prompts file {path} cannot be read ({error.strerror}); correct the path."
        ) from error
    is_json = path.endswith((".jsonl", ".json")) or _unmarked(data).lstrip().startswith(b"{")
    found: list[Prompt] = []
    for source, line in _lines(name, data):
        try:
            text = _prompt_of(line, source) if is_json else _decoded(line, source)
            _check_text(text, source)
        except FlyJaxError as error:
            bad(error)
        else:
            found.append(Prompt(text, source))
    if not found:
        raise FlyJaxError(
            f"{name} has no prompt; write one on each line, as plain text or as a JSON object such "
            'as {"prompt": "Once upon a time"}.'
        )
    return found


def _unmarked(data: bytes) -> bytes:
    return data.removeprefix(b"\xef\xbb\xbf")


def _lines(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, each with the name of its place."""
    for number, line in enumerate(_unmarked(data).split(b"\n"), 1):
        if line.strip():
            yield f"{name}, line {number}", line.removesuffix(b"\r")


def _decoded(line: bytes, source: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FlyJaxError(
            f"{source}: byte {error.start + 1} is not valid UTF-8; save the file as UTF-8, or give "
            "--skip_bad_prompts."
        ) from error


def _prompt_of(line: bytes, source: str) -> str:
    text = _decoded(line, source)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "too deep, or too long a number")
        raise FlyJaxError(
            f"{source} is not valid JSON ({reason}); correct the line, or give --skip_bad_prompts."
        ) from error
    if not (isinstance(value, dict) and isinstance(value.get("prompt"), str)):
        raise FlyJaxError(
            f"{source} is not a JSON object with a text named prompt; write such as "
            '{"prompt": "Once upon a time"}, or give --skip_bad_prompts.'
        )
    return str(value["prompt"])


def _check_text(text: str, source: str) -> None:
    if not text:
        raise FlyJaxError(f"{source} is empty; decoding needs at least one token: give some text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of the command line, or half of a pair in JSON
        raise FlyJaxError(
            f"{source} holds a character that is not valid Unicode; give it as UTF-8."
        ) from error
