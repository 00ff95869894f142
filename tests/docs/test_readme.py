"""What the README says has been run: every command and every Python block in it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fly_jax.launch import inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import built_in_prompts
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [
    command.strip()
    for language, block in BLOCKS
    if language == "bash"
    for command in re.split("\n|&&", block.strip())
    if not command.strip().startswith(("pip install", "pytest"))  # which CI itself does
]
LAUNCH, PROMPTS = "python -m fly_jax.launch", ["import os\n", "def main():\n", "class Path:\n"]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs a command in a folder with the files that the README names, and returns its output."""

    def ran(command: str) -> str:
        # So compiled, and on simulated devices, a round takes long.
        if "/train.py " not in command and "--max_new_tokens" not in command:
            command += " --max_new_tokens 24"
        prompts = PROMPTS if "answers.jsonl" in command else PROMPTS[:1]
        monkeypatch.setattr(inputs, "built_in_prompts", lambda: built_in_prompts()[:2])
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (tmp_path / "prompts.jsonl").write_text("".join(lines))
        for name in ("configs", "recipes"):
            (tmp_path / name).symlink_to(ROOT / name)
        for size, folder in zip(("405B", "8B"), EMBEDDED_PAIR, strict=True):
            command = command.replace(f"/models/Llama-3.1-{size}-Instruct", str(folder))
        command = command.replace("--mesh 8x8", "--mesh 2x4")  # what can be had here
        # In a process, as a reader would: what a shell has a part in.
        if not command.startswith(LAUNCH) or ">" in shlex.split(command):
            command = re.sub(r"^python ", f"{sys.executable} ", command)
            there = {**os.environ, "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
            given = {"cwd": tmp_path, "env": there, "capture_output": True, "text": True}
            done = subprocess.run(command, shell=True, **given)
            status, out, err = done.returncode, done.stdout, done.stderr
        else:
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("NO_COLOR", "1")
            status = main(shlex.split(command.removeprefix(LAUNCH)))
            out, err = capsys.readouterr()
        assert status == 0, err
        assert "Traceback" not in err
        return out

    return ran


def test_the_readme_has_the_commands_that_are_run_below() -> None:
    assert LAUNCH in COMMANDS
    assert len(COMMANDS) >= 8
    for word in ("plan", "recipes/embedded_pair/train.py"):
        assert len([one for one in COMMANDS if f" {word} " in one]) == 1


# tests/planning/test_compiled_plans.py makes the README's plan, which takes the TPU compiler long.
@pytest.mark.parametrize("command", [one for one in COMMANDS if " plan " not in one])
def test_command_runs(command: str, run: Callable[[str], str], tmp_path: Path) -> None:
    trains = "/train.py " in command
    printed = run(f"{command} --model tokenizer" if trains else command)
    if trains:
        assert list(tmp_path.rglob("tokenizer.model"))
    elif "answers.jsonl" in command:
        lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == PROMPTS
    else:
        assert printed.strip()


def test_the_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for language, block in BLOCKS if language == "python"]
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
