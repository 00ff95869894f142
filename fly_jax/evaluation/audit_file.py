"""An audit: the mismatches that a run kept or refused, the fate of each, and their file.

The file has JSON lines: the run, then of each prompt that is done its mismatches, in the order of
the text, and its continuation. This module needs no JAX: audits are read where models are not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

from fly_jax.errors import FlyJaxError

if TYPE_CHECKING:
    from fly_jax.decoding.reports import TokenReport
    from fly_jax.engine.request import Generation
    from fly_jax.models.tokenizer import Tokenizer

FORMAT = "fly_jax audit"
VERSION = 1
_CONTEXT_CHARACTERS = 48
# Fields of a `Mismatch` that a `TokenReport` has too.
_SAID = ("draft_id", "choice_id", "draft_probability", "choice_probability", "entropy")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

Window = Literal["held", "completed", "failed"]


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings that all prompts of an audit share; the event "run".

    Attributes:
      entropy_measure: the kind of entropy: "top_3" (over so many most probable tokens, in nats),
        "full" (over all tokens, in nats) or "normalized" ("full", divided by ln V).
      settings: of decoding, by their names as flags, and `num_prompts`, how many there were.
    """

    format: str = dataclasses.field(default=FORMAT, kw_only=True)
    version: int = dataclasses.field(default=VERSION, kw_only=True)
    rule: str
    entropy_measure: str
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A draft token that was not the target's own; the events "rescue" and "refusal".

    Probabilities are those of the target's plain softmax (with `truncate`, of what that leaves).

    Attributes:
      position: index in the continuation's tokens, from 0, as `prompt` is of the prompts.
      draft_text: what the draft token spells by itself.
      choice_id: the target's most probable token.
      window: the fate of the deferred window: "held" in its block, "completed" by a later block,
        "failed" in a later block, so that the row was rolled back and this token refused; None
        where it was refused at once, or the rule has no window.
      refused_by: "gate", "memory", "budget", "window", "boundary" or, for what no rule may keep,
        "always"; None for a rescue.
      regret: ln(choice_probability / draft_probability), in nats; None if it is infinite.
      budget_left: of the prompt's risk budget, after this rescue, in nats; None without a budget.
      context: the end of the text before it.
    """

    prompt: int
    position: int
    draft_id: int
    draft_text: str
    choice_id: int
    choice_text: str
    draft_probability: float
    choice_probability: float
    entropy: float
    entropy_measure: str
    window: Window | None
    refused_by: str | None
    rule: str
    regret: float | None
    budget_left: float | None
    context: str

    @property
    def is_rescue(self) -> bool:
        """Tells whether the draft token was kept."""
        return self.refused_by is None


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt, with the target's figures at each token; the event "prompt"."""

    prompt: int
    prompt_text: str
    token_ids: list[int]
    token_texts: list[str]  # what each adds to the text, control tokens by their names
    why: str  # a letter for each, as in `Why.letter`
    choice_probabilities: list[float]  # of the target's most probable token
    entropies: list[float]
    text: str  # without control tokens
    answer: str | None  # `final_answer` of the text; None if the limit cut it off
    finish_reason: str
    num_rounds: int
    exact_text: str | None  # of the target alone; None if that was not decoded
    exact_answer: str | None


def final_answer(text: str) -> str:
    """The last number in a text, as 18000 for 18,000.00; without one its last line."""
    if numbers := _NUMBER.findall(text):
        whole, point, part = str(numbers[-1]).replace(",", "").partition(".")
        return whole + (point + part).rstrip("0").rstrip(".")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def audited(
    index: int, prompt: str, generation: Generation, tokenizer: Tokenizer, run: Run, *,
    has_window: bool, budget: float | None = None, exact: Generation | None = None,
) -> tuple[list[Mismatch], Continuation]:  # fmt: skip
    """The events of one prompt; `has_window`: every rescue has a deferred window behind it."""
    ids, reports = generation.token_ids, generation.reports
    # After the prompt's last token, since some tokenizers drop the space that begins a text.
    texts = tokenizer.piece_texts([generation.prompt_token_ids[-1], *ids])[1:]
    mismatches: list[Mismatch] = []
    before, spent = prompt, 0.0
    for position, (report, text) in enumerate(zip(reports, texts, strict=True)):
        if report.why.letter in "rc" and report.draft_id is not None:
            assert report.draft_probability is not None
            assert report.regret is not None
            spent += report.regret if report.why.letter == "r" else 0
            window: Window | None = "held" if report.refused_by is None and has_window else None
            if report.deferred:
                window = "completed" if report.refused_by is None else "failed"
            one = Mismatch(
                **{name: getattr(report, name) for name in _SAID}, prompt=index, position=position,
                draft_text=tokenizer.token_text(report.draft_id),
                choice_text=tokenizer.token_text(report.choice_id),
                entropy_measure=run.entropy_measure, window=window, refused_by=refused_by(report),
                rule=run.rule, regret=report.regret if report.draft_probability > 0 else None,
                budget_left=None if budget is None else max(budget - spent, 0.0),
                context=before[-_CONTEXT_CHARACTERS:],
            )  # fmt: skip
            mismatches.append(one)
        before = (before + text)[-_CONTEXT_CHARACTERS:]
    text, answer = _ended(generation, tokenizer)
    exact_text, exact_answer = (None, None) if exact is None else _ended(exact, tokenizer)
    return mismatches, Continuation(
        prompt=index, prompt_text=prompt, token_ids=list(ids), token_texts=texts,
        why="".join(report.why.letter for report in reports),
        choice_probabilities=[report.choice_probability for report in reports],
        entropies=[report.entropy for report in reports], text=text, answer=answer,
        finish_reason=generation.finish_reason, num_rounds=generation.num_rounds,
        exact_text=exact_text, exact_answer=exact_answer,
    )  # fmt: skip


