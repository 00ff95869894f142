"""docs/audit.md: its commands and its block run, and it names what there is."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

import fly_jax
from fly_jax.evaluation.audit import Mismatch
from fly_jax.evaluation.audit_summary import CLASSES
from fly_jax.launch import generate, inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import built_in_prompts

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_every_block_is_tested_here() -> None:
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert BLOCKS.keys() == {"bash", "text", "python"}


def test_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two of the built-in prompts, enough for --prompt 2, and without the comparison."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "built_in_prompts", lambda: built_in_prompts()[:2])
    monkeypatch.setattr(generate, "_compare", lambda *_: None)
    printed = []
    for line in BLOCKS["bash"].splitlines():
        python, module, name, *arguments = shlex.split(line)
        assert (python, module, name) == ("python", "-m", "fly_jax.launch")
        assert main(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[2]
    # What is shown on the page has the form of what is printed now.
    form = re.compile(r"[\d.]+|\s+")
    shown = [form.sub("", line) for line in BLOCKS["text"].splitlines()]
    now = [form.sub("", line) for line in printed[1].splitlines()]
    assert shown[:3] == now[:3]
    for heading in ("classrescued", "draftkept"):
        assert {line for line in shown if line.startswith(heading)} == {
            line for line in now if line.startswith(heading)
        }
    assert "Prompt 2" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS["python"], "audit.md", "exec"), {})
    assert "nats" in capsys.readouterr().out
    assert set(re.findall(r"fly_jax\.(\w+)", BLOCKS["python"])) <= set(fly_jax.__all__)


def test_the_keys_and_classes_are_those_of_the_file() -> None:
    cells = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in dataclasses.fields(Mismatch)}
    listed = BLOCKS["text"].split("class ")[1].split("\n\n")[0].splitlines()[1:]
    for line in listed:
        name = next(name for name in CLASSES if line.startswith(name))
        assert line.endswith(CLASSES[name])
