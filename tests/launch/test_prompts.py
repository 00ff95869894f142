from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fly_jax.evaluation.problems import is_correct
from fly_jax.launch.inputs import built_in_prompts, read_prompts


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"one\ntwo {x}\n\n three\r\n", ["one", "two {x}", " three"]),
        (b'{"prompt": "one\\ntwo", "id": 7}\r\n{"prompt": "three"}', ["one\ntwo", "three"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        (b'\xef\xbb\xbf\n{"prompt": "\xc3\xa9"}\n', ["\u00e9"]),
    ],
)
def test_files(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    assert [prompt.text for prompt in read_prompts(str(file), skip_bad=False)] == texts


def test_the_name_tells_that_lines_are_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('plain\n{"prompt": "x"}\n')
    prompts = read_prompts(str(file), skip_bad=True)
    assert [prompt.source for prompt in prompts] == [f"{file}, line 2"]
    assert "line 1" in capsys.readouterr().err


def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\n\xff\n")))
    assert [prompt.text for prompt in read_prompts("-", skip_bad=True)] == ["one"]
    assert "Standard input, line 2" in capsys.readouterr().err


def test_built_in_prompts_are_held_out_and_the_same_every_time() -> None:
    prompts = built_in_prompts()
    assert prompts == built_in_prompts()
    problems = [prompt.problem for prompt in prompts if prompt.problem is not None]
    assert len(problems) == 8
    assert 1 <= len(prompts) - len(problems) <= 2
    for problem in problems:
        assert is_correct(problem, problem.solution)