def _ended(generation: Generation, tokenizer: Tokenizer) -> tuple[str, str | None]:
    """A generation's text, and its answer if it came to its end."""
    text = tokenizer.decode(generation.token_ids, continues=True)
    return text, final_answer(text) if generation.finish_reason == "stop" else None


def refused_by(report: TokenReport) -> str | None:
    """The reason of a correction, as `Mismatch.refused_by` has it."""
    if report.refused_by is None:
        return None
    return report.refused_by.name.lower().removeprefix("refused").removeprefix("_") or "always"


_Line = TypeVar("_Line", Run, Mismatch, Continuation)


@dataclasses.dataclass
class Audit:
    """An audit that has been read, by index of the prompt; the warning says what is missing."""

    run: Run
    mismatches: list[Mismatch] = dataclasses.field(default_factory=list)
    continuations: dict[int, Continuation] = dataclasses.field(default_factory=dict)
    warning: str | None = None


def write_run(file: IO[str], run: Run) -> None:
    """Writes the first line."""
    file.write(_line("run", run))
    file.flush()


def write_prompt(file: IO[str], mismatches: Sequence[Mismatch], continuation: Continuation) -> None:
    """Writes a prompt's events at once, so that a run that is stopped leaves whole prompts."""
    lines = [_line("rescue" if one.is_rescue else "refusal", one) for one in mismatches]
    file.write("".join(lines) + _line("prompt", continuation))
    file.flush()


def _line(event: str, value: Run | Mismatch | Continuation) -> str:
    return json.dumps({"event": event, **dataclasses.asdict(value)}, allow_nan=False) + "\n"


def check_writable(path: Path) -> None:
    """Raises FlyJaxError where an audit cannot be written, or something else stands."""
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
    """Reads an audit; FlyJaxError if it cannot be read, or is none of this version.

    Prompts that a stopped run did not finish are left out, with a warning.
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
            parts = (one.token_texts, one.why, one.choice_probabilities, one.entropies)
            length = len(one.token_ids)
            if any(len(part) != length for part in parts) or set(one.why) - set("mrcb"):
                raise _damaged(path, number, "its lists do not fit its token_ids")
            if not all(of.prompt == one.prompt and 0 <= of.position < length for of in waiting):
                raise _damaged(path, number, "the lines before it are not of this prompt")
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
        record = json.loads(line, parse_constant=int)  # which refuses NaN and infinities
    except (ValueError, RecursionError) as error:
        raise _damaged(path, number, "it is not valid JSON") from error
    if not isinstance(record, dict):
        raise _damaged(path, number, "it is no JSON object")
    return number, record


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


_hints = functools.cache(typing.get_type_hints)


def _made(kind: type[_Line], record: Mapping[str, Any], path: Path, number: int) -> _Line:
    """A line as an object, once its fields are there and of their types."""
    for name, wanted in _hints(kind).items():  # type: ignore[arg-type]
        if name not in record:
            raise _damaged(path, number, f"it lacks {name}")
        if not _is(record[name], wanted):
            raise _damaged(path, number, f"its {name} is {json.dumps(record[name])[:40]}")
    if unknown := sorted(set(record) - {field.name for field in dataclasses.fields(kind)}):
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


def _damaged(path: Path, number: int, reason: str) -> FlyJaxError:
    return FlyJaxError(
        f"{path}, line {number} is damaged: {reason}; write the audit again, or delete the line."
    )
