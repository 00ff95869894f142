"""The processes of one job: how they meet, agree and stay in step.

What hosts say to each other goes through the key-value store of JAX's coordination service, which
works before a backend is up and needs no program. JAX offers it under `jax._src` alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed
from jax._src.clusters import ClusterEnv

from fly_jax.errors import FlyJaxError, file_trouble

Json = Any

# A process without a sign of life for so long counts as lost, and JAX stops all the others.
HEARTBEAT_SECONDS = 30
# Seconds that a process that is done, or has failed, waits for the others.
_SHUTDOWN_SECONDS = 10
_SLICE_MS, _LONGEST_SLICE_MS = 1000, 16_000
_BLOCK = 1024

_turns = itertools.count()


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """A process's place in the job, its accelerators (None: all), and where process 0 listens."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def detect_process(
    coordinator_address: str | None = None, num_processes: int | None = None,
    process_id: int | None = None, *, timeout: int = 300,
) -> ProcessInfo | None:  # fmt: skip
    """Finds this process's place among several; None where it is alone.

    What is not given is asked of the cluster, as JAX knows it: TPU pods, GKE, Slurm, Open MPI. One
    process asks none. `timeout` is for the coordinator's name to be known, in seconds. Raises
    FlyJaxError if something is neither given nor known, or does not fit the rest.
    """
    given = coordinator_address, num_processes, process_id
    if num_processes == 1:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages for clusters that are not meant
        if given == (None, None, None) and _cluster_size() <= 1:
            return None
        detect = ClusterEnv.auto_detect_unset_distributed_params
        try:
            found = detect(*given, None, None, timeout)
        except Exception as error:  # each kind of cluster has errors of its own
            raise FlyJaxError(
                "The cluster that this process runs on does not say which processes there are "
                f"({' '.join(str(error).split())}); give --coordinator_address, --num_processes "
                "and --process_id, or --num_processes=1 for this process alone."
            ) from error
    address, count, index, devices = found
    if address is None or count is None or index is None:
        flags = ("--coordinator_address", "--num_processes", "--process_id")
        missing = [name for name, value in zip(flags, found, strict=False) if value is None]
        raise FlyJaxError(
            f"{' and '.join(missing)} must be given too, since no cluster says so; several "
            "processes need --coordinator_address, --num_processes and --process_id."
        )
    if not 0 <= index < count:
        raise FlyJaxError(
            f"--process_id is {index} and --num_processes {count}; processes are numbered from 0 "
            f"to {count - 1}: correct one of the two."
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise FlyJaxError(
            f"--coordinator_address is '{address}'; it needs process 0's host and a free port: "
            "write such as 10.0.0.1:8476."
        )
    return ProcessInfo(address, count, index, None if devices is None else tuple(devices))


def _cluster_size() -> int:
    """The number of processes in the cluster; 1 where it answers nothing (notebooks)."""
    for cluster in ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method:
            try:
                if cluster.is_env_present():
                    return cluster.get_process_count()
            except Exception:  # whatever a missing metadata server, or a client's setup, raises
                return 1
    return 1


def initialize(process: ProcessInfo, *, timeout: int) -> tuple[str, ...]:
    """Joins the other processes, before a JAX backend is up; returns the host names of all."""
    # This service would take SIGTERM as a wish for a checkpoint, and go on for a minute.
    with contextlib.suppress(AttributeError):  # a JAX without that service
        jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=process.coordinator_address, num_processes=process.num_processes,
        process_id=process.process_id, local_device_ids=process.local_device_ids,
        cluster_detection_method="deactivate", initialization_timeout=timeout,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )  # fmt: skip
    return tuple(gather(socket.gethostname()))


def num_processes() -> int:
    """Processes of the job; 1 if this one has not joined any. Starts no backend."""
    return distributed.global_state.num_processes


def process_id() -> int:
    """The number of this process, from 0. Starts no backend."""
    return distributed.global_state.process_id


def gather(value: Json) -> list[Json]:
    """The values of all processes, in their order. Every process calls it, in the same turn."""
    if num_processes() == 1:
        return [value]
    said, key = json.dumps(value), _next_key()
    _client().key_value_set(f"{key}/{process_id()}", said)
    return [_await(f"{key}/{index}") for index in range(num_processes())]


def broadcast(value: Json) -> Json:
    """The value of process 0. Every process calls it, in the same turn."""
    if num_processes() == 1:
        return value
    said, key = json.dumps(value) if process_id() == 0 else "", _next_key()
    if process_id() == 0:
        _client().key_value_set(key, said)
        return value
    return _await(key)


def _await(key: str) -> Json:
    """Waits for a value that another process sets; if that one is lost, JAX stops this one too."""
    slice_ms = _SLICE_MS
    while True:
        try:  # in slices, between which Ctrl-C is heard
            return json.loads(_client().blocking_key_value_get(key, slice_ms))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            slice_ms = min(2 * slice_ms, _LONGEST_SLICE_MS)  # JAX keeps a little of every one


@contextlib.contextmanager
def joint_errors() -> Iterator[None]:
    """Makes all processes succeed, or all fail, in what each does alone, such as reading files.

    They fail with the same sentence, a FlyJaxError; where there is but one process, errors pass.
    """
    if num_processes() == 1:
        yield
        return
    problem = None
    try:
        yield
    except (FlyJaxError, OSError) as error:
        problem = file_trouble(error) if isinstance(error, OSError) else str(error)
    found = gather([socket.gethostname(), problem])
    if failed := [index for index, (_, sentence) in enumerate(found) if sentence is not None]:
        host, sentence = found[failed[0]]
        everywhere = all(problem == sentence for _, problem in found)
        raise FlyJaxError(sentence if everywhere else f"Process {failed[0]} ({host}): {sentence}")


def check_same(settings: dict[str, Json]) -> None:
    """Raises FlyJaxError on all processes unless all have the same settings; it names the first."""
    first = broadcast(settings)
    with joint_errors():
        for name, wanted in first.items():
            mine = settings.get(name)  # another command lacks some
            if mine != wanted:
                here, there = ("not given" if one is None else one for one in (mine, wanted))
                raise FlyJaxError(
                    f"--{name} is {here} here and {there} on process 0; all processes need the "
                    "same command and files: correct one of them."
                )


def _client() -> Any:
    """The client of the coordination service; JAX has no public name for it."""
    return distributed.global_state.client


def _next_key() -> str:
    """A key for this turn; those of a thousand turns ago, which all have read, are deleted."""
    turn = next(_turns)
    block, index = divmod(turn, _BLOCK)
    if index == 0 and block > 1 and process_id() == 0:
        _client().key_value_delete(f"fly_jax/{block - 2}")
    return f"fly_jax/{block}/{turn}"
