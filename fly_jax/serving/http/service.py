"""The server without HTTP: admission, prompts as tokens, and the life of replies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fly_jax.decoding.pair import Pair, check_prompt
from fly_jax.engine.request import Request, Settled
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_file import Run
from fly_jax.serving.async_engine import AsyncEngine, EngineStopped, TokenStream
from fly_jax.serving.http import replies
from fly_jax.serving.http.limits import ServerLimits
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.serving.http.protocol import ApiError, GenerationRequest, Prompt, invalid, unavailable
from fly_jax.serving.http.request_builder import RequestBuilder

_MAX_UNREAD = 1024  # dispatches
_KEPT_PATTERNS = 64  # of which clients may send any number


class Service:
    """A service of requests while it is ready; its caller enters and leaves the engine.

    Attributes:
      state: "starting" until warm; "draining" before it stops; "stopped" as replies are cut off.
      num_open: requests that are decoded or wait.
    """

    def __init__(
        self, name: str, engine: AsyncEngine, pair: Pair, builder: RequestBuilder,
        limits: ServerLimits,
    ) -> None:  # fmt: skip
        self.name, self.engine, self.pair = name, engine, pair
        self.builder, self.limits = builder, limits
        self.metrics = ServerMetrics(engine.engine)
        self.state: Literal["starting", "ready", "draining", "stopped"] = "starting"
        self.created = int(time.time())
        self._open: set[ResponseStream] = set()
        self.num_open = 0
        self._protected = functools.lru_cache(_KEPT_PATTERNS)(pair.protected_token_ids)
        spec = engine.engine.spec
        self.num_speculative_tokens = spec.static.num_speculative_tokens
        entropy = spec.static.needs(spec.rule).entropy
        assert entropy is not None, "the engine audits"
        self.entropy_measure = entropy.name

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compiles what the first request would wait for; see `Engine.warm_up`."""
        self.engine.engine.warm_up(on_progress)
        if self.has_template:
            with contextlib.suppress(FlyJaxError):  # it may want other messages
                self.pair.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

    @property
    def capacity(self) -> int:
        """The most requests that are decoded or wait."""
        return len(self.engine.engine.slots.occupants) + self.limits.max_queue

    @property
    def described(self) -> str:
        """The model, its rules and its slots, in a line."""
        engine = self.engine.engine
        return (
            f"{self.name}, rule {self.builder.config.rule} (requests may ask for "
            f"{', '.join(self.builder.names)}), {len(engine.slots.occupants)} slots of "
            f"{engine.max_length} tokens"
        )

    @property
    def has_template(self) -> bool:
        """Tells whether the model takes conversations."""
        return self.pair.tokenizer.chat_template is not None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served."""
        if name not in (None, self.name):
            said = f"There is no model {name!r}; this server has {self.name!r}."
            raise ApiError(404, said, param="model", code="model_not_found")

    async def answer(
        self, request: GenerationRequest, style: replies.Style, cache_salt: str = ""
    ) -> ResponseStream:
        """Submits a request to the engine; ApiError or FlyJaxError where it is not taken."""
        self.check_model(request.model)
        with self._admitted(len(request.prompts) * request.n):
            ids = [await asyncio.to_thread(self._encoded, prompt) for prompt in request.prompts]
            engine, protected = self.engine.engine, self._protected
            made = self.builder.requests  # patterns are looked for in the whole vocabulary
            requests = await asyncio.to_thread(made, request, ids, engine, protected, cache_salt)
            stream = ResponseStream(self, request, style, await self._submitted(requests))
        self._open.add(stream)
        if self.state == "stopped":  # while the prompts were made into tokens
            stream.cancel()
        return stream

    async def _submitted(self, requests: Sequence[Request]) -> list[TokenStream]:
        """Submits all requests between the same two rounds, or none."""
        handing_in = (self.engine.submit(one, max_unread=_MAX_UNREAD) for one in requests)
        submitting = [asyncio.create_task(one) for one in handing_in]
        try:
            return await asyncio.gather(*submitting)
        except BaseException as error:
            for one in submitting:
                one.cancel()
                one.add_done_callback(_stop)
            if isinstance(error, EngineStopped):
                raise unavailable(str(error)) from error
            raise

    @contextlib.contextmanager
    def _admitted(self, number: int) -> Iterator[None]:
        """Counts answers in, and out again where they are not taken after all."""
        if self.state != "ready":
            raise unavailable(
                "The server is about to stop and takes no more requests; send them to another one."
                if self.state != "starting"
                else "The server is still starting; try again when /health says 200."
            )
        if number > self.capacity:
            raise invalid(
                f"{number} answers were asked for at once and the server takes {self.capacity} "
                "(slots and queue together); ask for fewer."
            )
        if self.num_open + number > self.capacity:
            said = f"The queue is full: {self.num_open} requests are decoded or wait; try again."
            later = {"Retry-After": "1"}
            raise ApiError(429, said, type="rate_limit_error", code="queue_full", headers=later)
        self.num_open += number
        try:
            yield
        except BaseException:
            self.num_open -= number
            raise

    def leave(self, stream: ResponseStream) -> None:
        """Counts out a reply of which no more will come, and its answers that were cut off."""
        self._open.discard(stream)
        self.num_open -= sum(not answer.is_done for answer in stream.answers)

    def _encoded(self, prompt: Prompt) -> Sequence[int]:
        tokenizer, engine = self.pair.tokenizer, self.engine.engine
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            if not self.has_template:
                raise invalid(
                    f"{self.name!r} has no chat template, so it cannot take a conversation; send a "
                    "text to /v1/completions, or start the server with an instruct model.",
                    code="no_chat_template",
                )
            ids = tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        if len(ids) >= engine.max_length:
            raise invalid(
                f"The prompt has {len(ids)} tokens and the server takes {engine.max_length} with "
                "the answer; shorten it, or start the server with a larger --max_length.",
                code="context_length_exceeded",
            )
        return check_prompt(ids, self.pair.target.config)

    async def drain(self, grace_period: float) -> int:
        """Waits `grace_period` seconds for the open requests; returns how many were cut off."""
        self.state = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_period):
                while self.num_open or self._open:  # a reply may still be written
                    await asyncio.sleep(0.05)
        return self.cancel()

    def cancel(self) -> int:
        """Stops decoding; returns how many replies that cuts off."""
        self.state = "stopped"
        for one in self._open:
            one.cancel()
        return len(self._open)


def _stop(submitted: asyncio.Task[TokenStream]) -> None:
    """Stops a request that no reader waits for, if it was submitted."""
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().stop()


@dataclasses.dataclass
class _Answer:
    """A stream so far: the texts of its tokens, the time of the last, and if it was that."""

    stream: TokenStream
    texts: list[str] = dataclasses.field(default_factory=list)
    last: float | None = None
    is_done: bool = False


class ResponseStream:
    """A reply made of the engine's tokens; `async with` frees the slots, whatever happens."""

    def __init__(
        self, service: Service, request: GenerationRequest, style: replies.Style,
        streams: Sequence[TokenStream],
    ) -> None:  # fmt: skip
        self._service, self._request, self._style = service, request, style
        self.answers = [_Answer(stream) for stream in streams]
        self._fields: dict[str, Any] = {
            "id": f"{style.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
        }

    async def __aenter__(self) -> ResponseStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        self._service.leave(self)
        for answer in self.answers:
            self._service.metrics.ended(answer.stream.state)

    def cancel(self) -> None:
        """Stops decoding, and tells the reader."""
        for answer in self.answers:
            answer.stream.stop()

    async def whole(self) -> replies.Reply:
        """The reply in one piece; ApiError where the engine has stopped."""
        async for _ in self._settled():
            pass
        return await asyncio.to_thread(self._built)  # which may take seconds: others go on

    def _built(self) -> replies.Reply:
        choices = []
        for index, answer in enumerate(self.answers):
            extras = self._extras(answer, 0, is_last=True)
            extras |= {"finish_reason": answer.stream.state.generation.finish_reason}
            choices.append(self._style.answer("".join(answer.texts), index=index, **extras))
        return self._style.whole(choices=choices, **self._fields, **self._totals())

    async def chunks(self) -> AsyncGenerator[replies.Reply]:
        """Yields the reply as it comes; ApiError where the engine has stopped."""
        options = self._request.stream_options
        ends_with_usage = options is not None and options.include_usage
        unfinished = len(self.answers)
        async for index, settled in self._settled():
            answer = self.answers[index]
            begin = len(answer.texts) - len(settled.texts)
            text, is_last = "".join(settled.texts), settled.finish_reason is not None
            unfinished -= is_last
            extras = self._extras(answer, begin, is_last=is_last)
            if not (text or is_last or begin == 0 or extras):
                continue
            extras |= {"index": index, "finish_reason": settled.finish_reason}
            piece = self._style.piece(text, begin == 0, **extras)
            is_end = not unfinished and not ends_with_usage
            figures = {"metrics": self._totals()["metrics"]} if is_end else {}
            yield self._style.chunk(choices=[piece], **self._fields, **figures)
        if ends_with_usage:
            yield self._style.chunk(choices=[], **self._fields, **self._totals())

    async def _settled(self) -> AsyncGenerator[tuple[int, Settled]]:
        """Yields the next tokens of any answer, with its index, and counts them."""
        streams = [answer.stream for answer in self.answers]
        try:
            async with contextlib.aclosing(merged(streams)) as found:
                async for index, settled in found:
                    answer, now = self.answers[index], time.perf_counter()
                    since = None if answer.last is None else now - answer.last
                    self._service.metrics.settled(settled, since)
                    answer.last = now
                    answer.texts += settled.texts
                    if settled.finish_reason is not None:  # its place in the queue is free
                        answer.is_done = True
                        self._service.num_open -= 1
                    yield index, settled
        except FlyJaxError as error:
            raise unavailable(str(error)) from error

    def _extras(self, answer: _Answer, begin: int, *, is_last: bool) -> dict[str, Any]:
        """The fields `logprobs` and `fly` of the tokens from `begin` on, as far as asked for."""
        state, texts = answer.stream.state, answer.texts[begin:]
        here = slice(begin, len(answer.texts))
        found, extras = dict[str, Any](), dict[str, Any]()
        tokenizer = self._service.pair.tokenizer
        if self._request.num_logprobs is not None:
            num_before = sum(map(len, answer.texts[:begin]))
            given = state.generation.logprobs[here]
            found["logprobs"] = self._style.logprobs(given, texts, num_before, tokenizer)
        if self._request.fly.audit and is_last:
            rule = self._service.builder.rule_name(self._request)
            run = Run(rule, self._service.entropy_measure, {})
            extras["audit"] = replies.AnswerAudit.of(state, tokenizer, run)
        if self._request.fly.stream_why and self._request.stream:
            extras["tokens"] = [
                replies.Token.of(report, text, tokenizer)
                for report, text in zip(state.generation.reports[here], texts, strict=True)
            ]
        return found | ({"fly": replies.ChoiceExtras(**extras)} if extras else {})

    def _totals(self) -> dict[str, Any]:
        states = [answer.stream.state for answer in self.answers]
        return {
            "usage": replies.Usage.of(states, self._request.n),
            "metrics": replies.RequestMetrics.of(states, self._service.num_speculative_tokens),
        }


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, Settled]]:
    """Yields tokens with their stream's index; raises FlyJaxError where one breaks off."""

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
