from __future__ import annotations

import os
import subprocess
import sys

import pytest
from launch_types import Captured, Patch, Refused

from fly_jax.launch import generate
from fly_jax.launch.__main__ import COMMANDS, main

LAUNCH = [sys.executable, "-m", "fly_jax.launch"]


def test_an_unknown_command_is_told_which_exist(refused: Refused) -> None:
    refused("genrate", words=["genrate", *COMMANDS])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_ours_alone(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Examples:" in captured.out
    for foreign in ("--pdb", "--logtostderr", "--flagfile", "absl"):
        assert foreign not in captured.out
    assert max(map(len, captured.out.splitlines())) <= 100


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


def test_process_refuses_without_a_traceback() -> None:
    finished = subprocess.run(
        [*LAUNCH, "--promt=x"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == "generate has no flag --promt; did you mean --prompt.\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        finished = subprocess.run(
            [*LAUNCH, "--help"], stdout=pipe, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
    assert finished.stderr == b""
    assert finished.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_said_in_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        finished = subprocess.run(
            [*LAUNCH, "--help"], stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
    assert finished.returncode == 2
    assert finished.stderr.startswith(b"standard output could not be read or written (No space")
    assert finished.stderr.count(b"\n") == 1
