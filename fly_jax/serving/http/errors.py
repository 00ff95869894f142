"""What goes wrong for a client, in the shape in which OpenAI's API says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from fly_jax.errors import FlyJaxError

_INVALID = "invalid_request_error"
# A proxy or client that tries again after these makes matters worse, and OpenAI's clients would.
NO_RETRY = {"x-should-retry": "false"}


class ErrorDetail(BaseModel):
    """What went wrong.

    Attributes:
      message: a sentence.
      type: whose fault it is.
      param: the field that is wrong, if one is.
      code: a word that programs can compare.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every reply that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A reply that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Takes what the reply says.

        Args:
          status: of HTTP.
          message: see `ErrorDetail`.
          type: see `ErrorDetail`.
          param: see `ErrorDetail`.
          code: see `ErrorDetail`.
          headers: of the reply.
        """
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = ErrorReply(
            error=ErrorDetail(message=message, type=type, param=param, code=code)
        )

    @property
    def response(self) -> JSONResponse:
        """The reply."""
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def unavailable(message: str) -> ApiError:
    """503: the server is not ready, or about to stop; another one may answer."""
    return ApiError(503, message, type="service_unavailable", headers={"Retry-After": "1"})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be answered as it stands."""
    return ApiError(400, message, param=param, code=code)


def add_handlers(app: FastAPI) -> None:
    """Has every error of an app told in this shape."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return invalid(str(error)).response

    async def malformed(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response

    async def of_framework(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        message = "The server has failed in a way that it should not; its log says how."
        return ApiError(500, message, type="server_error").response

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(FlyJaxError, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(Exception, unexpected)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body, as pydantic tells it, with the path to it."""
    # A field of several types has an error of each: of use is that of the type that was given.
    error = max(errors, key=lambda one: not str(one["type"]).endswith("_type"))
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "it ends too early")
        return invalid(f"The body is not valid JSON ({reason}); correct it.")
    # Where a field may be one of several types, a part names the type, as pydantic writes it.
    parts = [str(part) for part in error["loc"][1:]]
    path = ".".join(part for part in parts if part.isidentifier() or part.isdecimal())
    if error["type"] == "extra_forbidden":
        return invalid(f"The field {path!r} is unknown; leave it out.", path, "unknown_field")
    message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    return invalid(f"{path or 'The body'}: {message}.", path or None)
