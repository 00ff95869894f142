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

from fly_jax.decoding.generation import Settled
from fly_jax.decoding.reports import TokenReport
from fly_jax.errors import FlyJaxError
from fly_jax.models.tokenizers.tokenizer import Tokenizer
from fly_jax.serving.async_engine import TokenStream
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.serving.http.protocol import NO_RETRY, ApiError, GenerationRequest, unavailable
from fly_jax.serving.http.replies import (
    AnswerAuditor,
    CachedTokens,
    ChoiceExtras,
    Reply,
    RequestMetrics,
    Style,
    Token,
    Usage,
    speculative_decoding,
)


@dataclasses.dataclass
class _Answer:
    """One of the streams, as far as it has come."""

    stream: TokenStream
    texts: list[str] = dataclasses.field(default_factory=list)
    last: float | None = None


class ResponseStream:
    """Makes replies of what the engine gives; `async with` frees the slots, whatever happens."""

    def __init__(
        self,
        asked: GenerationRequest,
        style: Style,
        streams: Sequence[TokenStream],
        auditor: AnswerAuditor,
        *,
        model: str,
        num_speculative_tokens: int,
        metrics: ServerMetrics,
        left: Callable[[ResponseStream], None],
    ) -> None:
        """Begins to answer.

        Args:
          asked: by the client.
          style: of the endpoint.
          streams: n of each prompt.
          auditor: says what became of mismatches, and what tokens spell.
          model: its name.
          num_speculative_tokens: K.
          metrics: counts what settles.
          left: is told when no more will come of it.
        """
        self._asked, self._style, self._auditor = asked, style, auditor
        self._answers = [_Answer(stream) for stream in streams]
        self._k, self._metrics, self._left = num_speculative_tokens, metrics, left
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
        self._left(self)
        for answer in self._answers:
            self._metrics.ended(answer.stream.state)

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
                finish_reason=answer.stream.state.generation.finish_reason,
                **self._logprobs(answer, 0),
                **self._extras(answer, is_last=True),
            )
            for index, answer in enumerate(self._answers)
        ]
        return self._style.whole(
            object=self._style.whole_object,
            choices=choices,
            usage=self._usage(),
            metrics=self._figures(),
            **self._fields,
        )

    async def chunks(self) -> AsyncGenerator[Reply]:
        """The reply as it comes.

        Raises:
          ApiError: the engine has stopped, or was told to.
        """
        options = self._asked.stream_options
        ends_with_usage = options is not None and options.include_usage
        unfinished = len(self._answers)
        async for index, settled in self._settled():
            answer = self._answers[index]
            begin = len(answer.texts) - len(settled.texts)
            tokens = self._tokens(answer, begin)
            logprobs = self._logprobs(answer, begin)
            is_last = settled.finish_reason is not None
            unfinished -= is_last
            text, is_first = "".join(settled.texts), begin == 0
            if text or is_last or is_first or tokens or logprobs:
                figures = {}
                if not unfinished and not ends_with_usage:
                    figures["metrics"] = self._figures()
                fields = logprobs | self._extras(answer, tokens, is_last=is_last)
                piece = self._style.piece(
                    text, is_first, index=index, finish_reason=settled.finish_reason, **fields
                )
                yield self._chunk([piece], **figures)
        if ends_with_usage:
            yield self._chunk([], usage=self._usage(), metrics=self._figures())

    def _chunk(self, choices: list[Any], **fields: Any) -> Reply:
        return self._style.chunk(
            object=self._style.chunk_object, choices=choices, **self._fields, **fields
        )

    async def _settled(self) -> AsyncGenerator[tuple[int, Settled]]:
        """What settles of all answers, as it comes."""
        try:
            async with contextlib.aclosing(
                merged([answer.stream for answer in self._answers])
            ) as found:
                async for index, settled in found:
                    self._note(self._answers[index], settled)
                    yield index, settled
        except FlyJaxError as error:
            raise unavailable(str(error)) from error

    def _note(self, answer: _Answer, settled: Settled) -> None:
        now = time.perf_counter()
        self._metrics.settled(settled, None if answer.last is None else now - answer.last)
        answer.last = now
        answer.texts += settled.texts

    def _logprobs(self, answer: _Answer, begin: int) -> dict[str, Any]:
        """The field `logprobs` of the tokens from `begin` on, if it was asked for."""
        if self._asked.num_logprobs is None:
            return {}
        found, texts = answer.stream.state.generation.logprobs, answer.texts
        num_before = sum(map(len, texts[:begin]))
        of = self._style.logprobs(
            found[begin : len(texts)], texts[begin:], num_before, self._auditor.tokenizer
        )
        return {"logprobs": of}

    def _extras(
        self, answer: _Answer, tokens: Sequence[Token] = (), *, is_last: bool
    ) -> dict[str, Any]:
        """The field `fly` of a piece, where there is something for it."""
        fields = dict[str, Any]()
        fly = self._asked.fly
        if fly is not None and fly.audit and is_last:
            fields["audit"] = self._auditor.audit(answer.stream.state)
        if tokens:
            fields["tokens"] = list(tokens)
        return {"fly": ChoiceExtras(**fields)} if fields else {}

    def _tokens(self, answer: _Answer, begin: int) -> list[Token]:
        fly = self._asked.fly
        if fly is None or not fly.stream_why:
            return []
        texts = answer.texts
        reports = answer.stream.state.generation.reports[begin : len(texts)]
        return [
            _token(report, text, self._auditor.tokenizer)
            for report, text in zip(reports, texts[begin:], strict=True)
        ]

    def _usage(self) -> Usage:
        states = [answer.stream.state for answer in self._answers]
        firsts = states[:: self._asked.n]
        prompt = sum(len(one.request.prompt) for one in firsts)
        completion = sum(len(one.generation.token_ids) for one in states)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(one.num_reused for one in firsts)),
        )

    def _figures(self) -> RequestMetrics:
        states = [answer.stream.state for answer in self._answers]
        submitted = min(one.submitted for one in states)
        finished = max(one.finished or submitted for one in states)
        generations = [one.generation for one in states]
        waits, decodes, per_token = [0.0], [0.0], list[float]()
        firsts = [0.0]
        for one in states:
            assert one.seated is not None
            assert one.first_token is not None
            assert one.finished is not None
            firsts.append(one.first_token - one.submitted)
            waits.append(one.seated - one.submitted)
            decodes.append(one.finished - one.first_token)
            rest = len(one.generation.token_ids) - 1
            per_token += [decodes[-1] / rest] if rest > 0 else []
        number = sum(len(one.token_ids) for one in generations)
        return RequestMetrics(
            time_to_first_token_ms=1e3 * max(firsts),
            generation_time_ms=1e3 * max(decodes),
            queue_time_ms=1e3 * max(waits),
            mean_itl_ms=1e3 * max(per_token) if per_token else None,
            tokens_per_second=number / max(finished - submitted, 1e-9),
            speculative_decoding=speculative_decoding(generations, self._k),
        )


