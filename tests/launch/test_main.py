"""The command line as a whole: its help, its ends, its colours, and where its programs are kept."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import jax
import pytest
from launch_types import Patch, Ran, Refused

from fly_jax import FlyJaxError, Why, enable_compilation_cache
from fly_jax.launch import generate
from fly_jax.launch.__main__ import COMMANDS
from fly_jax.launch.view import TextView, legend, wants_colour
from fly_jax.sharding import mesh


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_ours_alone(command: str, ran: Ran) -> None:
    text, said = ran(command, "--help")
    assert said == ""
    assert "Examples:" in text
    for foreign in ("--pdb", "--logtostderr", "--flagfile", "absl"):
        assert foreign not in text
    assert max(map(len, text.splitlines())) <= 100


def test_help_names_every_flag_of_generate(ran: Ran) -> None:
    """And what the pair that ships with the package is decoded with."""
    shown = " ".join((text := ran("--help").out).split())
    assert "; exact if not given, margin with the pair that ships with the package --num" in shown
    assert "; 0.3 if not given, 1.0 with the pair that ships with the package Limits" in shown
    assert r"; none if not given, \d with the pair that ships with the package;" in shown
    flags = set(re.findall(r"  --(\w+)", text))
    assert flags >= {"target", "draft", "mesh", "rule", "num_speculative_tokens", "prompt", "seed"}
    assert flags >= {"entropy_threshold", "window_size", "prompts_file", "max_new_tokens", "dtype"}
    assert flags >= {"temperature", "batch_size", "config", "compare", "json"}


def test_unknown_or_interrupted(monkeypatch: Patch, ran: Ran, refused: Refused) -> None:
    refused("genrate", words=["genrate", *COMMANDS])
    monkeypatch.setattr(generate, "main", Mock(side_effect=KeyboardInterrupt))
    assert ran(status=130).err == "\nInterrupted.\n"


def test_a_closed_standard_error_is_no_output(monkeypatch: Patch, ran: Ran) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert ran("genrate", status=2).out == ""
    sys.stderr.close()


def launched(flag: str, out: int | IO[str] = subprocess.PIPE) -> tuple[int, str | None, str]:
    """How the command ends as a process, and what it writes."""
    given = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.PIPE, "text": True}
    finished = subprocess.run([sys.executable, "-m", "fly_jax.launch", flag], **given)
    return finished.returncode, finished.stdout, finished.stderr


def test_process_refuses_without_a_traceback() -> None:
    """And a reader that goes away is no error, and a full disk is said in one sentence."""
    sentence = "generate has no flag --promt; the nearest is --prompt.\n"
    assert launched("--promt=x") == (2, "", sentence)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        assert launched("--help", pipe) == (141, None, "")
    if os.path.exists("/dev/full"):  # Linux's
        with open("/dev/full", "w") as full:
            status, _, said = launched("--help", full)
        assert (status, said.count("\n")) == (2, 1)
        assert said.startswith("standard output or a file could not be read or written (No space")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_tell_why() -> None:
    view = TextView(out := Terminal())
    assert out.getvalue() == f"{legend()}\n\n"
    out.seek(0)
    out.truncate()
    view.begin(["x"])
    view.push(0, "0123", [Why.MATCHED, Why.RESCUED, Why.CORRECTED, Why.BONUS], done=True)
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
        (1, "2", False, "a"), (0, "1", False, "a1"), (2, "3", True, "a1"),
        (0, "1", True, "a11\n\n<0>b2"), (1, "2", True, "a11\n\n<0>b22\n\n<1>c3\n\n<2>"),
    ):  # fmt: skip
        view.push(row, text, [Why.BONUS], done=done)
        out.writelines(f"<{ended}>" for ended in view.ended())
        assert out.getvalue() == shown


FEW = ["--max_new_tokens=8", "--num_speculative_tokens=4", "--window_size=2", "--json"]
# Runs a command and writes how many programs it compiled, and how many it found.
COUNTING = """
import collections, sys
from jax import monitoring
from fly_jax.launch.__main__ import main
counts = collections.Counter()
monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
status = main(sys.argv[1:])
print(counts["cache_hits"], counts["cache_misses"], counts["compile_requests_use_cache"])
sys.exit(status)
"""
FOLDER, SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
OPTIONS = [FOLDER, SECONDS, "jax_persistent_cache_min_entry_size_bytes"]
OPTIONS += ["jax_enable_compilation_cache"]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: Patch) -> Iterator[None]:
    """JAX's options are as they were when a test is done."""
    monkeypatch.delenv("FLY_JAX_COMPILATION_CACHE")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def counts(arguments: list[str], **environment: str) -> list[int]:
    command, there = [sys.executable, "-c", COUNTING, *arguments], {**os.environ, **environment}
    finished = subprocess.run(command, capture_output=True, text=True, input="", env=there)
    assert (finished.returncode, finished.stderr) == (0, "")
    return [int(count) for count in finished.stdout.splitlines()[-1].split()]


