"""The engine in a thread of its own, for programs that are built on asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from fly_jax.decoding.generation import Settled
from fly_jax.errors import FlyJaxError
from fly_jax.serving.engine import Engine
from fly_jax.serving.request import Request, Ticket

_T = TypeVar("_T")


class TokenStream(AsyncIterator[Settled]):
    """What settles of one request, as it settles.

    Where it may be left before its end, `contextlib.aclosing` around it cancels the request then;
    a task that is cancelled while it waits for tokens does so by itself.

    Attributes:
      ticket: of the request; its `generation` has what has come so far.
    """

    ticket: Ticket

    def __init__(self, owner: AsyncEngine) -> None:
        """Waits for a request.

        Args:
          owner: runs the engine.
        """
        self._owner, self._loop = owner, asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Settled | FlyJaxError] = asyncio.Queue()
        self._is_done = False

    async def __anext__(self) -> Settled:
        """Waits for the next tokens.

        Raises:
          StopAsyncIteration: there are no more.
          FlyJaxError: the engine has stopped before the last of them.
        """
        if self._is_done:
            raise StopAsyncIteration
        try:
            found = await self._arrived.get()
        except asyncio.CancelledError:  # whoever waited has gone
            await self.aclose()
            raise
        if isinstance(found, FlyJaxError):
            self._is_done = True
            raise found
        self._is_done = found.finish_reason is not None
        return found

    async def aclose(self) -> None:
        """Cancels the request, unless it is done; its slot is free for the next round."""
        if not self._is_done:
            self._is_done = True
            await self._owner.cancel(self.ticket)

    def arrive(self, what: Settled | FlyJaxError) -> None:
        """Hands in what has settled, from the engine's thread; an error ends the stream."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, what)


class AsyncEngine:
    """Runs an engine in a thread: `async with AsyncEngine(engine) as running:`.

    Requests that are still going when it is left are cancelled; `drain` waits for them.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes an engine, which nobody else may use meanwhile.

        Args:
          engine: warmed up, if the first request is not to wait for compilation.
        """
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[Ticket, TokenStream] = {}
        self._waits_for_idle: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="fly_jax engine", daemon=True)
        self._lock = threading.Lock()  # around what is handed to the thread, and its end
        self._refusal: FlyJaxError | None = _stopped()
        self._has_ended = False

    async def __aenter__(self) -> Self:
        """Starts the thread."""
        self._refusal = None
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the thread, after the rounds that it is reading."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def submit(self, request: Request) -> TokenStream:
        """Hands in a request: `async for settled in await engine.submit(request)`.

        Raises:
          FlyJaxError: as `Engine.submit`; or the engine has stopped, or is being drained.
        """
        if self._refusal is not None:
            raise self._refusal
        stream = TokenStream(self)

        def hand_in() -> TokenStream:
            stream.ticket = self.engine.submit(request)
            self._streams[stream.ticket] = stream
            return stream

        return await asyncio.wrap_future(self._do(hand_in))

    async def cancel(self, ticket: Ticket) -> None:
        """Stops a request; see `Engine.cancel`. Its stream gives nothing more."""

        def stop() -> None:
            self._streams.pop(ticket, None)
            self.engine.cancel(ticket)

        if not self._has_ended:  # or all are cancelled
            await asyncio.wrap_future(self._do(stop))

    async def drain(self) -> None:
        """Takes no more requests, and waits until those that are going are done."""
        self._refusal = FlyJaxError("The engine takes no more requests: it is about to stop.")
        idle: Future[None] = Future()
        await asyncio.wrap_future(self._do(lambda: self._waits_for_idle.append(idle)))
        await asyncio.wrap_future(idle)

    def _do(self, command: Callable[[], _T]) -> Future[_T]:
        """Has the engine's thread run something between two steps."""
        done: Future[_T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(command())
                except BaseException as error:
                    done.set_exception(error)

        with self._lock:
            if self._has_ended:
                done.set_exception(self._refusal or _stopped())
            else:
                self._commands.put(run)
        return done

    def _run(self) -> None:
        """The thread."""
        ended = _stopped()
        try:
            while self._take_commands():
                for ticket, settled in self.engine.step():
                    self._streams[ticket].arrive(settled)
                    if settled.finish_reason is not None:
                        del self._streams[ticket]
        except Exception as error:
            ended = FlyJaxError(f"The engine has failed, and stopped: {error}")
            ended.__cause__ = error
        with self._lock:
            self._refusal, self._has_ended = ended, True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for stream in self._streams.values():
            stream.arrive(ended)
        for idle in self._waits_for_idle:
            idle.set_result(None)
        while self._streams:
            self.engine.cancel(self._streams.popitem()[0])

    def _take_commands(self) -> bool:
        """Does what was asked for meanwhile, and waits for it where nothing is to be decoded.

        Returns:
          Whether the thread goes on.
        """
        while True:
            is_idle = self.engine.is_idle
            if is_idle:
                for one in self._waits_for_idle:
                    one.set_result(None)
                self._waits_for_idle.clear()
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()


def _stopped() -> FlyJaxError:
    return FlyJaxError(
        "The engine does not run; requests are taken within `async with AsyncEngine(engine)`."
    )
