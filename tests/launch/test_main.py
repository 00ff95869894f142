"""The command line as a whole: its help, its ends, and how it shows text on a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import IO
from unittest.mock import Mock

import pytest
from launch_types import Patch, Ran, Refused

from fly_jax.launch import generate
from fly_jax.launch.__main__ import COMMANDS
from fly_jax.launch.view import TextView, legend, wants_colour
from fly_jax.verification.rules import Why


def test_an_unknown_command_is_told_which_exist(refused: Refused) -> None:
    refused("genrate", words=["genrate", *COMMANDS])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_ours_alone(command: str, ran: Ran) -> None:
    text, said = ran(command, "--help")
    assert said == ""
    assert "Examples:" in text
    for foreign in ("--pdb", "--logtostderr", "--flagfile", "absl"):
        assert foreign not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_names_every_flag_of_generate(ran: Ran) -> None:
    text = ran("--help").out
    for flag in ("target", "draft", "mesh", "rule", "num_speculative_tokens", "entropy_threshold",
                 "window_size", "prompt", "prompts_file", "max_new_tokens", "temperature", "seed",
                 "batch_size", "config", "compare", "json", "dtype"):  # fmt: skip
        assert f"  --{flag}" in text


def test_interruption(monkeypatch: Patch, ran: Ran) -> None:
    monkeypatch.setattr(generate, "main", Mock(side_effect=KeyboardInterrupt))
    assert ran(status=130).err == "\nInterrupted.\n"


def launched(flag: str, out: int | IO[str] = subprocess.PIPE) -> tuple[int, str | None, str]:
    """How the command ends as a process, and what it writes."""
    given = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.PIPE, "text": True}
    finished = subprocess.run([sys.executable, "-m", "fly_jax.launch", flag], **given)
    return finished.returncode, finished.stdout, finished.stderr


def test_process_refuses_without_a_traceback() -> None:
    sentence = "generate has no flag --promt; the nearest is --prompt.\n"
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
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("standard output could not be read or written (No space")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: Patch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_colours_tell_why() -> None:
    view = TextView(out := Terminal())
    assert out.getvalue() == f"{legend()}\n\n"
    out.seek(0)
    out.truncate()
    view.begin(["x"])
    why = [Why.MATCHED, Why.RESCUED, Why.CORRECTED, Why.BONUS]
    view.push(0, "0123", why, done=True)
    pieces = [part.partition("m") for part in out.getvalue().split("\x1b[")]
    styles = {text: style for style, _, text in pieces if text.strip()}
    assert styles.keys() == {"x", "0", "1", "2", "3"}
    assert len(set(styles.values())) == 5
    for text in "0123":
        assert f"\x1b[{styles[text]}m" in legend()


def test_no_colour_where_none_is_wanted(monkeypatch: Patch) -> None:
    """And no control character of the models on a terminal."""
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "dumb")
        assert not wants_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())
    texts = ("x\ufffd\ty\ufffd[2J\n\n", "x\x07\ty\x1b[2J\n\n")
    for out, text in zip((Terminal(), io.StringIO()), texts, strict=True):
        view = TextView(out)
        view.begin(["x\x07\ty"])
        view.push(0, "\x1b[2J", [Why.BONUS] * 4, done=True)
        assert out.getvalue() == text


def test_rows_come_one_after_the_other() -> None:
    """The first unfinished row is written as it grows; the others wait."""
    view = TextView(out := io.StringIO())
    view.begin(["a", "b", "c"])
    for row, text, done, shown in (
        (1, "2", False, "a"),
        (0, "1", False, "a1"),
        (2, "3", True, "a1"),
        (0, "1", True, "a11\n\n<0>b2"),
        (1, "2", True, "a11\n\n<0>b22\n\n<1>c3\n\n<2>"),
    ):
        view.push(row, text, [Why.BONUS], done=done)
        out.writelines(f"<{ended}>" for ended in view.ended())
        assert out.getvalue() == shown
