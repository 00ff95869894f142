"""The routes of the server, the page at /, and what is turned away before anything reads it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
from fastapi import APIRouter, Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.colours import MEANINGS, PALETTE, WORDS
from fly_jax.serving.http.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    ErrorReply,
    GenerationRequest,
    as_api_error,
)
from fly_jax.serving.http.replies import ChatCompletion, ChatStyle, Completion, Style, TextStyle
from fly_jax.serving.http.response_stream import EventStream, in_one_piece
from fly_jax.serving.http.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 408, 413, 429, 503)
}


def make_app(service: Service) -> FastAPI:
    """The ASGI application.

    Args:
      service: answers; whoever runs the app makes it ready.
    """
    app = FastAPI(
        title="fly_jax",
        version=importlib.metadata.version("fly_jax"),
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(
        Guard,  # type: ignore[arg-type]
        api_key=service.limits.api_key,
        max_body=service.limits.max_body,
        on_refused=service.metrics.refused,
    )

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response

    for kind in (ApiError, FlyJaxError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.include_router(_answers(service))
    app.include_router(_about(service))
    return app


def _answers(service: Service) -> APIRouter:
    """The routes that answer with text."""
    router = APIRouter(responses=_ERRORS)

    async def answered(raw: Request, request: GenerationRequest, style: Style) -> Response:
        limits = service.limits
        stream = await service.answer(request, style)
        if request.stream:
            return EventStream(stream, limits.request_timeout, limits.client_timeout)
        return await in_one_piece(raw.receive, limits.request_timeout, stream)

    @router.post("/v1/completions", response_model=Completion)
    async def completions(raw: Request, request: Annotated[CompletionRequest, Body()]) -> Response:
        """Continues texts."""
        return await answered(raw, request, TextStyle())

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(raw: Request, request: Annotated[ChatRequest, Body()]) -> Response:
        """Answers in a conversation."""
        return await answered(raw, request, ChatStyle())

    return router


def _about(service: Service) -> APIRouter:
    """The routes that say what the server is and how it does."""
    router = APIRouter()
    engine = service.engine.engine

    def model() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "fly_jax",
            "max_model_len": engine.max_length,
            "fly": {
                "rule": service.builder.config.rule,
                "rules": service.builder.names,
                "num_speculative_tokens": engine.spec.static.num_speculative_tokens,
                "max_logprobs": engine.spec.static.max_logprobs,
                "has_chat_template": service.has_template,
            },
        }

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorReply}})
    def one_model(name: str) -> dict[str, Any]:
        """The model, if that is its name."""
        service.check_model(name)
        return model()

    @router.get("/health", responses={503: {}})
    def health() -> Response:
        """200 while requests are taken: not before all is compiled, nor when it is to stop."""
        status = 200 if service.state == "ready" else 503
        return JSONResponse({"status": service.state}, status)

    @router.get("/version")
    def version() -> dict[str, str]:
        """Versions of the package and of JAX, and the device."""
        return {
            "version": importlib.metadata.version("fly_jax"),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        }

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:  # not in a thread: two at a time would count rounds twice
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    def start() -> HTMLResponse:
        """The page to try it."""
        return HTMLResponse(page(), headers=HEADERS)

    return router


class Guard:
    """Turns away a wrong key and a body that is too large, before anything reads them."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body: int, on_refused: Callable[[int], None]
    ) -> None:
        """Stands before an ASGI application.

        Args:
          app: gets those that pass.
          api_key: what a request under /v1 has to bring; None for nothing.
          max_body: bytes of a body.
          on_refused: gets the status of each reply that is not a success.
        """
        self._app, self._max_body, self._on_refused = app, max_body, on_refused
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size = 0

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._on_refused(message["status"])
            await send(message)

        error = self._refusal(scope)
        if error is not None:
            await error.response(scope, receive, telling)
            return

        async def measured() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:  # its length was not said, or wrongly
                raise HTTPException(413, self._too_large)
            return message

        await self._app(scope, measured, telling)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._expected is not None and scope["path"].startswith("/v1"):
            given = headers.get("authorization", "").encode("latin-1", "replace")
            if not secrets.compare_digest(given, self._expected):
                return ApiError(
                    401,
                    "The API key is missing or wrong; send the server's as a bearer token.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if not re.fullmatch(r"\d{1,15}", length, re.ASCII) or int(length) > self._max_body:
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return (
            f"The body has more than {self._max_body} bytes; send less, or start the server with a "
            "larger --max_body."
        )


_FILE = Path(__file__).with_name("page.html")
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
    text = _FILE.read_text(encoding="utf-8")
    return text.replace("/*PALETTE*/", PALETTE).replace('"KINDS"', json.dumps(kinds))
