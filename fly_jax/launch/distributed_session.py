"""The same command on several hosts: how it begins and ends there."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Iterator

import jax
from absl.flags import FlagValues

from fly_jax.errors import FlyJaxError
from fly_jax.launch import crash_handler
from fly_jax.sharding.processes import (
    HEARTBEAT_SECONDS,
    broadcast,
    check_same,
    detect_process,
    initialize,
)

# Added to what the service takes to miss a process.
_MARGIN_SECONDS = 15
# The flags that may differ between the processes.
_OF_ONE_PROCESS = (
    "coordinator_address",
    "num_processes",
    "process_id",
    "coordinator_timeout",
    "compilation_cache",
)


@contextlib.contextmanager
def distributed_session(values: FlagValues) -> Iterator[None]:
    """Joins the other processes for the time of a command; does nothing where there are none.

    Raises:
      FlyJaxError: the flags do not say which processes there are, or the command is not the same
        on all of them.
    """
    process = detect_process(
        values.coordinator_address,
        values.num_processes,
        values.process_id,
        timeout=values.coordinator_timeout,
    )
    if process is None:
        yield
        return
    handler = crash_handler.install(process, values.coordinator_timeout)
    # JAX waits in C++, where Python would not hear Ctrl-C.
    handled = signal.signal(signal.SIGINT, signal.SIG_DFL)
    handler.connected(initialize(process, timeout=values.coordinator_timeout))
    signal.signal(signal.SIGINT, handled)
    settings = values.flag_values_dict()
    try:
        check_same({name: value for name, value in settings.items() if name not in _OF_ONE_PROCESS})
        yield
        broadcast("done")  # process 0 may still be writing
    except (FlyJaxError, OSError):
        raise
    except Exception as error:
        if is_of_another(error):
            time.sleep(HEARTBEAT_SECONDS + _MARGIN_SECONDS)  # JAX stops us before, and knows why
        traceback.print_exc()
        raise SystemExit(1) from error


def is_of_another(error: BaseException) -> bool:
    """Whether it may come of another process's end: a collective or a message that failed."""
    failed = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    return failed and crash_handler.installed is not None
