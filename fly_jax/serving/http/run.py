"""The server's life: it listens, warms up, takes requests, drains and ends; its connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fly_jax.errors import FlyJaxError
from fly_jax.serving.http.app import make_app
from fly_jax.serving.http.limits import NO_RETRY
from fly_jax.serving.http.protocol import ApiError, unavailable
from fly_jax.serving.http.service import Service

_BACKLOG = 2048
_CLOSING_SECONDS = 5  # for connections whose reply is on its way


class ServerFailed(RuntimeError):
    """The engine or the HTTP server has failed; the cause says how."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone: these have to drain the service first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet (port 0: any); raises FlyJaxError where it is taken."""
    try:
        choices = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name with addresses of both kinds, as localhost, most clients try that of IPv4.
        family, kind, protocol, _, address = min(choices, key=lambda one: one[0] != socket.AF_INET)
        with contextlib.ExitStack() as unless_bound:
            # asyncio sends small pieces at once (TCP_NODELAY) only where the protocol is named.
            found = unless_bound.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            unless_bound.pop_all()
    except (OSError, UnicodeError) as error:
        raise _not_bound(host, port, error) from error
    return found


def _not_bound(host: str, port: int, error: Exception) -> FlyJaxError:
    reason = getattr(error, "strerror", None) or error
    return FlyJaxError(
        f"The server cannot listen on {host}, port {port} ({reason}); give another --port or "
        "--host, or stop what listens there."
    )


def address(listening: socket.socket) -> str:
    """The URL of a socket, as a browser takes it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    service: Service, listening: socket.socket, *, grace_period: float, stop: asyncio.Event,
    say: Callable[[str], None], on_progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Serves requests until `stop` is set and those that are going are done.

    Raises FlyJaxError if the address has been taken meanwhile, and ServerFailed if the engine or
    the HTTP server cannot go on.

    Args:
      grace_period: seconds for requests that are going when it is to stop.
      say: gets a line when it is ready, and when it is about to stop.
      on_progress: gets how many of how many programs are compiled.
    """
    try:
        listening.listen(_BACKLOG)
    except OSError as error:
        host, port = listening.getsockname()[:2]
        raise _not_bound(host, port, error) from error
    connection: Any = functools.partial(Connection, service=service)
    config = uvicorn.Config(
        make_app(service), http=connection, log_level="error", access_log=False, lifespan="off",
        ws="none", server_header=False, timeout_graceful_shutdown=_CLOSING_SECONDS,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    stopping = asyncio.create_task(stop.wait())

    def heard(_: object) -> None:
        if service.state == "starting":
            say("Stopping when what compiles is ready; a second signal stops at once.")

    stopping.add_done_callback(heard)
    try:
        if not await _is_warm(service, stop, on_progress):
            return
        _check_answers(serving)
        gc.collect()
        gc.freeze()  # what is there stays: a body's many lists would have it all looked through
        async with service.engine:
            ending = asyncio.create_task(service.engine.ended())
            service.state = "ready"
            say(f"Ready on {address(listening)}: {service.described}.")
            await asyncio.wait((stopping, ending, serving), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                say(f"Stopping: {service.num_open} under way may go on for {grace_period:g} s.")
                if left := await service.drain(grace_period):
                    say(f"{left} requests were not done in that time, and were cancelled.")
            else:
                service.state = "draining"
                _check_answers(serving)
            if ending.done():  # perhaps while the open requests were waited for
                try:
                    await ending
                except FlyJaxError as error:
                    raise ServerFailed(str(error)) from (error.__cause__ or error)
            ending.cancel()
    finally:
        gc.unfreeze()
        service.state = "draining"
        stopping.cancel()
        server.should_exit = True
        await asyncio.wait((serving,))


class _Stopped(Exception):
    """A signal that the server was told to stop while it warmed up."""


async def _is_warm(
    service: Service, stop: asyncio.Event, on_progress: Callable[[int, int], None]
) -> bool:
    """Warms up, and waits for a program that compiles; False if told to stop meanwhile."""

    def counted(done: int, total: int) -> None:
        if stop.is_set():
            raise _Stopped
        on_progress(done, total)

    try:
        await asyncio.to_thread(service.warm_up, counted)
    except _Stopped:
        return False
    except Exception as error:
        raise ServerFailed(f"The server could not warm up: {error}") from error
    return not stop.is_set()


def _check_answers(serving: asyncio.Task[None]) -> None:
    if serving.done():
        error = serving.exception()
        raise ServerFailed(f"The HTTP server has failed: {error}") from error


def run(serving: Callable[..., Coroutine[Any, Any, None]], cut_off: Callable[[], object]) -> None:
    """Runs `serve`, given all but `stop`, until SIGTERM or SIGINT; a second one cuts off."""

    async def until_signalled() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def signalled() -> None:
            if stop.is_set():  # again: nothing is waited for any more
                cut_off()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        await serving(stop=stop)

    asyncio.run(until_signalled())


class Connection(H11Protocol):
    """A connection of uvicorn, with a deadline for the rest of a header or a body.

    It runs from the connection's beginning, and for each later request from its first byte, until
    the request is complete; uvicorn closes idle connections. A client that takes nothing of what is
    written is cut off; uvicorn would wait for it.
    """

    def __init__(self, *given: Any, service: Service, **named: Any) -> None:
        super().__init__(*given, **named)
        self._service = service
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._service.limits.max_connections:
            self._refuse(unavailable("The server has too many connections; try again later."))
        else:
            self._watch(is_arriving=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the deadline and the abort."""
        self._watch(is_arriving=False)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Aborts the connection if the client takes nothing for `client_timeout`."""
        super().pause_writing()
        self._wait_for_less(self.transport.get_write_buffer_size())

    def _wait_for_less(self, unsent: int) -> None:
        def look() -> None:
            if (left := self.transport.get_write_buffer_size()) < unsent:
                self._wait_for_less(left)
            else:
                self.transport.abort()

        self._stuck = self.loop.call_later(self._service.limits.client_timeout, look)

    def resume_writing(self) -> None:
        """Cancels the abort: the client has taken something."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def handle_events(self) -> None:
        """Updates the deadline, when something has arrived or a reply has been sent."""
        super().handle_events()
        state, has_begun = self.conn.their_state, bool(self.conn.trailing_data[0])
        is_arriving = state is h11.SEND_BODY or (state is h11.IDLE and has_begun)
        self._watch(is_arriving=is_arriving and not self.transport.is_closing())

    def _watch(self, *, is_arriving: bool) -> None:
        """Starts the deadline when a request arrives, and stops it when that is there."""
        if is_arriving and self._deadline is None:
            seconds = self._service.limits.arrival_timeout
            self._deadline = self.loop.call_later(seconds, self._is_late)
        elif not is_arriving and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        seconds = self._service.limits.arrival_timeout
        message = f"The request was not there in {seconds:g} seconds; send it faster."
        self._refuse(ApiError(408, message, code="request_timeout", headers=NO_RETRY))

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection, with a reply where none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = error.response
            headers = [*reply.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=error.status, headers=headers)
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self._service.metrics.refused(error.status)
        if self.cycle is not None:  # whoever waits for the rest of the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
