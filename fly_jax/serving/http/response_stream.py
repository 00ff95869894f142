"""One request while it is answered: its tokens, its replies, and a client that may leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fly_jax.engine.request import RequestState, Settled
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.mismatches import Run
from fly_jax.models.tokenizer import Tokenizer
from fly_jax.serving.async_engine import TokenStream
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.serving.http.protocol import NO_RETRY, ApiError, GenerationRequest, unavailable
from fly_jax.serving.http.replies import (
    AnswerAudit,
    ChoiceExtras,
    Reply,
    RequestMetrics,
    Style,
    Token,
    Usage,
)

_T = TypeVar("_T")
_CLIENT_LEFT = 499  # as nginx has it; nobody reads it


@dataclasses.dataclass
class _Answer:
    """A stream as far as it has come: the texts of its tokens, and when the last of them came."""

    stream: TokenStream
    texts: list[str] = dataclasses.field(default_factory=list)
    last: float | None = None

    @property
    def state(self) -> RequestState:
        return self.stream.state


class ResponseStream:
    """Makes replies of what the engine gives; `async with` frees the slots, whatever happens."""

    def __init__(
        self,
        request: GenerationRequest,
        style: Style,
        streams: Sequence[TokenStream],
        *,
        model: str,
        tokenizer: Tokenizer,
        run: Run,
        num_speculative_tokens: int,
        metrics: ServerMetrics,
        on_end: Callable[[ResponseStream], None],
    ) -> None:
        """Begins to answer.

        Args:
          request: the client's.
          style: of the endpoint.
          streams: n of each prompt.
          model: its name.
          tokenizer: the model's.
          run: the rule and what entropies are, for audits.
          num_speculative_tokens: K.
          metrics: counts what settles.
          on_end: is called when no more will come.
        """
        self._request, self._style, self._tokenizer, self._run = request, style, tokenizer, run
        self._answers = [_Answer(stream) for stream in streams]
        self._k, self._metrics, self._on_end = num_speculative_tokens, metrics, on_end
        self._fields: dict[str, Any] = {
            "id": f"{style.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def num_streams(self) -> int:
        """Requests that the engine has of it."""
        return len(self._answers)

    async def __aenter__(self) -> ResponseStream:
        """Nothing to be done."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels what is still going."""
        self.cancel()
        self._on_end(self)
        for answer in self._answers:
            self._metrics.ended(answer.state)

    def cancel(self) -> None:
        """Stops decoding; whoever waits for a reply is told so."""
        for answer in self._answers:
            answer.stream.stop()

    async def whole(self) -> Reply:
        """The reply in one piece.

        Raises:
          ApiError: the engine has stopped, or was told to.
        """
        async for _ in self._settled():
            pass
        choices = [
            self._style.answer(
                "".join(answer.texts),
                index=index,
                finish_reason=answer.state.generation.finish_reason,
                **self._extras(answer, 0, is_last=True, is_whole=True),
            )
            for index, answer in enumerate(self._answers)
        ]
        return self._style.whole(
            choices=choices, usage=self._usage(), metrics=self._figures(), **self._fields
        )

    async def chunks(self) -> AsyncGenerator[Reply]:
        """The reply as it comes.

        Raises:
          ApiError: the engine has stopped, or was told to.
        """
        options = self._request.stream_options
        ends_with_usage = options is not None and options.include_usage
        unfinished = len(self._answers)
        async for index, settled in self._settled():
            answer = self._answers[index]
            begin = len(answer.texts) - len(settled.texts)
            text, is_last = "".join(settled.texts), settled.finish_reason is not None
            unfinished -= is_last
            extras = self._extras(answer, begin, is_last=is_last, is_whole=False)
            if not (text or is_last or begin == 0 or extras):
                continue
            piece = self._style.piece(
                text, begin == 0, index=index, finish_reason=settled.finish_reason, **extras
            )
            is_end = not unfinished and not ends_with_usage
            figures = {"metrics": self._figures()} if is_end else {}
            yield self._style.chunk(choices=[piece], **self._fields, **figures)
        if ends_with_usage:
            yield self._style.chunk(
                choices=[], usage=self._usage(), metrics=self._figures(), **self._fields
            )

    async def _settled(self) -> AsyncGenerator[tuple[int, Settled]]:
        """Waits for the next tokens of any answer, and counts them."""
        streams = [answer.stream for answer in self._answers]
        try:
            async with contextlib.aclosing(merged(streams)) as found:
                async for index, settled in found:
                    answer, now = self._answers[index], time.perf_counter()
                    self._metrics.settled(
                        settled, None if answer.last is None else now - answer.last
                    )
                    answer.last = now
                    answer.texts += settled.texts
                    yield index, settled
        except FlyJaxError as error:
            raise unavailable(str(error)) from error

    def _extras(
        self, answer: _Answer, begin: int, *, is_last: bool, is_whole: bool
    ) -> dict[str, Any]:
        """The fields `logprobs` and `fly` of the tokens from `begin` on, as far as asked for."""
        generation, texts = answer.state.generation, answer.texts[begin:]
        here = slice(begin, len(answer.texts))
        found, extras = dict[str, Any](), dict[str, Any]()
        if self._request.num_logprobs is not None:
            num_before = sum(map(len, answer.texts[:begin]))
            found["logprobs"] = self._style.logprobs(
                generation.logprobs[here], texts, num_before, self._tokenizer
            )
        if self._request.fly.audit and is_last:
            extras["audit"] = AnswerAudit.of(answer.state, self._tokenizer, self._run)
        if self._request.fly.stream_why and not is_whole:
            extras["tokens"] = [
                Token.of(report, text, self._tokenizer)
                for report, text in zip(generation.reports[here], texts, strict=True)
            ]
        return found | ({"fly": ChoiceExtras(**extras)} if extras else {})

    def _usage(self) -> Usage:
        return Usage.of([answer.state for answer in self._answers], self._request.n)

    def _figures(self) -> RequestMetrics:
        return RequestMetrics.of([answer.state for answer in self._answers], self._k)


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, Settled]]:
    """Yields from several streams as tokens come, each with the index of its stream.

    Raises:
      FlyJaxError: one of them ended before its last token.
    """

    async def next_of(index: int) -> Settled | None:
        return await anext(streams[index], None)

    waiting = {asyncio.create_task(next_of(index)): index for index in range(len(streams))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, settled = waiting.pop(task), task.result()
                if settled is None:
                    raise FlyJaxError("The request was stopped before it was done; send it again.")
                yield index, settled
                if settled.finish_reason is None:
                    waiting[asyncio.create_task(next_of(index))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


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


async def in_one_piece(receive: Receive, seconds: float, stream: ResponseStream) -> Response:
    """The whole reply, as JSON."""
    async with stream:
        try:
            reply = await unless_gone(receive, seconds, stream.whole())
        except ClientGone:
            return Response(status_code=_CLIENT_LEFT)
    return JSONResponse(reply.model_dump(exclude_unset=True))


class EventStream(Response):
    """The reply as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, stream: ResponseStream, seconds: float, client_seconds: float) -> None:
        """Sends nothing yet.

        Args:
          stream: gives the events.
          seconds: in which all has to be sent.
          client_seconds: in which the client has to take what is sent, or is given up.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._seconds, self._client_seconds = stream, seconds, client_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; whatever ends that ends the decoding."""
        with contextlib.suppress(ClientGone):
            async with self._stream:
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
        async for chunk in self._stream.chunks():
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
