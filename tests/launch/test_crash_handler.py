"""Who is gone, by messages that JAX 0.10 was seen to write."""

from __future__ import annotations

import pytest

from fly_jax.launch.crash_handler import lost_processes

MESSAGES = {
    "killed": (
        "E1121 17:05:29 coordination_service.cc:1549] UNAVAILABLE: The following tasks are "
        "unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed. Check the task logs",
        {1},
    ),
    "two killed": (
        "absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending "
        "heartbeats):\n2\n13\nThe tasks have crashed.",
        {2, 13},
    ),
    "left alone": (
        "DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::42::0.\n# of tasks that reached the "
        "barrier: 1/2.\nThe first task at the barrier: 3. Some timed out task names:\n1\n",
        {3},
    ),
    "process 0 killed": (
        "absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either the leader "
        "task was preempted/died/restarted unexpectedly",
        {0},
    ),
    "process 0 silent": (
        "F1121 18:04:55 client.h:80] absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: "
        "/xla.coordination.CoordinationService/Heartbeat\n*** Check failure stack trace: ***",
        {0},
    ),
    "something else": ("F1121 18:04:55 client.h:80] Check failed: a == b", set()),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_lost_processes(name: str) -> None:
    native, lost = MESSAGES[name]
    assert lost_processes(native) == lost
