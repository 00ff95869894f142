"""What careless and hostile clients send, and whether a reply to it is in order."""

import contextlib
import itertools
import json
import socket
import time
from typing import Any, NamedTuple

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
NUMBERS = (-1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**400, 1e300)
RULE_NUMBERS = ("window_size", "entropy_top_k", "entropy_threshold", "margin_gap", "risk_budget")
REQUEST_NUMBERS = ("max_tokens", "top_k", "n", "logprobs", "temperature", "seed")
FOREIGN_HOSTS = ("evil.example", "localhost.evil.example:8000", "::1", "", "localhost:8000:1")

SIZE = 2 * 2**20 - 100  # the server takes 2 MiB


class Attack(NamedTuple):
    """A request, and words of the refusal that it has to get; "" where it may be taken."""

    path: str
    body: bytes
    words: str = ""
    headers: dict[str, str] = JSON


def many(item: str, before: str, after: str) -> bytes:
    """A body that is full of one thing."""
    number = (SIZE - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * number) + after).encode()


def unknown(before: str = "", after: str = "") -> bytes:
    """A body with 200,000 keys that mean nothing."""
    fields = ",".join(f'"{one:x}":0' for one in range(200_000))
    return (before + "{" + fields + "}" + after).encode()


FLY = '{"prompt":"a","fly":'
MESSAGES, PROMPT = '{"messages":[', '{"prompt":['
MANY_THINGS = [
    Attack(CHAT, many("{}", MESSAGES, "]}"), "messages.0.role: Field required"),
    Attack(CHAT, many("{}", MESSAGES + '{"role":"a","content":[', "]}]}"), "type: Field required"),
    Attack(CHAT, many('{"role":"a","content":""}', MESSAGES, "]}"), "at most 2048 items"),
    Attack(TEXT, many("0.5", PROMPT, "]}"), "prompt.0: Input should be a valid integer"),
    Attack(TEXT, many('""', PROMPT, "]}"), "prompt: List should have at most 1024 items"),
    Attack(TEXT, many("[]", PROMPT, "]}"), "at most 1024 items"),
    Attack(TEXT, many("0", FLY + '{"protect":[', "]}}"), "fly.protect.0: Input should"),
    Attack(TEXT, unknown(), "there are 200000 fields; send at most"),
    Attack(TEXT, unknown(FLY, "}"), "fly: there are 200000 fields; send at most"),
    Attack(TEXT, unknown('{"prompt":"a","logit_bias":', "}"), "logit_bias is"),
]


def asking(**fields: Any) -> bytes:
    """A valid body with these fields."""
    return json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


def with_number(name: str, number: float) -> Attack:
    """A request of which a number, be it of its rule, is this."""
    if name in RULE_NUMBERS:
        return Attack(TEXT, asking(fly={"rule": "fly | margin", name: number}))
    return Attack(TEXT, asking(**{"temperature": 0.5, name: number}))


NAMES = (*RULE_NUMBERS, *REQUEST_NUMBERS)
LARGE_NUMBERS = [with_number(*one) for one in itertools.product(NAMES, NUMBERS)]

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    b"Content-Type: application/json\r\n\r\n"
)
CHUNKED = b"Transfer-Encoding: chunked"
HALVES: dict[str, tuple[bytes, ...]] = {
    "nothing": (b"",), "header": (HEALTH,), "drops": (HEALTH, *[b"X-A: b\r\n"] * 30),
    "body": (BODY + b'{"prompt"',), "drops_of_body": (BODY, *[b" "] * 30),
    "chunks": (BODY.replace(b"Content-Length: 99", CHUNKED), *[b"1\r\n \r\n"] * 30),
    "second_request": (HEALTH + b"\r\n" + HEALTH,),
}  # fmt: skip


def connected(url: str, most: float = 10.0) -> socket.socket:
    """A connection to a server, which waits for at most so many seconds."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), most)


def sent(url: str, *pieces: bytes, wait: float = 0.0, most: float = 10.0) -> tuple[bytes, float]:
    """What comes back until the connection is closed, and after how many seconds that is.

    The pieces are sent with a wait before each; at most so many seconds are waited for.
    """
    begun, found = time.perf_counter(), b""
    with connected(url, most) as connection:
        with contextlib.suppress(OSError):  # it may be closed by then
            for piece in pieces:
                time.sleep(wait)
                connection.sendall(piece)
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(65536):
                found += more
    return found, time.perf_counter() - begun
