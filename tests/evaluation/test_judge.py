"""The judge of programs: answers that are right, and those that would do harm."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from fly_jax.evaluation.judge import HOOK_ALONE, NAMESPACES, judge

_TEST = "\nassert double(4) == 8\n"
_RIGHT = "def double(x):\n    return 2 * x\n"
_PASS = {
    "plain": _RIGHT,
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int'\n" + _RIGHT,
    "own files": "open('notes', 'w').write('x'); import os; os.remove('notes')\n" + _RIGHT,
    "prints a lot": "for _ in range(10**5): print('x' * 1000)\n" + _RIGHT,
    "has a main": _RIGHT + "if __name__ == '__main__':\n    input()\n",
}
_DO_NOT_PASS = {
    "wrong": "def double(x):\n    return x\n", "no Python": "def double(x)\n",
    "exits": "import sys; sys.exit(0)\n" + _RIGHT,
    "exits at once": "import os; os._exit(0)\n" + _RIGHT, "raises": "raise SystemExit\n" + _RIGHT,
    "memory": "x = 'x' * (3 << 30)\n" + _RIGHT,
    "forks": "import os\nwhile True:\n    os.fork()\n" + _RIGHT,
    "starts": "import subprocess; subprocess.run(['true'])\n" + _RIGHT,
    "library": "import ctypes; ctypes.CDLL(None).fork()\n" + _RIGHT,
    "network": "import socket; socket.create_connection(('127.0.0.1', 1))\n" + _RIGHT,
    "database": "import sqlite3; sqlite3.connect('x').close()\n" + _RIGHT,
    "kills": "import os; os.kill(os.getppid(), 9)\n" + _RIGHT,
    "fills the disk": "open('big', 'wb').write(bytes(17 << 20))\n" + _RIGHT,
    "asks": "input()\n" + _RIGHT,
}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["namespaces", "hook"])
def namespaces(request: pytest.FixtureRequest) -> bool:
    """With namespaces, where this machine permits them, and without."""
    used: bool = request.param
    if used and judge("").isolation != NAMESPACES:
        pytest.skip("this machine permits no namespaces")
    return used


@pytest.mark.parametrize("name", _PASS | _DO_NOT_PASS)
def test_only_right_answers_pass(name: str, namespaces: bool) -> None:
    passed, isolation = judge((_PASS | _DO_NOT_PASS)[name] + _TEST, namespaces=namespaces)
    assert passed == (name in _PASS)
    assert isolation == (NAMESPACES if namespaces else HOOK_ALONE)


@pytest.mark.parametrize("answer", [
    "import shutil; shutil.rmtree({folder!r})", "import os; os.remove({file!r})",
    "import os; os.remove('kept', dir_fd=os.open({folder!r}, os.O_RDONLY))",
    "import os; os.rename('kept', 'x', src_dir_fd=os.open({folder!r}, os.O_RDONLY))",
    "import os; os.chdir({folder!r}); os.remove('kept')",
    "import os; os.open('kept', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open({folder!r}, 0))",
    "open({file!r}, 'w')",
])  # fmt: skip
def test_files_stay(answer: str, tmp_path: Path, namespaces: bool) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    harm = answer.format(folder=str(tmp_path), file=str(kept))
    program = f"try:\n    {harm}\nexcept OSError:\n    pass\n{_RIGHT}{_TEST}"
    assert judge(program, namespaces=namespaces).passed  # it went on behind the refusal
    assert kept.read_text() == "x"


def test_namespaces_hold_without_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps an answer in where the hook would not see it: the machine's own refusals."""
    if judge("").isolation != NAMESPACES:
        pytest.skip("this machine permits no namespaces")
    unhooked = tmp_path / "judge.py"
    text = Path(judge.__code__.co_filename).read_text()
    unhooked.write_text(text.replace("    sys.addaudithook(", "    (lambda hook: None)("))
    monkeypatch.setitem(judge.__globals__, "__file__", str(unhooked))
    monkeypatch.setitem(judge.__globals__, "_WALL_SECONDS", 1)
    refused = "\nelse:\n    raise AssertionError\n"
    write = f"try:\n    open({str(tmp_path / 'new')!r}, 'w')\nexcept OSError:\n    pass{refused}"
    call = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 1))\n"
    unreachable = f"{call}except OSError as error:\n    assert error.errno == 101{refused}"
    assert judge(write + unreachable).passed
    assert not (tmp_path / "new").exists()
    # A child that leaves the group and would run for an hour ends with the first process.
    name = f"fly_jax_{os.getpid()}"
    sleeps = f"os.setsid(); os.execlp('sleep', {name!r}, '3600')"
    assert judge(f"import os\nif not os.fork():\n    {sleeps}\n").passed
    deadline = time.monotonic() + 60  # the machine may take a moment
    while _runs(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(name)


def _runs(name: str) -> bool:
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in one.read_bytes():
                return True
    return False


@pytest.mark.parametrize("answer", ["while True: pass", "import time; time.sleep(3600)"])
def test_loops_end(answer: str, namespaces: bool) -> None:
    assert not judge(answer, namespaces=namespaces, wall_seconds=1).passed
