"""The engine in a thread of its own, for programs that are built on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Self, TypeVar

from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState, Settled
from fly_jax.errors import FlyJaxError

_T = TypeVar("_T")

_STOPPED = (
    "The engine does not run, or has stopped before a request was done; requests are taken within "
    "`async with AsyncEngine(engine)`, and `drain` waits for them."
)
_UNREAD = "A request was stopped, since its tokens were not read as they came; read them sooner."
_DRAINED = "The engine takes no more requests: it is about to stop."


class EngineStopped(FlyJaxError):
    """An error for requests that the engine no longer takes, whatever is in them."""


class TokenStream(AsyncIterator[Settled]):
    """The tokens of one request, as they settle.

    Where a reader may leave early, `contextlib.aclosing` around it then cancels the request; a task
    that is cancelled while it waits for tokens does so by itself. `state.generation` has what has
    come so far.
    """

    state: RequestState

    def __init__(self, owner: AsyncEngine, max_unread: float = math.inf) -> None:
        self._owner, self._loop = owner, asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Settled | FlyJaxError | None] = asyncio.Queue()
        self._max_unread = max_unread
        self._is_done = False

    async def __anext__(self) -> Settled:
        """Waits for tokens; FlyJaxError if the engine has stopped, or too many were unread."""
        if self._is_done:
            raise StopAsyncIteration
        try:
            found = await self._arrived.get()
        except asyncio.CancelledError:  # whoever waited has gone
            await self.aclose()
            raise
        self._is_done = not isinstance(found, Settled) or found.finish_reason is not None
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, FlyJaxError):
            raise found
        return found

    async def aclose(self) -> None:
        """Cancels the request, unless it is done; its slot is free for the next round."""
        self.stop()
        self._is_done = True

    def stop(self) -> None:
        """Cancels the request for another reader, who still gets what came before, and the end."""
        if not self._is_done:
            self._owner.cancel(self)

    def arrive(self, what: Settled | FlyJaxError | None) -> None:
        """Hands in what has settled, from any thread; anything else ends the stream."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._keep, what)

    def _keep(self, what: Settled | FlyJaxError | None) -> None:
        """Queues what has arrived, or ends the stream if too much is unread."""
        if isinstance(what, Settled) and self._arrived.qsize() >= self._max_unread:
            self._max_unread = math.inf  # once is enough
            self._owner.cancel(self)
            what = FlyJaxError(_UNREAD)
        self._arrived.put_nowait(what)


class AsyncEngine:
    """Runs an engine in a thread: `async with AsyncEngine(engine) as running:`.

    Leaving it cancels the requests that are still open; `drain` waits for them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[RequestState, TokenStream] = {}
        self._waits_for_idle: list[Future[None]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # around what is handed to the thread, and its end
        self._refusal: str | None = _STOPPED
        self._failure: Exception | None = None
        self._end: Future[None] = Future()

    async def __aenter__(self) -> Self:
        if self._thread is not None or not self.engine.is_idle:
            raise FlyJaxError(
                "The engine is in use already; give AsyncEngine one that decodes nothing, and enter"
                " it once at a time."
            )
        self._refusal = self._failure = None
        self._end = Future()
        self._thread = threading.Thread(target=self._run, name="fly_jax engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._thread is not None
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._commands, self._thread = queue.SimpleQueue(), None

    async def submit(self, request: Request, *, max_unread: float = math.inf) -> TokenStream:
        """Queues a request: `async for settled in await engine.submit(request)`.

        With more than `max_unread` portions of unread tokens the request is cancelled, and its
        reader told so. Raises FlyJaxError as `Engine.submit`, and EngineStopped where it has
        stopped or is being drained.
        """
        if self._refusal is not None:
            raise self._refused()
        stream = TokenStream(self, max_unread)

        def hand_in() -> TokenStream:
            stream.state = self.engine.submit(request)
            self._streams[stream.state] = stream
            return stream

        try:
            return await asyncio.wrap_future(self._do(hand_in))
        except asyncio.CancelledError:  # perhaps after it was handed in
            self.cancel(stream)
            raise

    def cancel(self, stream: TokenStream) -> None:
        """Stops a request before the next rounds. Its stream ends."""

        def stop() -> None:
            state = getattr(stream, "state", None)
            if state is not None and self._streams.pop(state, None) is not None:
                stream.arrive(None)
                self.engine.cancel(state)

        with self._lock:
            if self._thread is not None and self._refusal in (None, _DRAINED):
                self._commands.put(stop)  # an error in it ends the engine

    async def drain(self) -> None:
        """Refuses further requests, and waits until the open ones are done."""
        idle: Future[None] = Future()
        with self._lock:
            self._refusal = self._refusal or _DRAINED
        await asyncio.wrap_future(self._do(lambda: self._waits_for_idle.append(idle)))
        await asyncio.wrap_future(idle)

    async def ended(self) -> None:
        """Waits until the thread has ended; raises FlyJaxError, with the cause, where it failed."""
        await asyncio.shield(asyncio.wrap_future(self._end))
        if self._failure is not None:
            raise self._refused()

    def _do(self, command: Callable[[], _T]) -> Future[_T]:
        """Runs a command in the engine's thread, between two steps."""
        done: Future[_T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(command())
                except Exception as error:
                    done.set_exception(error)

        with self._lock:
            if self._thread is None or self._refusal not in (None, _DRAINED):
                done.set_exception(self._refused())
            else:
                self._commands.put(run)
        return done

    def _refused(self) -> EngineStopped:
        """A new error for each caller, since a traceback grows with every raise."""
        error = EngineStopped(self._refusal or _STOPPED)
        error.__cause__ = self._failure
        return error

    def _run(self) -> None:
        refusal = _STOPPED
        try:
            while self._take_commands():
                for state, settled in self.engine.step():
                    self._streams[state].arrive(settled)
                    if settled.finish_reason is not None:
                        del self._streams[state]
        except Exception as error:
            refusal = f"The engine has failed, and stopped: {error}"
            self._failure = error
        with self._lock:  # from here on nothing is handed in
            self._refusal = refusal
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                with contextlib.suppress(Exception):
                    command()
        self._tell_idle()
        for state, stream in self._streams.items():
            stream.arrive(self._refused())
            with contextlib.suppress(Exception):  # what failed may have taken the state with it
                self.engine.cancel(state)
        self._streams.clear()
        self._end.set_result(None)

    def _take_commands(self) -> bool:
        """Runs the commands, or waits for one while nothing is decoded; False at the end."""
        while True:
            if is_idle := self.engine.is_idle:
                self._tell_idle()
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _tell_idle(self) -> None:
        for one in self._waits_for_idle:
            if one.set_running_or_notify_cancel():  # unless nobody waits any more
                one.set_result(None)
        self._waits_for_idle.clear()
