"""The server without HTTP: who is let in, how prompts become tokens, and how it comes to an end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from fly_jax.decoding.pair import Pair, check_prompt
from fly_jax.engine.request import Request
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_file import FORMAT, VERSION
from fly_jax.evaluation.mismatches import Run
from fly_jax.serving.async_engine import AsyncEngine, TokenStream
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.serving.http.protocol import (
    ApiError,
    GenerationRequest,
    Prompt,
    invalid,
    unavailable,
)
from fly_jax.serving.http.replies import Style
from fly_jax.serving.http.request_builder import RequestBuilder
from fly_jax.serving.http.response_stream import ResponseStream

_MAX_UNREAD = 1024  # dispatches


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Bounds on what clients may do.

    Attributes:
      max_queue: requests that may wait for a slot.
      max_body: bytes of a body.
      request_timeout: seconds from a request's arrival to its last token.
      client_timeout: seconds in which a client must take what is sent.
      api_key: what requests have to bring; None for nothing.
    """

    max_queue: int = 256
    max_body: int = 2 * 2**20
    request_timeout: float = 600.0
    client_timeout: float = 30.0
    api_key: str | None = None


class Service:
    """Takes requests as long as it is ready.

    Attributes:
      name: of the model.
      engine: decodes; whoever runs the service enters and leaves it.
      pair: the models.
      builder: makes the engine's requests.
      limits: what clients may do.
      metrics: of all that happens.
      state: "starting" until it is warmed up; "draining" when it is about to stop.
      created: when it began, in seconds since 1970.
      num_open: requests that are decoded or wait.
    """

    def __init__(
        self,
        name: str,
        engine: AsyncEngine,
        pair: Pair,
        builder: RequestBuilder,
        limits: ServerLimits,
    ) -> None:
        """Is not ready yet; see the class."""
        self.name, self.engine, self.pair = name, engine, pair
        self.builder, self.limits = builder, limits
        self.metrics = ServerMetrics(engine.engine)
        self.state: Literal["starting", "ready", "draining"] = "starting"
        self.created = int(time.time())
        self._open: set[ResponseStream] = set()
        self.num_open = 0
        self._protected = functools.cache(lambda patterns: pair.protected_token_ids(patterns))
        spec = engine.engine.spec
        entropy = spec.static.needs(spec.rule).entropy
        assert entropy is not None, "the engine audits"
        self._entropy = entropy.name

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Does once what the first request would wait for; see `Engine.warm_up`."""
        self.engine.engine.warm_up(on_progress)
        if self.has_template:
            with contextlib.suppress(FlyJaxError):  # it may want other messages
                self.pair.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

    @property
    def capacity(self) -> int:
        """Requests that are decoded or wait, at most."""
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
        """Conversations can be put to the model."""
        return self.pair.tokenizer.chat_template is not None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served."""
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"There is no model {name!r}; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    async def answer(self, request: GenerationRequest, style: Style) -> ResponseStream:
        """Hands a request to the engine, to be answered in the style of its endpoint.

        Raises:
          ApiError: it is not taken.
          FlyJaxError: something in it is wrong.
        """
        self.check_model(request.model)
        with self._admitted(len(request.prompts) * request.n):
            ids = [await asyncio.to_thread(self._encoded, prompt) for prompt in request.prompts]
            engine = self.engine.engine
            requests = self.builder.requests(request, ids, engine, self._protected)
            rule = self.builder.rule_name(request)
            stream = ResponseStream(
                request,
                style,
                await self._submitted(requests),
                model=self.name,
                tokenizer=self.pair.tokenizer,
                run=Run(FORMAT, VERSION, rule, self._entropy, {}),
                num_speculative_tokens=engine.spec.static.num_speculative_tokens,
                metrics=self.metrics,
                on_end=self._leave,
            )
        self._open.add(stream)
        return stream

    async def _submitted(self, requests: Sequence[Request]) -> list[TokenStream]:
        """Hands all in between the same two rounds, or none."""
        submitting = [self.engine.submit(one, max_unread=_MAX_UNREAD) for one in requests]
        found = await asyncio.gather(*submitting, return_exceptions=True)
        streams = [one for one in found if isinstance(one, TokenStream)]
        for error in found:
            if isinstance(error, BaseException):
                for stream in streams:
                    stream.stop()
                raise error
        return streams

    @contextlib.contextmanager
    def _admitted(self, number: int) -> Iterator[None]:
        """Counts answers in, and out again where they are not taken after all."""
        if self.state != "ready":
            raise unavailable(
                "The server is about to stop and takes no more requests; send them to another one."
                if self.state == "draining"
                else "The server is still starting; try again when /health says 200."
            )
        if number > self.capacity:
            raise invalid(
                f"{number} answers were asked for at once and the server takes {self.capacity} "
                "(slots and queue together); ask for fewer.",
                "n",
            )
        if self.num_open + number > self.capacity:
            raise ApiError(
                429,
                f"The queue is full: {self.num_open} requests are decoded or wait; try again.",
                type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.num_open += number
        try:
            yield
        except BaseException:
            self.num_open -= number
            raise

    def _leave(self, stream: ResponseStream) -> None:
        self._open.discard(stream)
        self.num_open -= stream.num_streams

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
        """Takes no more requests, and waits for those that are going.

        Args:
          grace_period: seconds after which those that are left are cancelled.

        Returns:
          How many replies had to be cut off.
        """
        self.state = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_period):
                while self.num_open:
                    await asyncio.sleep(0.05)
        return self.cancel()

    def cancel(self) -> int:
        """Stops decoding; returns how many replies end there."""
        for one in self._open:
            one.cancel()
        return len(self._open)
