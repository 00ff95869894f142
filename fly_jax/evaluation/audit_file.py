"""The file of an audit: JSON objects, line by line.

The first line describes the run; then, for each prompt that is done, come its mismatches in the
order of the text and after them the continuation itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TypeVar

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.mismatches import Continuation, Mismatch, Run

FORMAT = "fly_jax audit"
VERSION = 1

_Line = TypeVar("_Line", Run, Mismatch, Continuation)


@dataclasses.dataclass
class Audit:
    """A file that has been read, of the prompts that are done.

    Attributes:
      continuations: by index of the prompt.
      warning: what is missing at its end; None if it is whole.
    """

    run: Run
    mismatches: list[Mismatch] = dataclasses.field(default_factory=list)
    continuations: dict[int, Continuation] = dataclasses.field(default_factory=dict)
    warning: str | None = None


def write_run(file: IO[str], run: Run) -> None:
    """Writes the first line."""
    file.write(_line("run", run))
    file.flush()


def write_prompt(file: IO[str], mismatches: Sequence[Mismatch], continuation: Continuation) -> None:
    """Writes all of one prompt at once, so that a run that is stopped leaves whole prompts."""
    lines = [_line("rescue" if one.is_rescue else "refusal", one) for one in mismatches]
    file.write("".join(lines) + _line("prompt", continuation))
    file.flush()


def _line(event: str, value: Run | Mismatch | Continuation) -> str:
    return json.dumps({"event": event, **dataclasses.asdict(value)}, allow_nan=False) + "\n"


def check_writable(path: Path) -> None:
    """Refuses a path where no audit can be written; leaves what is there as it is.

    Raises:
      FlyJaxError: it cannot be written, or holds something that is no audit.
    """
    existed = os.path.lexists(path)
    try:
        with path.open("ab+") as file:
            file.seek(0)
            start = file.readline(4096)
        if not existed:
            path.unlink()
    except OSError as error:
        raise FlyJaxError(
            f"The audit {path} cannot be written ({error.strerror or error}); correct the path."
        ) from error
    if start and f'"format": "{FORMAT}"'.encode() not in start:
        raise FlyJaxError(
            f"{path} is there already and is no audit, which would be written over it; give "
            "another file, or delete this one."
        )


def read_audit(path: Path) -> Audit:
    """Reads an audit. What a run that was stopped did not finish is left out, with a warning.

    Raises:
      FlyJaxError: it cannot be read, or is no audit of this version.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FlyJaxError(
            f"The audit {path} cannot be read ({error.strerror}); correct the path."
        ) from error
    cut = lines.pop()  # after the last line's end there is nothing
    records = [_record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    audit = Audit(_run(path, records))
    waiting: list[Mismatch] = []
    for number, record in records[1:]:
        event = record.pop("event", None)
        if event in ("rescue", "refusal"):
            waiting.append(_made(Mismatch, record, path, number))
        elif event == "prompt":
            one = _made(Continuation, record, path, number)
            _check_continuation(one, waiting, path, number)
            if one.prompt in audit.continuations:
                raise _damaged(path, number, f"prompt {one.prompt} was there before")
            audit.mismatches += waiting
            audit.continuations[one.prompt] = one
            waiting = []
        else:
            raise _damaged(path, number, f"its event is {event!r}")
    found, total = len(audit.continuations), audit.run.settings.get("num_prompts")
    if cut.strip() or waiting or (isinstance(total, int) and found < total):
        of_all = "" if total is None else f" of {total}"
        audit.warning = (
            f"{path} breaks off: the run was stopped when {found}{of_all} prompts were written; "
            "the others are left out."
        )
    return audit


def _record(path: Path, number: int, line: bytes) -> tuple[int, dict[str, Any]]:
    try:
        record = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, number, "it is not valid JSON") from error
    if not isinstance(record, dict):
        raise _damaged(path, number, "it is no JSON object")
    return number, record


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _run(path: Path, records: Sequence[tuple[int, dict[str, Any]]]) -> Run:
    number, first = records[0] if records else (1, {})
    if first.pop("event", None) != "run" or first.get("format") != FORMAT:
        raise FlyJaxError(
            f"{path} is no audit; give a file that python -m fly_jax.launch --audit FILE has "
            "written."
        )
    if first.get("version") != VERSION:
        raise FlyJaxError(
            f"{path} is an audit of version {first.get('version')!r} and this program reads "
            f"version {VERSION}; write it again with this program, or read it with the one that "
            "wrote it."
        )
    return _made(Run, first, path, number)


def _made(kind: type[_Line], record: Mapping[str, Any], path: Path, number: int) -> _Line:
    """A line as an object, once its fields are there and of their types."""
    for name, wanted in typing.get_type_hints(kind).items():
        if name not in record:
            raise _damaged(path, number, f"it lacks {name}")
        if not _is(record[name], wanted):
            raise _damaged(path, number, f"its {name} is {json.dumps(record[name])[:40]}")
    unknown = sorted(set(record) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise _damaged(path, number, f"it has {unknown[0]!r}, which is unknown")
    return kind(**record)


def _is(value: object, wanted: Any) -> bool:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return value in arguments
    if origin in (types.UnionType, typing.Union):
        return any(_is(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is(one, arguments[0]) for one in value)
    if isinstance(value, bool):
        return False
    if wanted is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, origin or wanted)


def _check_continuation(
    one: Continuation, mismatches: Sequence[Mismatch], path: Path, number: int
) -> None:
    parts = (one.token_texts, one.why, one.choice_probabilities, one.entropies)
    if any(len(part) != len(one.token_ids) for part in parts) or set(one.why) - set("mrcb"):
        raise _damaged(path, number, "its lists do not fit its token_ids")
    for mismatch in mismatches:
        if mismatch.prompt != one.prompt or not 0 <= mismatch.position < len(one.token_ids):
            raise _damaged(path, number, "the lines before it are not of this prompt")


def _damaged(path: Path, number: int, reason: str) -> FlyJaxError:
    return FlyJaxError(
        f"{path}, line {number} is damaged: {reason}; write the audit again, or delete the line."
    )
