"""Requests, with OpenAI's fields and FLy's own under `fly`, and the bodies of refusals."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from fly_jax.errors import FlyJaxError
from fly_jax.models.tokenizer import check_unicode
from fly_jax.parameters import MOST_TOKENS, parameters_of
from fly_jax.verification.rules import RULES, VLLM_NAMES, Budget, from_vllm_names

_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI has it
_MOST_STOPS, _LONGEST_STOP = 16, 256
_MOST_TEXT_LOGPROBS, _MOST_CHAT_LOGPROBS = 5, 20  # as OpenAI has it
_MOST_PROMPTS = 1024
_MOST_MESSAGES = 2048  # as OpenAI has it; and parts of each
_MOST_PATTERNS, _LONGEST_SALT = 256, 256
_MOST_OTHERS = 64  # fields of an object beyond those that there are
_LONGEST_NAME = 64  # of a field that may be a misspelt one
_LONGEST_ERROR = 2000  # characters: an error quotes what was given

# Fields of OpenAI, vLLM, SGLang and llama.cpp that change the text or add to the reply, with the
# values that do not.
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_CHANGING: dict[str, list[Any]] = {
    name: one["harmless"] for one in _TABLE["changing"] for name in one["names"]
}
# Sentences in place of the framework's word or two.
_SENTENCES = {
    400: "The body cannot be read as JSON; send it in UTF-8, and with fewer levels of lists.",
    404: "There is nothing at this path; /openapi.json names the paths that there are.",
    405: "This path does not take that method; /openapi.json names those that it takes.",
}
# An unknown field this similar to a known one is taken for a misspelling of it.
_ALIKE = 0.9

# A text, its tokens, or a conversation as a chat template takes it.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

# Refuses half a surrogate pair, which JSON can spell and UTF-8 not.
_WRITTEN = AfterValidator(lambda text: check_unicode(text, "it"))
Text = Annotated[str, _WRITTEN]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
StopText = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP), _WRITTEN]
# Checks of a list stop at its first wrong entry: to report all takes seconds and gigabytes.
_Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True)]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
_TokenLists = Annotated[
    list[Annotated[list[TokenId], Field(max_length=MOST_TOKENS, fail_fast=True)]],
    Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True),
]
_Stops = Annotated[list[StopText], Field(max_length=_MOST_STOPS, fail_fast=True)]


class _Bounded(BaseModel):
    """An object of few fields, however many bytes a body may have."""

    @model_validator(mode="before")
    @classmethod
    def _has_few(cls, given: Any) -> Any:
        most = len(cls.model_fields) + _MOST_OTHERS
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"there are {len(given)} fields; send at most {most}")
        return given


class _Fields(_Bounded):
    """Fields that are known, and others, which are ignored where they change nothing."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _others_change_nothing(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _CHANGING and value is not None and value not in _CHANGING[name]:
                raise ValueError(f"{name} is {value!r}, which is not done here; leave it out")
        return self


class _FlyFields(_Bounded):
    """Settings of FLy for one request; numbers not given are the server's. No others are taken.

    `VLLM_NAMES` has other names of some fields.

    Attributes:
      rule: an expression of the rules that the server has, such as "fly | margin", or exact.
      protect: those of the server's patterns that hold; [] for none, and all if not given.
      audit: has every mismatch that was kept or refused in the reply.
      stream_why: has every token in the chunks of a stream, with why it stands there.
    """

    model_config = ConfigDict(extra="forbid")

    rule: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    protect: Annotated[list[Text], Field(max_length=_MOST_PATTERNS, fail_fast=True)] | None = None
    audit: bool = False
    stream_why: bool = False

    @model_validator(mode="before")
    @classmethod
    def _ours(cls, given: Any) -> Any:
        return from_vllm_names(given) if isinstance(given, dict) else given


FlyFields: Any = pydantic.create_model(
    "FlyFields",
    __base__=_FlyFields,
    __doc__=_FlyFields.__doc__,
    **{  # type: ignore[call-overload]
        one.name: (one.kind | None, Field(None, description=f"{one.help}: {one.described}"))
        for declaring in (*RULES.values(), Budget)
        for one in parameters_of(declaring)
    },
)


class StreamOptions(_Fields):
    """Options of a stream: a chunk of the usage and the metrics at its end."""

    include_usage: bool = False


