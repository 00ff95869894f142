"""The server's life: it listens, warms up, takes requests, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from fly_jax.errors import FlyJaxError
from fly_jax.serving.http.app import make_app
from fly_jax.serving.http.connections import Connection
from fly_jax.serving.http.service import Service

_BACKLOG = 2048
_CLOSING_SECONDS = 5  # for connections whose reply is on its way


class ServerFailed(RuntimeError):
    """The engine or the HTTP server has failed; the cause says how."""


class _Server(uvicorn.Server):
    """Leaves the signals alone, which have to drain the service first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address (port 0: any that is free), on which nothing listens yet.

    Raises:
      FlyJaxError: it is taken, or not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
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
    """Of a socket, as a browser takes it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    service: Service,
    listening: socket.socket,
    *,
    grace_period: float,
    stop: asyncio.Event,
    say: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> None:
    """Answers requests until `stop` is set and those that are going are done.

    Args:
      grace_period: seconds for requests that are going when it is to stop.
      say: gets a line when it is ready, and when it is about to stop.
      on_progress: gets how many of how many programs are compiled.

    Raises:
      FlyJaxError: somebody else listens there by now.
      ServerFailed: the engine or the HTTP server cannot go on.
    """
    host, port = listening.getsockname()[:2]
    try:
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _not_bound(host, port, error) from error
    connection: Any = functools.partial(
        Connection, limits=lambda: service.limits, on_refused=service.metrics.refused
    )
    config = uvicorn.Config(
        make_app(service), http=connection, log_level="warning", access_log=False, lifespan="off",
        ws="none", server_header=False, timeout_graceful_shutdown=_CLOSING_SECONDS,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    stopping = asyncio.create_task(stop.wait())
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
                left = await service.drain(grace_period)
                if left:
                    say(f"{left} requests were not done in that time, and were cancelled.")
            else:
                service.state = "draining"
                _check_answers(serving)
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
    """It was told to stop while it warmed up."""


async def _is_warm(
    service: Service, stop: asyncio.Event, on_progress: Callable[[int, int], None]
) -> bool:
    """Warms up; False if it was told to stop meanwhile.

    A program that is being compiled is waited for: the process cannot end under its feet.
    """

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
    """Raises ServerFailed where nobody answers HTTP any more."""
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
