"""The routes of the server, the sending of replies, and the page at /."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.colours import MEANINGS, PALETTE, WORDS
from fly_jax.serving.http import protocol
from fly_jax.serving.http.limits import CLIENT_LEFT, Client, ClientGone, Guard
from fly_jax.serving.http.protocol import ApiError, ErrorReply
from fly_jax.serving.http.replies import ChatCompletion, ChatStyle, Completion, Style, TextStyle
from fly_jax.serving.http.service import ResponseStream, Service

_VERSION = importlib.metadata.version("fly_jax")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 408, 413, 415, 429, 503)
}


def make_app(service: Service) -> FastAPI:
    """The ASGI application over a service, which its caller makes ready."""
    app = FastAPI(title="fly_jax", version=_VERSION, docs_url=None, redoc_url=None)
    guard: Any = Guard
    app.add_middleware(guard, limits=lambda: service.limits, on_refused=service.metrics.refused)

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return protocol.as_api_error(error).response

    for kind in (ApiError, FlyJaxError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.include_router(_answers(service))
    app.include_router(_about(service))
    return app


def _answers(service: Service) -> APIRouter:
    router = APIRouter(responses=_ERRORS)

    async def answered(raw: Request, request: protocol.GenerationRequest, style: Style) -> Response:
        limits = service.limits
        salt = limits.cache_salt(raw.headers.get("authorization", ""), request.cache_salt)
        client = Client(raw.receive, limits.request_timeout)
        try:
            stream = await client.waits_for(service.answer(request, style, salt))
            if request.stream:
                return EventStream(stream, client, limits.client_timeout)
            async with stream:
                reply = await client.waits_for(stream.whole())
        except ClientGone:
            return Response(status_code=CLIENT_LEFT)
        return await asyncio.to_thread(lambda: JSONResponse(reply.model_dump(exclude_unset=True)))

    @router.post("/v1/completions", response_model=Completion)
    async def completions(raw: Request, request: protocol.CompletionRequest) -> Response:
        """Continues texts."""
        return await answered(raw, request, TextStyle())

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(raw: Request, request: protocol.ChatRequest) -> Response:
        """Continues a conversation."""
        return await answered(raw, request, ChatStyle())

    return router


def _about(service: Service) -> APIRouter:
    router, engine = APIRouter(), service.engine.engine

    def model() -> dict[str, Any]:
        return {
            "id": service.name, "object": "model", "created": service.created,
            "owned_by": "fly_jax", "max_model_len": engine.max_length,
            "fly": {
                "rule": service.builder.for_engine.rule, "rules": service.builder.names,
                "num_speculative_tokens": service.num_speculative_tokens,
                "max_logprobs": engine.spec.static.max_logprobs,
                "has_chat_template": service.has_template,
            },
        }  # fmt: skip

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """The only model."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorReply}})
    def one_model(name: str) -> dict[str, Any]:
        """The model, if it has this name."""
        service.check_model(name)
        return model()

    @router.get("/health", responses={503: {}})
    def health() -> Response:
        """Returns 200 while requests are taken, and 503 before all is compiled and at the end."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @router.get("/version")
    def version() -> dict[str, str]:
        """Versions of the package and of JAX, and the device."""
        device = jax.devices()[0].device_kind
        return {"version": _VERSION, "jax": jax.__version__, "device": device}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:  # not in a thread: two at a time would count rounds twice
        """Counters and gauges in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    def start() -> HTMLResponse:
        """The page to try the server."""
        return HTMLResponse(page(), headers=HEADERS)

    return router


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def page() -> str:
    """The page, in the words and colours of the command line."""
    kinds = {
        why.name.lower(): {"letter": why.letter, "word": word, "meaning": MEANINGS[why]}
        for why, word in WORDS.items()
    }
    text = Path(__file__).with_name("try_it.html").read_text(encoding="utf-8")
    return text.replace("/*PALETTE*/", PALETTE).replace('"KINDS"', json.dumps(kinds))


class EventStream(Response):
    """The reply as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, stream: ResponseStream, client: Client, client_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._client, self._client_seconds = stream, client, client_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; whatever ends that, ends the decoding."""
        with contextlib.suppress(ClientGone):
            async with self._stream:
                begin = {"type": "http.response.start", "status": 200}
                await self._send(send, **begin, headers=self.raw_headers)
                try:
                    await self._client.waits_for(self._events(send))
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
        """Sends a message; ClientGone if the client takes nothing any more."""
        try:
            async with asyncio.timeout(self._client_seconds):
                await send(message)
        except TimeoutError:
            raise ClientGone from None
