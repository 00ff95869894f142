"""Bounds on what clients may do: of a body, of a key, and of the time that an answer takes."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly_jax.serving.http.protocol import ApiError

_T = TypeVar("_T")
# A proxy or client that tries again after these makes matters worse, and OpenAI's clients would.
NO_RETRY = {"x-should-retry": "false"}
_LONGEST_ARRIVAL = 60.0
_SECRET = secrets.token_bytes(32)  # without which nobody can look for the key of a digest


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Bounds on what clients may do.

    Attributes:
      max_queue: requests that may wait for a slot.
      max_body: bytes of a body.
      request_timeout: seconds from a request's arrival to its last token.
      client_timeout: seconds in which a client must take what is sent.
      max_connections: that are open at a time.
      allowed_hosts: names, without a port, by which the server may be called; none for any.
      api_keys: requests have to bring one of them; if there are none, no key is asked for.
    """

    max_queue: int = 256
    max_body: int = 2 * 2**20
    request_timeout: float = 600.0
    client_timeout: float = 30.0
    max_connections: int = 512
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()

    def cache_salt(self, authorization: str, given: str | None) -> str:
        """What requests must have in common to share prefixes: their key, and what they say."""
        key = authorization if self.api_keys else ""
        return hashlib.blake2b(json.dumps([key, given]).encode(), key=_SECRET).hexdigest()

    @property
    def arrival_timeout(self) -> float:
        """Seconds from the first byte of a request to its last."""
        return min(self.request_timeout, _LONGEST_ARRIVAL)


class Guard:
    """Turns away a wrong key and a body that is too large, before anything reads them."""

    def __init__(
        self, app: ASGIApp, limits: Callable[[], ServerLimits], on_refused: Callable[[int], None]
    ) -> None:
        """Stands before an application; `on_refused` gets the status of every error."""
        self._app, self._limits, self._on_refused = app, limits, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size = 0

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._on_refused(message["status"])
            await send(message)

        error = self._refusal(scope)
        if error is not None:
            await error.response(scope, receive, telling)
            return

        async def measured() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limits().max_body:  # its length was not said, or wrongly
                raise HTTPException(413, self._too_large)
            return message

        await self._app(scope, measured, telling)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, limits = Headers(scope=scope), self._limits()
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if limits.allowed_hosts and host not in limits.allowed_hosts:
            return ApiError(
                400,
                f"The request is for the host {host!r} and this server answers for "
                f"{', '.join(limits.allowed_hosts)}; call it by such a name, or start it with "
                "--allowed_hosts.",
                code="host_not_allowed",
            )
        keys = limits.api_keys
        if keys and scope["path"].startswith("/v1"):
            given = headers.get("authorization", "").encode("latin-1", "replace")
            # All are compared, so that the time does not tell which.
            fits = [secrets.compare_digest(given, f"Bearer {key}".encode()) for key in keys]
            if not any(fits):
                return ApiError(
                    401,
                    "The API key is missing or wrong; send the server's as a bearer token.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if not re.fullmatch(r"\d{1,15}", length, re.ASCII) or int(length) > limits.max_body:
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return (
            f"The body has more than {self._limits().max_body} bytes; send less, or start the "
            "server with a larger --max_body."
        )


class ClientGone(Exception):
    """Nobody waits for the reply any more."""


async def unless_gone(receive: Receive, seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Does some work for a client, who may leave; the body of the request has been read.

    What is not done in these seconds is cancelled.

    Raises:
      ClientGone: the client has left.
      ApiError: the time is over.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientGone
        raise ApiError(
            408,
            f"The request was not done in {seconds:g} seconds and was stopped; ask for fewer "
            "tokens, or start the server with a larger --request_timeout.",
            code="request_timeout",
            headers=NO_RETRY,
        )
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
