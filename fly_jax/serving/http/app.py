"""The routes of the server."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Annotated, Any

import jax
from fastapi import APIRouter, Body, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from fly_jax.serving.http.connection import EventStream, in_one_piece
from fly_jax.serving.http.errors import ErrorReply, add_handlers, invalid
from fly_jax.serving.http.guard import Guard
from fly_jax.serving.http.page import HEADERS, page
from fly_jax.serving.http.protocol import ChatRequest, CompletionRequest, GenerationRequest
from fly_jax.serving.http.replies import ChatCompletion, ChatStyle, Completion, Style, TextStyle
from fly_jax.serving.http.service import COMPLETION_TOKENS, Prompt, Service

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
    limits = service.limits
    app.add_middleware(
        Guard,  # type: ignore[arg-type]
        api_key=limits.api_key,
        max_body=limits.max_body,
        on_refused=service.metrics.refused,
    )
    add_handlers(app)
    app.include_router(_answers(service))
    app.include_router(_about(service))
    return app


def _answers(service: Service) -> APIRouter:
    """Where text is asked for."""
    router = APIRouter(responses=_ERRORS)

    async def answered(
        request: Request,
        asked: GenerationRequest,
        prompts: Sequence[Prompt],
        limit: int | None,
        style: Style,
    ) -> Response:
        limits = service.limits
        answering = await service.answer(asked, prompts, limit, style)
        if asked.stream:
            return EventStream(answering, limits.request_timeout, limits.client_timeout)
        return await in_one_piece(request.receive, limits.request_timeout, answering)

    @router.post("/v1/completions", response_model=Completion)
    async def completions(
        request: Request, asked: Annotated[CompletionRequest, Body()]
    ) -> Response:
        """Continues texts."""
        limit = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        return await answered(request, asked, asked.prompts, limit, TextStyle())

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(request: Request, asked: Annotated[ChatRequest, Body()]) -> Response:
        """Answers in a conversation."""
        service.check_model(asked.model)
        if not service.has_template:
            raise invalid(
                f"{service.name!r} has no chat template, so it cannot take a conversation; send a "
                "text to /v1/completions, or start the server with an instruct model.",
                code="no_chat_template",
            )
        messages = [one.as_template for one in asked.messages]
        limit = asked.max_completion_tokens or asked.max_tokens
        return await answered(request, asked, [messages], limit, ChatStyle())

    return router


def _about(service: Service) -> APIRouter:
    """What the server says of itself."""
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
                "num_speculative_tokens": engine.spec.num_speculative_tokens,
                "max_logprobs": engine.spec.max_logprobs,
                "has_chat_template": service.has_template,
            },
        }

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorReply}})
    def one_model(name: str) -> dict[str, Any]:
        """What it is."""
        service.check_model(name)
        return model()

    @router.get("/health", responses={503: {}})
    def health() -> Response:
        """200 while requests are taken: not before all is compiled, nor when it is to stop."""
        status = 200 if service.state == "ready" else 503
        return JSONResponse({"status": service.state}, status)

    @router.get("/version")
    def version() -> dict[str, str]:
        """Of what runs here."""
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
        """The page."""
        return HTMLResponse(page(), headers=HEADERS)

    return router
