"""What careless and hostile clients do to a live server: each attempt ends soon, in a sentence."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from live_server import serving, stuck_service

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_SIZE = 2 * 2**20 - 100  # the server takes 2 MiB
_SECONDS, _MEBIBYTES = 1.0, 200  # of seven seconds, and of up to two gibibytes


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(stuck_service()) as found:
        yield found


def many(item: str, before: str, after: str) -> bytes:
    """A body that is full of one thing."""
    number = (_SIZE - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * number) + after).encode()


def unknown(before: str = "", after: str = "") -> bytes:
    """A body with 200,000 keys that mean nothing."""
    return (
        before + "{" + ",".join(f'"{one:x}":0' for one in range(200_000)) + "}" + after
    ).encode()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, many("{}", '{"messages":[', "]}"), "messages.0.role: Field required"),
        (CHAT, many("{}", '{"messages":[{"role":"a","content":[', "]}]}"), "type: Field required"),
        (CHAT, many('{"role":"a","content":""}', '{"messages":[', "]}"), "at most 2048 items"),
        (TEXT, many("0.5", '{"prompt":[', "]}"), "prompt.0: Input should be a valid integer"),
        (TEXT, many('""', '{"prompt":[', "]}"), "prompt.0: Input should be a valid integer"),
        (TEXT, many("0", '{"prompt":"a","fly":{"protect":[', "]}}"), "fly.protect.0: Input should"),
        (TEXT, unknown(), "there are 200000 fields; send at most"),
        (TEXT, unknown('{"prompt":"a","fly":', "}"), "fly: there are 200000 fields; send at most"),
        (TEXT, unknown('{"prompt":"a","logit_bias":', "}"), "logit_bias is"),
    ],
)  # fmt: skip
def test_a_body_of_many_small_things(url: str, path: str, body: bytes, words: str) -> None:
    """Neither others wait for it, nor does it take much memory."""
    waits, is_done = [0.0], threading.Event()

    def others() -> None:
        with httpx.Client() as client:
            while not is_done.is_set():
                begun = time.perf_counter()
                client.get(f"{url}/health", timeout=60)
                waits.append(time.perf_counter() - begun)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asking = threading.Thread(target=others)
    asking.start()
    reply = httpx.post(
        url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    is_done.set()
    asking.join()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert len(reply.content) < 4000, "errors quote little of what was given"
    assert max(waits) < _SECONDS
    assert grown < _MEBIBYTES * 2**10
