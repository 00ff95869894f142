"""The second start of a command compiles nothing; and where its programs are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from launch_types import Captured, Patch

from fly_jax.errors import FlyJaxError
from fly_jax.launch.__main__ import main
from fly_jax.sharding import mesh
from fly_jax.sharding.mesh import enable_compilation_cache

SIZES = ["--max_new_tokens=8", "--num_speculative_tokens=4", "--window_size=2", "--json"]
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


OPTIONS = [
    *("jax_enable_compilation_cache", "jax_compilation_cache_dir"),
    *("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"),
]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: Patch) -> Iterator[None]:
    """JAX's options are as they were when a test is done."""
    monkeypatch.delenv("FLY_JAX_COMPILATION_CACHE")
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def counts(arguments: list[str], **environment: str) -> tuple[int, int, int]:
    command, there = [sys.executable, "-c", COUNTING, *arguments], {**os.environ, **environment}
    finished = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=there
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    hits, misses, requests = map(int, finished.stdout.splitlines()[-1].split())
    return hits, misses, requests


def test_the_second_start_compiles_nothing(models: list[str], tmp_path: Path) -> None:
    arguments = [*models, "--prompt=Ada has 3 apples", *SIZES]
    folder = tmp_path / "fly_jax" / "xla"
    assert counts(arguments, XDG_CACHE_HOME=str(tmp_path))[1] > 5
    assert list(folder.glob(f"jax-{jax.__version__}-*/*-cache"))
    # The same folder by name; that a variable names it as well is tested below.
    hits, misses, requests = counts([*arguments, f"--compilation_cache={folder}"])
    assert misses == 0
    assert hits == requests > 5


def test_the_flag_goes_before_the_variables(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLY_JAX_COMPILATION_CACHE", str(tmp_path / "variable"))
    flagged = enable_compilation_cache(tmp_path / "flag")
    assert jax.config.jax_compilation_cache_dir == str(flagged)
    named = enable_compilation_cache()
    assert (flagged.parent, named.parent) == (tmp_path / "flag", tmp_path / "variable")
    assert flagged.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_jax_was_told_stays(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))  # as its variable does
    assert enable_compilation_cache() == tmp_path
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_what_jax_was_told_to_leave_out_stays_out(tmp_path: Path, monkeypatch: Patch) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)  # as its variable does
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    enable_compilation_cache(tmp_path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
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


@pytest.mark.parametrize("word", ["off", "none", "Off"])
def test_no_cache(word: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLY_JAX_COMPILATION_CACHE", str(tmp_path / "variable"))
    assert enable_compilation_cache(word) is None
    assert not jax.config.jax_enable_compilation_cache
    assert not (tmp_path / "variable").exists()


def test_no_folder_to_write(models: list[str], tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(FlyJaxError, match="Not a directory"):
        enable_compilation_cache(file / "cache")
    assert main([*models, "--prompt=Ada", *SIZES, f"--compilation_cache={file}"]) == 0
    out, said = capsys.readouterr()
    assert said.startswith(f"Compiled programs cannot be kept in {file}")
    assert out.count("\n") == said.count("\n") == 1
