"""The bodies of replies: OpenAI's objects, with `metrics` and `fly` beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from fly_jax.decoding.reports import TokenLogprobs
from fly_jax.evaluation.audit import Mismatch
from fly_jax.models.tokenizers.tokenizer import Tokenizer
from fly_jax.serving.http.logprobs import (
    ChatLogprobs,
    TextLogprobs,
    chat_logprobs,
    text_logprobs,
)
from fly_jax.serving.http.speculative import SpeculativeDecoding

FinishReason = Literal["stop", "length"]


class CachedTokens(BaseModel):
    """How much of a prompt did not have to be run.

    Attributes:
      cached_tokens: tokens that another request had brought into the caches.
    """

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request.

    Attributes:
      prompt_tokens: of its prompts, each counted once.
      completion_tokens: of all answers.
      total_tokens: of both.
      prompt_tokens_details: see `CachedTokens`.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Metrics(BaseModel):
    """What a request took, by vLLM's names; times of several answers are those of the slowest.

    Attributes:
      time_to_first_token_ms: from the arrival.
      generation_time_ms: from the first token to the last.
      queue_time_ms: from the arrival to a slot.
      mean_itl_ms: generation time per token after the first; None with one token.
      tokens_per_second: of all answers, since the arrival.
      speculative_decoding: see there.
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float
    speculative_decoding: SpeculativeDecoding


class Audit(BaseModel):
    """Every mismatch of an answer.

    Attributes:
      rule: that decided.
      entropy_measure: "top_3" over so many most probable tokens in nats, "full" over all, or
        "normalized".
      rescues: those kept.
      refusals: those refused.
    """

    rule: str
    entropy_measure: str
    rescues: list[Mismatch]
    refusals: list[Mismatch]


class Token(BaseModel):
    """A token of a stream, and why it stands there.

    Attributes:
      id: the token.
      text: what it adds to the answer.
      why: matched, rescued, corrected or bonus.
      other: what would stand there otherwise: of a rescued token the target's own, of a corrected
        one the draft's.
      probability: of the token in the target's plain softmax, where it is the draft's or the
        target's choice.
      other_probability: of the other one.
      entropy: of the target there.
    """

    id: int
    text: str
    why: str
    other: str | None
    probability: float | None
    other_probability: float | None
    entropy: float


class ChoiceExtras(BaseModel):
    """What FLy adds to an answer, as far as it was asked for.

    Attributes:
      audit: with `fly.audit`.
      tokens: with `fly.stream_why`, of this chunk.
    """

    audit: Audit | None = None
    tokens: list[Token] | None = None


class Choice(BaseModel):
    """What all answers and their pieces have.

    Attributes:
      index: prompts in their order, the n answers of each together.
      finish_reason: None while it goes on.
      fly: see `ChoiceExtras`.
    """

    index: int
    finish_reason: FinishReason | None
    fly: ChoiceExtras | None = None


class TextChoice(Choice):
    """An answer of /v1/completions, or a piece of one."""

    text: str
    logprobs: TextLogprobs | None = None


class ChatMessage(BaseModel):
    """What the assistant says, or a piece of it."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChoice(Choice):
    """An answer of /v1/chat/completions."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatPiece(Choice):
    """A piece of such an answer."""

    delta: ChatMessage
    logprobs: ChatLogprobs | None = None


class Reply(BaseModel):
    """What all replies have.

    Attributes:
      id: of the request.
      object: what this is.
      created: when it arrived, in seconds since 1970.
      model: the server's.
      usage: at the end.
      metrics: at the end.
    """

    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None
    metrics: Metrics | None = None


class Completion(Reply):
    """The reply of /v1/completions, and a chunk of its stream."""

    choices: list[TextChoice]


class ChatCompletion(Reply):
    """The reply of /v1/chat/completions."""

    choices: list[ChatChoice]


class ChatChunk(Reply):
    """A chunk of its stream."""

    choices: list[ChatPiece]


class TextStyle:
    """How /v1/completions puts an answer."""

    prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[Callable[..., Reply]] = Completion
    chunk: ClassVar[Callable[..., Reply]] = Completion
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def answer(self, text: str, **fields: Any) -> Choice:
        """All of it."""
        return TextChoice(text=text, **fields)

    def piece(self, text: str, is_first: bool, **fields: Any) -> Choice:
        """A piece."""
        return TextChoice(text=text, **fields)

    def logprobs(
        self, found: Sequence[TokenLogprobs], texts: Sequence[str], begin: int, tokenizer: Tokenizer
    ) -> TextLogprobs:
        """See `text_logprobs`."""
        return text_logprobs(found, texts, begin, tokenizer)


class ChatStyle:
    """How /v1/chat/completions puts an answer."""

    prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[Callable[..., Reply]] = ChatCompletion
    chunk: ClassVar[Callable[..., Reply]] = ChatChunk
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def answer(self, text: str, **fields: Any) -> Choice:
        """All of it."""
        return ChatChoice(message=ChatMessage(role="assistant", content=text), **fields)

    def piece(self, text: str, is_first: bool, **fields: Any) -> Choice:
        """A piece; the first one says who speaks."""
        said = ChatMessage(content=text)
        if is_first:
            said.role = "assistant"
        return ChatPiece(delta=said, **fields)

    def logprobs(
        self, found: Sequence[TokenLogprobs], texts: Sequence[str], begin: int, tokenizer: Tokenizer
    ) -> ChatLogprobs:
        """See `chat_logprobs`; texts and where they begin are not said there."""
        return chat_logprobs(found, tokenizer)


Style = TextStyle | ChatStyle
