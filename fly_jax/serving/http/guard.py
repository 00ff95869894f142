"""What is turned away before anything reads it: a wrong key, and a body that is too large."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly_jax.serving.http.errors import ApiError

_GUARDED = "/v1"


class Guard:
    """An ASGI application in front of another."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body: int, on_refused: Callable[[int], None]
    ) -> None:
        """Takes what is asked of requests.

        Args:
          app: gets those that pass.
          api_key: what a request under /v1 has to bring; None for nothing.
          max_body: bytes of a body.
          on_refused: gets the status of each reply that is not a success.
        """
        self._app, self._max_body, self._on_refused = app, max_body, on_refused
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

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
            if size > self._max_body:  # its length was not said, or wrongly
                raise HTTPException(413, self._too_large)
            return message

        await self._app(scope, measured, telling)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._expected is not None and scope["path"].startswith(_GUARDED):
            given = headers.get("authorization", "").encode("latin-1", "replace")
            if not secrets.compare_digest(given, self._expected):
                return ApiError(
                    401,
                    "The API key is missing or wrong; send the server's as a bearer token.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if not re.fullmatch(r"\d{1,15}", length, re.ASCII) or int(length) > self._max_body:
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return (
            f"The body has more than {self._max_body} bytes; send less, or start the server with a "
            "larger --max_body."
        )
