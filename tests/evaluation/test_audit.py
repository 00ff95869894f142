"""An audit as a file, and what it comes to: figures counted by hand from a few lines."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from refusals import sentence

from fly_jax.evaluation import audit_file
from fly_jax.evaluation.audit_file import Audit, Continuation, Mismatch, Run, read_audit
from fly_jax.evaluation.audit_summary import CLASSES, summarise, table, token_class

RUN = Run("fly & margin", "top_3", {"window_size": 6, "num_prompts": 4})
MISMATCH = Mismatch(
    prompt=0, position=1, draft_id=1, draft_text=" big", choice_id=2, choice_text=" large",
    draft_probability=0.25, choice_probability=0.5, entropy=0.7, entropy_measure="top_3",
    window="held", refused_by=None, rule="fly & margin", regret=0.5, budget_left=None,
    context="before",
)  # fmt: skip
CONTINUATION = Continuation(
    prompt=0, prompt_text="Ada", token_ids=[5, 6, 7, 8], token_texts=list("abc."), why="mrcb",
    choice_probabilities=[0.9] * 4, entropies=[0.1] * 4, text="is 12", answer="12",
    finish_reason="stop", num_rounds=2, exact_text="is 12", exact_answer="12",
)  # fmt: skip
DIGITS = replace(MISMATCH, position=2, draft_text="4", choice_text="5", draft_probability=0.0)
MARKS = replace(MISMATCH, prompt=1, position=3, draft_text="+", choice_text="_x")
MISMATCHES = [
    MISMATCH, replace(DIGITS, regret=None, refused_by="gate", window=None),
    replace(MISMATCH, prompt=1, position=0, regret=1.0, draft_probability=0.75),
    replace(MISMATCH, prompt=1, draft_text=" Ada", choice_text=" she", window="completed"),
    replace(MARKS, window="failed", refused_by="window"),
]  # fmt: skip
CONTINUATIONS = [
    CONTINUATION, replace(CONTINUATION, prompt=1, text="is 13", answer="13"),
    replace(CONTINUATION, prompt=2, text="is", answer=None, finish_reason="length"),
    replace(CONTINUATION, prompt=3, exact_text=None, exact_answer=None),
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = io.StringIO()
    audit_file.write_run(file, RUN)
    for one in CONTINUATIONS:
        audit_file.write_prompt(file, [of for of in MISMATCHES if of.prompt == one.prompt], one)
    path = tmp_path / "audit.jsonl"
    path.write_text(file.getvalue(), encoding="utf-8")
    return path


def test_what_is_written_is_what_is_read(path: Path) -> None:
    assert read_audit(path) == Audit(RUN, MISMATCHES, dict(enumerate(CONTINUATIONS)), None)
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    first, second = ["rescue", "refusal", "prompt"], ["rescue", "rescue", "refusal", "prompt"]
    assert events == ["run", *first, *second, "prompt", "prompt"]


def test_figures(path: Path) -> None:
    summary = summarise(read_audit(path))
    assert (summary.prompts, summary.tokens, summary.rescues) == (4, 16, 3)
    assert (summary.rescues_per_100_tokens, summary.regret) == (18.75, 2.0)
    first, second = summary.pairs
    assert (first.draft, first.choice, first.count, first.kind) == (" big", " large", 2, "words")
    assert (first.mean_regret, first.mean_draft_probability) == (0.75, 0.5)
    assert (second.draft, second.kind, second.count) == (" Ada", "capitalised", 1)
    counts = {name: (one.rescues, one.refusals) for name, one in summary.classes.items()}
    few = {"digits": (0, 1), "capitalised": (1, 0), "identifiers": (0, 1)}
    assert counts == few | {"words": (2, 0)}
    assert (summary.windows, summary.windows_failed) == ({"held": 2, "completed": 1}, 1)
    assert summary.refusals == {"gate": 1, "window": 1}
    assert (summary.compared, summary.texts_differ) == (3, 2)
    assert (summary.answered, summary.answers_differ) == (2, 1)
    shown = table(summary, 1)
    assert "' big'" in shown
    assert "' Ada'" not in shown
    assert "and 1 more" in shown
    assert json.loads(json.dumps(asdict(summary)))["rescues_per_100_tokens"] == 18.75


def test_classes() -> None:
    kinds = {
        " 12": "digits", "x1": "digits", "\n": "white space", " Ada": "capitalised",
        " was": "words", "self_": "identifiers", "maxSize": "identifiers", " ==": "operators",
        ").": "punctuation", "\ufffd": "punctuation", "é": "words",
    }  # fmt: skip
    assert {text: token_class(text) for text in kinds} == kinds
    assert set(kinds.values()) <= set(CLASSES)


def test_final_answers() -> None:
    answers = {
        "So 3 + 4 = 7.\nAnswer: 1,234": "1234", "It is -2.5.": "-2.5", "1,2,3": "3",
        "$18,000.00": "18000",
    }  # fmt: skip
    answers |= {"one\n two \n\n": "two", "": ""}
    assert {text: audit_file.final_answer(text) for text in answers} == answers


FEW = "1 of 4 prompts"


@pytest.mark.parametrize(
    ("lines", "left_out", "prompts", "words"),
    # In the last line; and what Ctrl-C leaves, of which the number of prompts alone says so.
    [(10, 1, 3, "breaks off"), (10, 40, 3, "breaks off"), (6, 0, 1, FEW), (4, 0, 1, FEW)],
)
def test_a_stopped_run(path: Path, lines: int, left_out: int, prompts: int, words: str) -> None:
    data = b"".join(path.read_bytes().splitlines(keepends=True)[:lines])
    path.write_bytes(data[: len(data) - left_out])
    audit = read_audit(path)
    assert list(audit.continuations) == [*range(prompts)]
    assert {one.prompt for one in audit.mismatches} <= audit.continuations.keys()
    assert words in audit.warning


@pytest.mark.parametrize(("line", "change", "words"), [
    (0, {"version": 2}, ["version 2", "version 1"]), (1, {"window": "open"}, ["line 2", "window"]),
    (0, {"format": "else"}, ["no audit"]), (1, {"surplus": 1}, ["line 2", "surplus"]),
    (0, {"event": "prompt"}, ["no audit"]), (1, {"position": 4}, ["line 4", "not of this prompt"]),
    (1, {"event": "rescued"}, ["line 2", "rescued"]), (1, {"regret": "much"}, ["line 2", "regret"]),
    (1, {"position": True}, ["line 2", "position"]), (3, {"why": "mrc"}, ["line 4", "token_ids"]),
    (3, {"token_texts": ["a", "b", "c", 4]}, ["line 4", "token_texts"]),
])  # fmt: skip
def test_damage_is_named(path: Path, line: int, change: dict[str, Any], words: list[str]) -> None:
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | change)
    path.write_text("\n".join(lines) + "\n")
    text = sentence(read_audit, path)
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"prompt\n", b"[1]\n", b"\xff\xfe\n", b'{"prompt": "a"}\n', b"NaN\n"]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other.jsonl").write_bytes(data)
    assert sentence(read_audit, tmp_path / "other.jsonl")


def test_whether_a_path_can_be_written_leaves_nothing_there(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    audit_file.check_writable(path)
    assert path.read_bytes() == before
    audit_file.check_writable(tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()