def _token(report: TokenReport, text: str, tokenizer: Tokenizer) -> Token:
    probability = None
    if report.token_id == report.choice_id:
        probability = report.choice_probability
    elif report.token_id == report.draft_id:
        probability = report.draft_probability
    other, other_probability = None, None
    if report.why.letter == "r":
        other, other_probability = report.choice_id, report.choice_probability
    elif report.why.letter == "c" and report.draft_id is not None:
        other, other_probability = report.draft_id, report.draft_probability
    return Token(
        id=report.token_id,
        text=text,
        why=report.why.name.lower(),
        other=None if other is None else tokenizer.token_text(other),
        probability=probability,
        other_probability=other_probability,
        entropy=report.entropy,
    )


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, Settled]]:
    """What several streams give, as it comes, with the index of the stream.

    Raises:
      FlyJaxError: one of them ended before its last token.
    """

    def next_of(index: int) -> asyncio.Task[Settled | None]:
        return asyncio.create_task(_next(streams[index]))

    waiting = {next_of(index): index for index in range(len(streams))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, settled = waiting.pop(task), task.result()
                if settled is None:
                    raise FlyJaxError("The request was stopped before it was done; send it again.")
                yield index, settled
                if settled.finish_reason is None:
                    waiting[next_of(index)] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: TokenStream) -> Settled | None:
    return await anext(stream, None)


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
