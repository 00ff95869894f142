from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest
from launch_types import Captured, Patch, Refused

from fly_jax.launch import generate
from fly_jax.launch.__main__ import COMMANDS, main


def test_an_unknown_command_is_told_which_exist(refused: Refused) -> None:
    refused("genrate", words=["genrate", *COMMANDS])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_ours_alone(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    text, said = capsys.readouterr()
    assert said == ""
    assert "Examples:" in text
    for foreign in ("--pdb", "--logtostderr", "--flagfile", "absl"):
        assert foreign not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_names_every_flag_of_generate(capsys: Captured) -> None:
    main(["--help"])
    text = capsys.readouterr().out
    for flag in ("target", "draft", "mesh", "rule", "num_speculative_tokens", "entropy_threshold",
                 "window_size", "prompt", "prompts_file", "max_new_tokens", "temperature", "seed",
                 "batch_size", "config", "compare", "json", "dtype"):  # fmt: skip
        assert f"  --{flag}" in text


def test_interruption(monkeypatch: Patch, capsys: Captured) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "main", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


def launched(flag: str, out: int | IO[str] = subprocess.PIPE) -> tuple[int, str | None, str]:
    """How the command ends as a process, and what it writes."""
    command = [sys.executable, "-m", "fly_jax.launch", flag]
    finished = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True
    )
    return finished.returncode, finished.stdout, finished.stderr


def test_process_refuses_without_a_traceback() -> None:
    sentence = "generate has no flag --promt; did you mean --prompt.\n"
    assert launched("--promt=x") == (2, "", sentence)


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        assert launched("--help", pipe) == (141, None, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_said_in_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        status, _, said = launched("--help", full)
    assert status == 2
    assert said.startswith("standard output could not be read or written (No space")
    assert said.count("\n") == 1
