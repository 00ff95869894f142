"""Word problems that the embedded pair solves, and the check of an answer.

Their wording is free and their numbers are determined; `recipes/embedded_pair` makes them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

BUILT_IN = Path(__file__).parents[1] / "models" / "embedded" / "problems.jsonl"
_ANSWER = re.compile(r"^\W*Answer:[^\w\n.\u2212-]*(-?\d[\d,]*+)(?!\.\d)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt, one wording of its solution (with a leading space), and the number asked for."""

    prompt: str
    solution: str
    answer: str


def built_in_problems() -> list[Problem]:
    """The eight problems of the package, on which no model of the pair was trained."""
    lines = BUILT_IN.read_text(encoding="utf-8").splitlines()
    return [Problem(**json.loads(line)) for line in lines]


def extract_answer(text: str) -> str | None:
    """The number on the first answer line of a text, if it has one."""
    found = _ANSWER.search(text)
    return found[1].replace(",", "") if found else None


def is_correct(problem: Problem, text: str) -> bool:
    """Tells whether a text, cut at its end, gives the number that the problem asks for."""
    return extract_answer(text) == problem.answer
