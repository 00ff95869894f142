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
# Tells clients, such as OpenAI's, not to retry: that would make matters worse.
NO_RETRY = {"x-should-retry": "false"}
CLIENT_LEFT = 499  # as nginx has it; nobody reads it
_LONGEST_ARRIVAL = 60.0
_JSON = r"\s*application/(json|[\w.+-]+\+json)\s*(;|$)"
_SECRET = secrets.token_bytes(32)  # without which nobody can look for the key of a digest


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Bounds on what clients may do; the help of serve's flags describes each."""

    max_queue: int = 256
    max_body: int = 2 * 2**20
    request_timeout: float = 600.0
    client_timeout: float = 30.0
    max_connections: int = 512
    allowed_hosts: tuple[str, ...] = ()  # names, without a port; none for any
    api_keys: tuple[str, ...] = ()  # if there are none, no key is asked for

    def cache_salt(self, authorization: str, given: str | None) -> str:
        """The digest of key and salt that requests must have in common to share prefixes."""
        key = _bearer_key(authorization) if self.api_keys else ""
        return hashlib.blake2b(json.dumps([key, given]).encode(), key=_SECRET).hexdigest()

    @property
    def arrival_timeout(self) -> float:
        """Seconds for a request to arrive, from where `Connection` counts them."""
        return min(self.request_timeout, _LONGEST_ARRIVAL)


def _bearer_key(authorization: str) -> str:
    """The key in the header; its scheme's name is not case-sensitive (RFC 9110)."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class Guard:
    """A middleware that refuses a wrong host, key, type or size before anything reads the body."""

    def __init__(
        self, app: ASGIApp, limits: Callable[[], ServerLimits], on_refused: Callable[[int], None]
    ) -> None:
        self._app, self._limits, self._on_refused = app, limits, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size, is_whole, has_left = 0, False, False

        async def telling(message: Message) -> None:
            is_error = message["type"] == "http.response.start" and message["status"] >= 400
            counts = not has_left and scope["path"] != "/health"  # which asks for nothing
            if is_error and counts and message["status"] != CLIENT_LEFT:
                self._on_refused(message["status"])
            await send(message)

        if (error := self._refusal(scope)) is not None:
            await error.response(scope, receive, telling)
            return

        async def measured() -> Message:
            nonlocal size, is_whole, has_left
            message = await receive()
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
            else:
                has_left = not is_whole
            size += len(message.get("body", b""))
            if size > self._limits().max_body:  # its length was not said, or wrongly
                raise HTTPException(413, self._too_large)
            return message

        try:
            await self._app(scope, measured, telling)
        except Exception:  # whose reply is sent behind this
            self._on_refused(500)
            raise

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, limits = Headers(scope=scope), self._limits()
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if limits.allowed_hosts and host not in limits.allowed_hosts:
            said = (
                f"The request is for the host {host!r} and this server answers for "
                f"{', '.join(limits.allowed_hosts)}; call it by such a name, or start it with "
                "--allowed_hosts."
            )
            return ApiError(400, said, code="host_not_allowed")
        if limits.api_keys and scope["path"].startswith("/v1"):
            given = _bearer_key(headers.get("authorization", "")).encode("latin-1", "replace")
            # All are compared, so that the time taken does not tell which one fits.
            fits = [secrets.compare_digest(given, key.encode()) for key in limits.api_keys]
            if not any(fits):
                said = "The API key is missing or wrong; send the server's as a bearer token."
                wanted = {"WWW-Authenticate": "Bearer"}
                return ApiError(401, said, code="invalid_api_key", headers=wanted)
        kind = headers.get("content-type", "")
        if scope["method"] == "POST" and not re.match(_JSON, kind, re.IGNORECASE):
            # A browser lets pages of other sites send other types without asking this server.
            said = f"The Content-Type is {kind!r}; send JSON, and say so by application/json."
            return ApiError(415, said, code="unsupported_media_type")
        if int(headers.get("content-length", "0")) > limits.max_body:  # h11 takes digits only
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return (
            f"The body has more than {self._limits().max_body} bytes; send less, or start the "
            "server with a larger --max_body."
        )


class ClientGone(Exception):
    """The client waits for the reply no longer."""


class Client:
    """A client that waits for a reply until a deadline; the body of its request has been read."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def waits_for(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Awaits work until the client leaves (ClientGone) or the time is up (ApiError)."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._leaves())
        left = self._end - asyncio.get_running_loop().time()
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((working, leaving), timeout=left, return_when=first)
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientGone
            said = (
                f"The request was not done in {self._seconds:g} seconds and was stopped; ask for "
                "fewer tokens, or start the server with a larger --request_timeout."
            )
            raise ApiError(408, said, code="request_timeout", headers=NO_RETRY)
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
