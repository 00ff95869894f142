"""How replies reach clients that may leave, stall or take too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fly_jax.serving.http.errors import NO_RETRY, ApiError
from fly_jax.serving.http.response_stream import ResponseStream

_T = TypeVar("_T")
_CLIENT_LEFT = 499  # as nginx has it; nobody reads it


class ClientGone(Exception):
    """Nobody waits for the reply any more."""


async def unless_gone(receive: Receive, seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Does some work for a client, who may leave before it is done.

    Args:
      receive: of a request whose body has been read.
      seconds: in which it has to be done.
      work: is cancelled where it does not come to its end.

    Raises:
      ClientGone: the client has left.
      ApiError: the time is over.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def in_one_piece(receive: Receive, seconds: float, answering: ResponseStream) -> Response:
    """The whole reply, as JSON."""
    async with answering:
        try:
            reply = await unless_gone(receive, seconds, answering.whole())
        except ClientGone:
            return Response(status_code=_CLIENT_LEFT)
    return JSONResponse(reply.model_dump(exclude_unset=True))


class EventStream(Response):
    """The reply as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, answering: ResponseStream, seconds: float, client_seconds: float) -> None:
        """Sends nothing yet.

        Args:
          answering: gives the events.
          seconds: in which all has to be sent.
          client_seconds: in which the client has to take what is sent, or is given up.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answering, self._seconds, self._client_seconds = answering, seconds, client_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; whatever ends that ends the decoding."""
        with contextlib.suppress(ClientGone):
            async with self._answering:
                await self._send(
                    send, type="http.response.start", status=200, headers=self.raw_headers
                )
                try:
                    await unless_gone(receive, self._seconds, self._events(send))
                except ApiError as error:
                    await self._event(send, error.body.model_dump_json())
                await self._event(send, "[DONE]")
                await self._send(send, type="http.response.body", body=b"", more_body=False)

    async def _events(self, send: Send) -> None:
        async for chunk in self._answering.chunks():
            await self._event(send, chunk.model_dump_json(exclude_unset=True))

    async def _event(self, send: Send, data: str) -> None:
        body = f"data: {data}\n\n".encode()
        await self._send(send, type="http.response.body", body=body, more_body=True)

    async def _send(self, send: Send, **message: Any) -> None:
        """Raises ClientGone if the client takes nothing any more."""
        try:
            async with asyncio.timeout(self._client_seconds):
                await send(message)
        except TimeoutError:
            raise ClientGone from None
