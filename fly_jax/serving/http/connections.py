"""Connections: how many there are, and how long a request may take to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fly_jax.serving.http.limits import NO_RETRY, ServerLimits
from fly_jax.serving.http.protocol import ApiError, unavailable


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the rest of a header or a body.

    The deadline runs from the connection's beginning, and of each later request from its first
    byte, until all of the request is there; uvicorn closes what is idle between two. A client who
    takes nothing of what is written is cut off, which uvicorn would wait for.
    """

    def __init__(
        self,
        *given: Any,
        limits: Callable[[], ServerLimits],
        on_refused: Callable[[int], None],
        **named: Any,
    ) -> None:
        """As uvicorn makes it; `on_refused` gets the status of every refusal."""
        super().__init__(*given, **named)
        self._limits, self._on_refused = limits, on_refused
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes it, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits().max_connections:
            self._refuse(unavailable("The server has too many connections; try again later."))
        else:
            self._watch(is_arriving=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is waited for."""
        self._watch(is_arriving=False)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Waits for the client to take what is written, for so long."""
        super().pause_writing()
        self._stuck = self.loop.call_later(self._limits().client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken something."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def handle_events(self) -> None:
        """After what has arrived, and when a reply has been sent."""
        super().handle_events()
        state, has_begun = self.conn.their_state, bool(self.conn.trailing_data[0])
        is_arriving = state is h11.SEND_BODY or (state is h11.IDLE and has_begun)
        self._watch(is_arriving=is_arriving and not self.transport.is_closing())

    def _watch(self, *, is_arriving: bool) -> None:
        """Lets the deadline run while a request arrives."""
        if is_arriving and self._deadline is None:
            self._deadline = self.loop.call_later(self._limits().arrival_timeout, self._is_late)
        elif not is_arriving and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._refuse(
            ApiError(
                408,
                f"The request was not there in {self._limits().arrival_timeout:g} seconds; send it "
                "faster.",
                code="request_timeout",
                headers=NO_RETRY,
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection, with a reply where none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = error.response
            headers = [*reply.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=bytes(reply.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self._on_refused(error.status)
        if self.cycle is not None:  # whoever waits for the rest of the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
