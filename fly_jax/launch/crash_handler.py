"""The end of a process of several: one sentence, where JAX's runtime would print a stack trace.

When another process dies, JAX's coordination service notices and ends this one from a thread of
its own, by `abort()` after a page of C++. Python does not see that, so the signal is caught where
it is raised, and the runtime's output is kept in a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # this module is there before JAX
    from fly_jax.sharding.processes import ProcessInfo

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
# The coordination service's words for the tasks that it misses, and for the one that left first.
_LOST = re.compile(r"stopped sending heartbeats\):\s*((?:\d+[,\s]*)+)")
_LEFT = re.compile(r"first task at the barrier: (\d+)")
# A process's words for a service, in process 0, that has closed or is silent.
_SERVICE_LOST = re.compile(
    r"Failed to send RPC to coordination service|DEADLINE_EXCEEDED.*\s+RPC: \S+/Heartbeat"
)


class CrashHandler:
    """Takes over the output and the end of a process that is one of several.

    Standard output is process 0's alone. Libraries in C++ write to a file from now on: the
    collectives announce themselves on standard output, where only results belong.
    """

    def __init__(self, process: ProcessInfo, timeout: int) -> None:
        """Begins before the processes have met; they have `timeout` seconds for that."""
        self._process = process
        self._timeout = timeout
        self.hosts: Sequence[str] = ()  # known once all processes have met
        self._exit_status: int | None = None
        file, name = tempfile.mkstemp(prefix=f"fly_jax-{process.process_id}-", suffix=".log")
        self._native = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        self._error = os.dup(2)
        out = os.dup(1) if process.process_id == 0 else os.open(os.devnull, os.O_WRONLY)
        sys.stdout = _as(sys.stdout, out)
        sys.stderr = _as(sys.stderr, os.dup(2))
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)
        self._handler = _Handler(self._aborted)  # kept, or the address would dangle
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, _Handler]
        libc.signal(signal.SIGABRT, self._handler)

    def shutdown(self, status: int) -> None:
        """Ends this process's part in the job; does not return where it has failed."""
        import jax

        self._exit_status = status
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone away
            sys.stdout.flush()
            sys.stderr.flush()
        jax.distributed.shutdown()  # waits for the others some seconds, and then stops them
        self._native.unlink(missing_ok=True)
        if status:  # the usual end would wait for programs that wait for lost processes
            os._exit(status)

    def _aborted(self, _: int) -> None:
        """Handles SIGABRT, in whichever thread called `abort()`."""
        if self._exit_status is not None:
            self._native.unlink(missing_ok=True)
            os._exit(self._exit_status)
        sentence, status = self._lost() if self.hosts else self._not_connected()
        os.write(self._error, f"{sentence}\n".encode(errors="replace"))
        os._exit(status)

    def _not_connected(self) -> tuple[str, int]:
        process = self._process
        return (
            f"The {process.num_processes} processes have not all met at "
            f"{process.coordinator_address} within {self._timeout} seconds (this is process "
            f"{process.process_id}); start the same "
            "command on every host, process 0 on the one with this address, and keep its port "
            f"open and unused ({self._native} has what JAX says)."
        ), EXIT_WRONG_INPUT

    def _lost(self) -> tuple[str, int]:
        try:
            text = self._native.read_text(errors="replace")
        except OSError:
            text = ""
        lost = lost_processes(text)
        others = sorted(lost - {self._process.process_id})
        who = " and ".join(f"process {index} ({self.hosts[index]})" for index in others)
        gone = f"{who or 'another process'} {'are' if len(others) > 1 else 'is'} gone"
        reason = "it was out of touch with the others" if lost and not others else gone
        return (
            f"Process {self._process.process_id} of {len(self.hosts)} stops, since {reason} and "
            "they go on together or not at all; see what the others said last and start all of "
            f"them again ({self._native} has what JAX says)."
        ), EXIT_FAILED


def lost_processes(native: str) -> set[int]:
    """The processes that are gone, by the output of JAX's runtime; empty where it does not say."""
    if found := _LOST.search(native) or _LEFT.search(native):
        return {int(index) for index in re.findall(r"\d+", found[1])}
    return {0} if _SERVICE_LOST.search(native) else set()


# The handler of this process, if it is one of several.
installed: CrashHandler | None = None


def _as(stream: TextIO, descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", 1, encoding=stream.encoding, errors=stream.errors)
