"""Starts several processes on this machine that are to meet each other."""

from __future__ import annotations

import contextlib
import os
import re
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
    """Processes that run one command line in a folder, with files there for what they say.

    Where they meet is added to their arguments. Process 0 reads `stdin`, the others nothing; one
    that is `absent` does not start.
    """

    def __init__(
        self, folder: Path, *arguments: str, program: Sequence[str] = LAUNCH, stdin: str = "",
        absent: int | None = None, number: int = 2,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.processes = []
        for index in range(number):
            (folder / f"in_{index}").write_text("" if index else stdin)
        # No proxy, of which JAX would warn.
        kept = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
        environment = kept | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)}
        place = [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={number}"]
        for index in sorted({*range(number)} - {absent}):
            command = [sys.executable, *program, *arguments, *place, f"--process_id={index}"]
            with contextlib.ExitStack() as files:
                streams = {
                    f"std{kind}": files.enter_context((folder / f"{kind}_{index}").open(mode))
                    for kind, mode in (("in", "r"), ("out", "w"), ("err", "w"))
                }
                self.processes.append(subprocess.Popen(command, env=environment, **streams))

    def out(self, index: int) -> str:
        """What a process has written to standard output."""
        return (self.folder / f"out_{index}").read_text()

    def err(self, index: int) -> str:
        """What a process has written to standard error."""
        return (self.folder / f"err_{index}").read_text()

    def wait_for(self, said: Callable[[int], str], words: str = "") -> None:
        """Until process 0 has said these words and the rest of their line."""
        for _ in range(PATIENCE * 10):
            if re.search(f"{words}.*\n", said(0)):
                return
            assert self.processes[0].poll() is None, self.err(0)
            time.sleep(0.1)
        raise AssertionError(self.err(0))

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
