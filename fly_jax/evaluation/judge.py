"""A judge of programs that models have written: it runs them, and says whether they end.

Each runs in a process of its own, on Linux, with limits on seconds, memory and files. Where the
system permits namespaces, it has no network, may write only into a temporary folder, and whatever
it started dies with it. In any case Python itself refuses sockets, processes, foreign libraries,
and changes outside that folder. This holds back what goes wrong, not an attacker.
The file is also the program of that process; so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

NAMESPACES, HOOK_ALONE = "namespaces", "refusals by Python alone"
_WALL_SECONDS = 30  # a machine that decodes meanwhile is slow
_FILES = 16 << 20
# Where Python itself may lie.
_LIBRARIES = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
_LIMITS = {"CPU": 10, "AS": 2 << 30, "FSIZE": _FILES, "CORE": 0}  # in seconds and bytes

# Constants of <sched.h>, <sys/mount.h>, <sys/prctl.h> and <asm-generic/unistd.h>.
_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_MOUNT_ATTR_RDONLY, _MS_PRIVATE, _PR_SET_PDEATHSIG = 1, 1 << 18, 1

_REFUSED = (
    "socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "os.kill",
    "ctypes.dlsym", "pty.spawn", "signal.pthread_kill", "sqlite3.",
)  # fmt: skip
_CHANGES = (
    "os.remove", "os.rmdir", "os.rename", "os.mkdir", "os.truncate", "os.chmod", "os.chown",
    "os.link", "os.symlink", "os.utime", "shutil.rmtree",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Judged(NamedTuple):
    """A verdict: whether a program came to its end, and its `NAMESPACES` or `HOOK_ALONE`."""

    passed: bool
    isolation: str


def judge(program: str, *, namespaces: bool = True, wall_seconds: float = _WALL_SECONDS) -> Judged:
    """Runs a Python program for `wall_seconds` at most; it passes if its last line was run."""
    word = secrets.token_hex()  # what the process says at the end, and no program guesses
    with tempfile.TemporaryDirectory() as folder:
        given = {"program": program, "folder": folder, "word": word, "namespaces": namespaces}
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # Sets of texts have the same order each time; the user's keys are not passed on.
            env={"PYTHONHASHSEED": "0", "HOME": folder, "PATH": os.defpath} | _LIBRARIES,
        )
        try:
            said = process.communicate(json.dumps(given).encode(), timeout=wall_seconds)[0]
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    isolation, _, last = said.decode(errors="replace").partition("\n")
    return Judged(last == word, isolation)


def _main() -> None:
    """Runs the process: its first part waits, its child runs the program."""
    given = json.load(sys.stdin)
    libc = ctypes.CDLL(None, use_errno=True)
    for name, most in _LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    isolated = given["namespaces"] and _isolate(libc, given["folder"])
    os.chdir(given["folder"])
    os.write(1, f"{NAMESPACES if isolated else HOOK_ALONE}\n".encode())
    child = os.fork()  # the first process of its namespace, with which all others in it end
    if child:
        os.waitpid(child, 0)
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    sys.modules["answer"] = module = types.ModuleType("answer")
    sys.addaudithook(functools.partial(_refuse, Path.cwd()))
    exec(compile(given["program"], "answer.py", "exec"), module.__dict__)
    os.write(answers, given["word"].encode())
    os._exit(0)


def _isolate(libc: ctypes.CDLL, folder: str) -> bool:
    """Puts the process and its children into namespaces; tells whether all was permitted."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_NAMESPACES):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, _MS_PRIVATE, 0)
    where = (_AT_FDCWD, b"/", _AT_RECURSIVE)
    if libc.syscall(_SYS_MOUNT_SETATTR, *where, ctypes.byref(read_only), 32):
        return False
    return libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={_FILES}".encode()) == 0


def _refuse(folder: Path, event: str, given: tuple[Any, ...]) -> None:
    """Refuses, as an audit hook that cannot be removed, what no answer needs."""
    refused = event.startswith(_REFUSED)
    if event == "open":
        is_folder = given[1] is None and os.path.isdir(given[0])  # by which a path leads anywhere
        refused = is_folder or (bool(given[2] & _WRITES) and not _is_inside(folder, given[0]))
    elif event in _CHANGES:
        # Relative to a folder's descriptor, of which two paths have one each.
        descriptors = given[-2:] if event in ("os.rename", "os.link") else given[-1:]
        elsewhere = event != "os.truncate" and not {-1, None}.issuperset(descriptors)
        refused = elsewhere or not all(_is_inside(folder, one) for one in given)
    if refused:
        raise PermissionError(f"An answer may not do this: {event}.")


def _is_inside(folder: Path, given: object) -> bool:
    """Tells whether a path is in the folder; anything but a path passes."""
    if isinstance(given, str | bytes | os.PathLike):
        return Path(os.path.realpath(os.fsdecode(given))).is_relative_to(folder)
    return True


if __name__ == "__main__":
    _main()
