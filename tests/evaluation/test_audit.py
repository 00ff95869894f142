"""An audit as a file, and what it comes to: figures counted by hand from a few lines."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation import audit_file
from fly_jax.evaluation.audit_file import (
    Continuation,
    Mismatch,
    Run,
    check_writable,
    final_answer,
    read_audit,
)
from fly_jax.evaluation.audit_summary import CLASSES, summarise, table, token_class

SETTINGS = {"window_size": 6, "num_prompts": 4}
RUN = Run("fly & margin", "top_3", SETTINGS)


def mismatch(prompt: int, position: int, draft: str, choice: str, **changes: Any) -> Mismatch:
    plain = Mismatch(
        prompt=prompt, position=position, draft_id=1, draft_text=draft, choice_id=2,
        choice_text=choice, draft_probability=0.25, choice_probability=0.5, entropy=0.7,
        entropy_measure="top_3", window="held", refused_by=None, rule="fly & margin", regret=0.5,
        budget_left=None, context="before",
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def continuation(prompt: int, **changes: Any) -> Continuation:
    plain = Continuation(
        prompt=prompt, prompt_text="Ada", token_ids=[5, 6, 7, 8], token_texts=list("abc."),
        why="mrcb", choice_probabilities=[0.9] * 4, entropies=[0.1] * 4, text="is 12", answer="12",
        finish_reason="stop", num_rounds=2, exact_text="is 12", exact_answer="12",
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


REFUSED = {"refused_by": "gate", "window": None}
FIRST = [
    mismatch(0, 1, " big", " large"),
    mismatch(0, 2, "4", "5", regret=None, draft_probability=0.0, **REFUSED),
]
SECOND = [
    mismatch(1, 0, " big", " large", regret=1.0, draft_probability=0.75),
    mismatch(1, 1, " Ada", " she", window="completed"),
    mismatch(1, 3, "+", "_x", window="failed", refused_by="window"),
]
PROMPTS = [
    (FIRST, continuation(0)),
    (SECOND, continuation(1, text="is 13", answer="13")),
    ([], continuation(2, text="is", answer=None, finish_reason="length")),
    ([], continuation(3, exact_text=None, exact_answer=None)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = io.StringIO()
    audit_file.write_run(file, RUN)
    for mismatches, one in PROMPTS:
        audit_file.write_prompt(file, mismatches, one)
    path = tmp_path / "audit.jsonl"
    path.write_text(file.getvalue(), encoding="utf-8")
    return path


def test_what_is_written_is_what_is_read(path: Path) -> None:
    mismatches = [one for some, _ in PROMPTS for one in some]
    continuations = {index: one for index, (_, one) in enumerate(PROMPTS)}
    assert read_audit(path) == audit_file.Audit(RUN, mismatches, continuations, None)
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert events == ["run", "rescue", "refusal", "prompt", "rescue", "rescue", "refusal",
                      "prompt", "prompt", "prompt"]  # fmt: skip


def test_figures(path: Path) -> None:
    summary = summarise(read_audit(path))
    assert (summary.prompts, summary.tokens, summary.rescues) == (4, 16, 3)
    assert (summary.rescues_per_100_tokens, summary.regret) == (18.75, 2.0)
    first, second = summary.pairs
    assert (first.draft, first.choice, first.count, first.kind) == (" big", " large", 2, "words")
    assert (first.mean_regret, first.mean_draft_probability) == (0.75, 0.5)
    assert (second.draft, second.kind, second.count) == (" Ada", "capitalised", 1)
    counts = {name: (one.rescues, one.refusals) for name, one in summary.classes.items()}
    assert counts == {
        "digits": (0, 1), "capitalised": (1, 0), "identifiers": (0, 1), "words": (2, 0)
    }  # fmt: skip
    assert (summary.windows, summary.windows_failed) == ({"held": 2, "completed": 1}, 1)
    assert summary.refusals == {"gate": 1, "window": 1}
    assert (summary.compared, summary.texts_differ) == (3, 2)
    assert (summary.answered, summary.answers_differ) == (2, 1)
    shown = table(summary, 1)
    assert "' big'" in shown
    assert "' Ada'" not in shown
    assert "and 1 more" in shown
    assert json.loads(json.dumps(summary.to_dict()))["rescues_per_100_tokens"] == 18.75


def test_classes() -> None:
    kinds = {
        " 12": "digits", "x1": "digits", "\n": "white space", " Ada": "capitalised",
        " was": "words", "self_": "identifiers", "maxSize": "identifiers", " ==": "operators",
        ").": "punctuation", "\ufffd": "punctuation", "é": "words",
    }  # fmt: skip
    assert {text: token_class(text) for text in kinds} == kinds
    assert set(kinds.values()) <= set(CLASSES)


def test_final_answers() -> None:
    answers = {"So 3 + 4 = 7.\nAnswer: 1,234": "1234", "It is -2.5.": "-2.5", "1,2,3": "3"}
    answers |= {"one\n two \n\n": "two", "": ""}
    assert {text: final_answer(text) for text in answers} == answers


@pytest.mark.parametrize(
    ("lines", "left_out", "prompts", "words"),
    [
        (10, 1, 3, "breaks off"),  # in the middle of its last line: all other prompts are there
        (10, 40, 3, "breaks off"),
        (6, 0, 1, "1 of 4 prompts"),
        # What Ctrl-C leaves: only the number of prompts says that some are missing.
        (4, 0, 1, "1 of 4 prompts"),
    ],
)
def test_a_run_that_was_stopped(
    path: Path, lines: int, left_out: int, prompts: int, words: str
) -> None:
    data = b"".join(path.read_bytes().splitlines(keepends=True)[:lines])
    path.write_bytes(data[: len(data) - left_out])
    audit = read_audit(path)
    assert list(audit.continuations) == [*range(prompts)]
    assert {one.prompt for one in audit.mismatches} <= audit.continuations.keys()
    assert words in audit.warning


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (0, {"version": 2}, ["version 2", "version 1"]),
        (0, {"format": "else"}, ["no audit"]),
        (0, {"event": "prompt"}, ["no audit"]),
        (1, {"event": "rescued"}, ["line 2", "rescued"]),
        (1, {"regret": "much"}, ["line 2", "regret"]),
        (1, {"window": "open"}, ["line 2", "window"]),
        (1, {"position": 4}, ["line 4", "not of this prompt"]),
        (1, {"position": True}, ["line 2", "position"]),
        (1, {"surplus": 1}, ["line 2", "surplus"]),
        (3, {"why": "mrc"}, ["line 4", "token_ids"]),
        (3, {"token_texts": ["a", "b", "c", 4]}, ["line 4", "token_texts"]),
    ],
)
def test_damage_is_named(path: Path, line: int, change: dict[str, Any], words: list[str]) -> None:
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | change)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FlyJaxError) as caught:
        read_audit(path)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"prompt\n", b"[1]\n", b"\xff\xfe\n", b'{"prompt": "a"}\n', b"NaN\n"]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(data)
    with pytest.raises(FlyJaxError):
        read_audit(path)


def test_paths_that_cannot_be_written(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    check_writable(path)
    assert path.read_bytes() == before
    check_writable(tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for other, words in (
        (tmp_path, "cannot be written"),
        (tmp_path / "no" / "where", "cannot be written"),
        (tmp_path / "prompts.jsonl", "no audit"),
    ):
        with pytest.raises(FlyJaxError, match=words):
            check_writable(other)