def test_the_second_start_compiles_nothing(models: list[str], tmp_path: Path) -> None:
    arguments = [*models, "--prompt=Ada has 3 apples", *FEW]
    folder = tmp_path / "fly_jax" / "xla"
    assert counts(arguments, XDG_CACHE_HOME=str(tmp_path))[1] > 5
    assert list(folder.glob(f"jax-{jax.__version__}-*/*-cache"))
    # The same folder by name; that a variable names it as well is tested below.
    hits, misses, requests = counts([*arguments, f"--compilation_cache={folder}"])
    assert misses == 0
    assert hits == requests > 5


def test_the_flag_goes_before_the_variables(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLY_JAX_COMPILATION_CACHE", str(tmp_path / "variable"))
    for word in ("off", "none", "Off"):
        jax.config.update("jax_enable_compilation_cache", True)
        assert enable_compilation_cache(word) is None
        assert not jax.config.jax_enable_compilation_cache
    assert not (tmp_path / "variable").exists()
    flagged = enable_compilation_cache(tmp_path / "flag")
    assert jax.config.jax_compilation_cache_dir == str(flagged)
    named = enable_compilation_cache()
    assert (flagged.parent, named.parent) == (tmp_path / "flag", tmp_path / "variable")
    assert flagged.stat().st_mode & 0o777 == 0o700


def test_what_jax_was_told_stays(tmp_path: Path, monkeypatch: Patch) -> None:
    """The folder, and what is left out; both by JAX's variables."""
    jax.config.update(FOLDER, str(tmp_path))
    assert enable_compilation_cache() == tmp_path
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    jax.config.update(SECONDS, 5.0)
    with monkeypatch.context() as patch:
        patch.setenv(SECONDS.upper(), "5")
        enable_compilation_cache(tmp_path)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0
    enable_compilation_cache(tmp_path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0


def test_what_was_not_read_for_longest_goes(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = enable_compilation_cache(tmp_path)
    for age, name in enumerate(("newest", "newer", "older", "oldest")):
        (folder / name).write_bytes(b"12345678")
        os.utime(folder / name, (1e9 - age, 1e9))
    enable_compilation_cache(tmp_path)
    assert len(list(folder.iterdir())) == 4
    monkeypatch.setattr(mesh, "_MOST_BYTES", 20)
    enable_compilation_cache(tmp_path)
    assert {file.name for file in folder.iterdir()} == {"newest", "newer"}


def test_no_folder_to_write(models: list[str], tmp_path: Path, ran: Ran) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(FlyJaxError, match="Not a directory"):
        enable_compilation_cache(file / "cache")
    out, said = ran(*models, "--prompt=Ada", *FEW, f"--compilation_cache={file}")
    assert said.startswith(f"Compiled programs cannot be kept in {file}")
    assert out.count("\n") == said.count("\n") == 1