class _GenerationFields(_Fields):
    """Fields that both endpoints take.

    Attributes:
      model: as /v1/models names it; the only one there is if not given.
      max_tokens: of each answer.
      temperature: 0 is greedy; the server's if not given.
      top_k: 0 or -1 for all.
      n: answers to each prompt, which differ only where they are drawn.
      max_completion_tokens: another name of max_tokens.
      seed: of the draws, none for -1; of the i-th answer it is seed + i.
      stop: texts before which an answer ends.
      ignore_eos: goes on to max_tokens, whatever ends of text come.
      cache_salt: shares beginnings of prompts only with requests that give the same.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    n: Annotated[
        int, BeforeValidator(lambda n: 1 if n is None else n), Field(ge=1, le=_MOST_PROMPTS)
    ] = 1
    seed: Annotated[
        Annotated[int, Field(ge=-(2**63), lt=2**63)] | None,
        BeforeValidator(lambda seed: None if seed == -1 else seed),
    ] = None
    stop: StopText | _Stops | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=_LONGEST_SALT)] | None = None
    fly: Annotated[FlyFields, BeforeValidator(lambda given: {} if given is None else given)] = (
        Field(default_factory=FlyFields)
    )

    @model_validator(mode="after")
    def _others_are_not_misspelt(self) -> Self:
        for name in self.model_extra or {}:
            if name in VLLM_NAMES or name in FlyFields.model_fields:
                raise ValueError(f"{name} stands beside the field fly; give it within")
            known = type(self).model_fields if len(name) <= _LONGEST_NAME else ()
            if meant := difflib.get_close_matches(name, known, 1, _ALIKE):
                raise ValueError(f"there is no field {name!r}; write {meant[0]!r}, or leave it out")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        return self

    _usual_limit: ClassVar[int | None] = None

    @property
    def limit(self) -> int | None:
        """The most tokens of each answer, by either name; None for all that there is room for."""
        return self.max_completion_tokens or self.max_tokens or self._usual_limit

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(_GenerationFields):
    """The body of /v1/completions.

    Attributes:
      prompt: a text, its tokens, or several of either.
      logprobs: gives the log-probability of each token, and so many of the most probable ones.
    """

    prompt: Text | _Tokens | _Texts | _TokenLists
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TEXT_LOGPROBS, strict=True)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is {self.best_of}, which is not done here; give n")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompt, or each of several."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    _usual_limit: ClassVar[int | None] = _COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives at each position; None for no log-probabilities."""
        return self.logprobs


class TextPart(_Fields):
    """A piece of a message; only text is taken."""

    type: Annotated[str, Field(pattern="^text$")]
    text: Text


class Message(_Fields):
    """A message of a conversation; the model's template knows which roles there are."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(max_length=_MOST_MESSAGES, fail_fast=True)]

    @property
    def as_template(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        given = self.content
        text = given if isinstance(given, str) else "\n".join(part.text for part in given)
        return {"role": self.role, "content": text}


class ChatRequest(_GenerationFields):
    """The body of /v1/chat/completions.

    Attributes:
      logprobs: gives the log-probability of each token.
      top_logprobs: gives with it so many of the most probable ones.
    """

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    ]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_CHAT_LOGPROBS)] | None = None
    add_special_tokens: Literal[False] | None = None  # the template has its own

    @model_validator(mode="after")
    def _fields_that_go_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            alone = f"top_logprobs is {self.top_logprobs} without logprobs"
            raise ValueError(f"{alone}; give logprobs=true with it")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The request's conversation, which is its only prompt."""
        return [[one.as_template for one in self.messages]]

    @property
    def num_logprobs(self) -> int | None:
        """The alternatives at each position; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


GenerationRequest = CompletionRequest | ChatRequest


class ErrorDetail(BaseModel):
    """An error for people and, by its code, for programs; the type says whose fault it is."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every reply that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A reply that is not a success: its HTTP status and headers, and an `ErrorDetail`."""

    def __init__(
        self, status: int, message: str, *, type: str = "invalid_request_error",
        param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        if len(message) > _LONGEST_ERROR:
            message = f"{message[: _LONGEST_ERROR - 2]} …"
        super().__init__(message)
        self.status, self.headers = status, headers
        detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.body = ErrorReply(error=detail)

    @property
    def response(self) -> JSONResponse:
        """The reply in OpenAI's form for errors."""
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def unavailable(message: str) -> ApiError:
    """The error 503: the server is not ready, or about to stop; another one may answer."""
    return ApiError(503, message, type="service_unavailable", headers={"Retry-After": "1"})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error 400: the request cannot be answered as it stands."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The reply to an error of any kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return of_validation(error.errors())
    if isinstance(error, HTTPException):
        said = _SENTENCES.get(error.status_code, str(error.detail))
        code = "body_too_large" if error.status_code == 413 else None
        return ApiError(error.status_code, said, code=code, headers=error.headers)
    if isinstance(error, FlyJaxError):
        return invalid(str(error))
    message = "The server has failed in a way that it should not; its log says how."
    return ApiError(500, message, type="server_error")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first error in a body, as pydantic tells it, with the path to it."""
    # A field of several types has an error of each; that of the given type, or the deepest, helps.
    error = max(errors, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "it ends too early")
        return invalid(f"The body is not valid JSON ({reason}); correct it.")
    # Where a field may be one of several types, a part names the type, as pydantic writes it.
    parts = [str(part) for part in error["loc"][1:]]
    path = ".".join(part for part in parts if part.isidentifier() or part.isdecimal())
    if error["type"] == "extra_forbidden":
        if not path.endswith(parts[-1]):
            path += f".{parts[-1][:_LONGEST_NAME]}"
        return invalid(f"The field {path!r} is unknown; leave it out.", path, "unknown_field")
    message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    return invalid(f"{path or 'The body'}: {message}.", path or None)
