"""The same command on several hosts: its flags, and how a command begins and ends there."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags

if TYPE_CHECKING:
    from absl.flags import FlagValues

# Added to what the service takes to miss a process.
_MARGIN_SECONDS = 15
_OWN = ("coordinator_address", "num_processes", "process_id", "coordinator_timeout")


def add_process_flags(into: Flags) -> None:
    """Adds the flags that say where the processes meet."""
    group = "Processes"
    into.string(
        group, "coordinator_address", None,
        "host and port of process 0, such as 10.0.0.1:8476; only needed where no cluster says so "
        "(TPU pods, GKE, Slurm and Open MPI do)",
    )  # fmt: skip
    into.integer(
        group, "num_processes", None,
        "processes that run this command, usually one on each host; 1 for this one alone, "
        "whatever the cluster says",
        lower_bound=1,
    )  # fmt: skip
    into.integer(group, "process_id", None, "which of them this is, from 0", lower_bound=0)
    into.integer(
        group, "coordinator_timeout", 300, "seconds to wait for the others", lower_bound=1
    )  # fmt: skip


@contextlib.contextmanager
def joined(values: FlagValues) -> Iterator[None]:
    """Joins the other processes for the time of a command; does nothing where there are none.

    Raises:
      FlyJaxError: the flags do not say which processes there are, or the command is not the same
        on all of them.
    """
    from fly_jax.sharding.processes import HEARTBEAT_SECONDS, check_same, find_place, join, share

    place = find_place(
        values.coordinator_address,
        values.num_processes,
        values.process_id,
        timeout=values.coordinator_timeout,
    )
    if place is None:
        yield
        return
    from fly_jax.launch import crash_handler

    words = crash_handler.speak_for(place, values.coordinator_timeout)
    # JAX waits in C++, where Python would not hear Ctrl-C.
    heard = signal.signal(signal.SIGINT, signal.SIG_DFL)
    words.met(join(place, timeout=values.coordinator_timeout))
    signal.signal(signal.SIGINT, heard)
    settings = values.flag_values_dict()
    try:
        check_same({name: value for name, value in settings.items() if name not in _OWN})
        yield
        share("done")  # process 0 may still be writing
    except (FlyJaxError, OSError):
        raise
    except Exception as error:
        if _is_of_another(error):
            time.sleep(HEARTBEAT_SECONDS + _MARGIN_SECONDS)  # JAX stops us before, and knows why
        traceback.print_exc()
        raise SystemExit(1) from error


def _is_of_another(error: Exception) -> bool:
    """Whether it may come of another process's end: a collective or a message that failed."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
