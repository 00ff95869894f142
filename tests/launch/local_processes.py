"""Starts several processes on this machine that are to meet each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Far more than it takes, for machines that do other things as well.
PATIENCE = 300
LAUNCH = ("-m", "fly_jax.launch")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """Processes that run one command line, each with files for what it says."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        number: int,
        *,
        program: Sequence[str] = LAUNCH,
        stdin: str = "",
        absent: Sequence[int] = (),
    ) -> None:
        """Starts them.

        Args:
          folder: for what they say.
          arguments: what Python runs, and its arguments; where they meet is added.
          number: of processes.
          program: the interpreter's arguments that come first.
          stdin: what process 0 reads; the others' standard input is empty.
          absent: those that do not start.
        """
        self.folder = folder
        place = [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={number}"]
        self.processes = []
        for index in sorted(set(range(number)) - set(absent)):
            command = [*program, *arguments, *place, f"--process_id={index}"]
            environment = _environment() | {"TMPDIR": str(folder)}
            self._path("in", index).write_text(stdin if index == 0 else "")
            with (
                self._path("in", index).open() as read,
                self._path("out", index).open("w") as out,
                self._path("err", index).open("w") as err,
            ):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        stdin=read, stdout=out, stderr=err, env=environment,
                    )
                )  # fmt: skip

    def _path(self, kind: str, index: int) -> Path:
        return self.folder / f"{kind}_{index}"

    def out(self, index: int) -> str:
        """What a process has written to standard output."""
        return self._path("out", index).read_text()

    def err(self, index: int) -> str:
        """What a process has written to standard error."""
        return self._path("err", index).read_text()

    def wait_for_output(self) -> None:
        """Until process 0 has written its first whole line."""
        self._wait_for(lambda: "\n" in self.out(0))

    def wait_for_error(self, words: str) -> None:
        """Until process 0 has written them to standard error, and the rest of their line."""
        self._wait_for(lambda: "\n" in self.err(0).partition(words)[2])

    def _wait_for(self, has_come: Callable[[], bool]) -> None:
        for _ in range(PATIENCE * 10):
            if has_come() or self.processes[0].poll() is not None:
                break
            time.sleep(0.1)
        assert has_come(), self.err(0)

    def statuses(self) -> list[int]:
        """How each process ended; whatever happens, none of them runs after this."""
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.end()

    def end(self) -> None:
        """Ends what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """One CPU device, and no proxy, of which JAX would warn."""
    kept = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    return kept | {"JAX_PLATFORMS": "cpu"}
