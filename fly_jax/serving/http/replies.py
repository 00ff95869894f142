"""The bodies of replies: OpenAI's objects, with `metrics` and `fly` beside them."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel

from fly_jax.decoding.reports import TokenLogprobs, TokenReport
from fly_jax.engine.request import Generation, RequestState
from fly_jax.evaluation.audit_file import Mismatch, Run, audited, refused_by
from fly_jax.models.tokenizer import Tokenizer

# Stands for -inf in JSON, as in OpenAI's and vLLM's replies.
_LEAST = -9999.0


class Usage(BaseModel):
    """The tokens of a request: of its prompts, each counted once, and of all answers.

    The cached ones of a prompt are those that another request had brought into the caches.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]

    @classmethod
    def of(cls, states: Sequence[RequestState], n: int) -> Usage:
        """The usage of n answers to each prompt."""
        firsts = states[::n]
        prompt = sum(len(one.request.prompt) for one in firsts)
        completion = sum(len(one.generation.token_ids) for one in states)
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details={"cached_tokens": sum(one.num_reused for one in firsts)},
        )  # fmt: skip


class SpeculativeDecoding(BaseModel):
    """Figures of speculation, over all answers to a request: vLLM's, and FLy's own.

    Attributes:
      mean_acceptance_length: 1 + accepted draft tokens per step, as vLLM has it.
      draft_acceptance_rate: accepted over drafted tokens.
      acceptance_histogram: how many steps kept 0, 1, ... K draft tokens.
      num_spec_steps: passes of the target over a draft, each of K (num_spec_tokens) at most.
      num_accepted_draft_tokens: rescued ones included.
      mean_accepted_tokens: settled tokens per pass of the target, bonus included.
      num_rescued_tokens: mismatches kept.
      num_revoked_windows: deferred windows that failed after their block.
      refused_by: mismatches refused, by what refused them.
      regret: what rescues took from the risk budgets, in nats; None without one.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    mean_accepted_tokens: float
    num_rescued_tokens: int
    num_revoked_windows: int
    refused_by: dict[str, int]
    regret: float | None

    @classmethod
    def of(cls, generations: Sequence[Generation], k: int) -> SpeculativeDecoding:
        """Counts generations with reports, of at most K draft tokens; fields have vLLM's names."""
        # A deferred window may settle more than K tokens at once.
        kept = collections.Counter(min(number, k) for one in generations for number in one.kept)
        accepted = sum(one.num_accepted_tokens for one in generations)
        drafted = sum(one.num_draft_tokens for one in generations)
        num_rounds = sum(one.num_rounds for one in generations)
        settled = sum(len(one.token_ids) for one in generations)
        reports = [report for one in generations for report in one.reports]
        refused = collections.Counter(filter(None, map(refused_by, reports)))
        regrets = [one.regret for one in generations if one.regret is not None]
        return cls(
            mean_acceptance_length=1 + accepted / max(kept.total(), 1),
            draft_acceptance_rate=accepted / max(drafted, 1),
            acceptance_histogram=[kept[number] for number in range(k + 1)] if k else [],
            num_spec_steps=kept.total(), num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted, num_spec_tokens=k,
            mean_accepted_tokens=settled / max(num_rounds, 1),
            num_rescued_tokens=sum(one.num_rescued_tokens for one in generations),
            num_revoked_windows=sum(one.num_rollbacks for one in generations),
            refused_by=dict(refused), regret=sum(regrets) if regrets else None,
        )  # fmt: skip


class RequestMetrics(BaseModel):
    """Times of a request, by vLLM's names; of several answers those of the slowest.

    Attributes:
      time_to_first_token_ms: from the arrival.
      generation_time_ms: from the first token to the last.
      queue_time_ms: from the arrival to a slot.
      mean_itl_ms: generation time per token after the first; None with one token.
      tokens_per_second: of all answers, since the arrival.
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float
    speculative_decoding: SpeculativeDecoding

    @classmethod
    def of(cls, states: Sequence[RequestState], num_speculative_tokens: int) -> RequestMetrics:
        """Measures answers that are done, whose rounds draft K tokens."""
        moments = [(one.submitted, one.seated, one.first_token, one.finished) for one in states]
        arrived, seated, first, finished = np.array(moments, float).T
        per_token = [seconds for one in states if (seconds := one.inter_token_seconds) is not None]
        seconds = finished.max() - arrived.min()
        number = sum(len(one.generation.token_ids) for one in states)
        return cls(
            time_to_first_token_ms=1e3 * (first - arrived).max(),
            generation_time_ms=1e3 * (finished - first).max(),
            queue_time_ms=1e3 * (seated - arrived).max(),
            mean_itl_ms=1e3 * max(per_token) if per_token else None,
            tokens_per_second=number / max(seconds, 1e-9),
            speculative_decoding=SpeculativeDecoding.of(
                [one.generation for one in states], num_speculative_tokens
            ),
        )


class AnswerAudit(BaseModel):
    """The mismatches of an answer, as the command audit knows them.

    Attributes:
      entropy_measure: "top_3" over so many most probable tokens in nats, "full" over all, or
        "normalized".
    """

    rule: str
    entropy_measure: str
    rescues: list[Mismatch]
    refusals: list[Mismatch]

    @classmethod
    def of(cls, state: RequestState, tokenizer: Tokenizer, run: Run) -> AnswerAudit:
        """The audit of a finished answer."""
        one, has_window = state.generation, int(np.max(state.rule.strict_tail)) > 0
        found, _ = audited(0, "", one, tokenizer, run, has_window=has_window, budget=state.budget)
        return cls(
            rule=run.rule, entropy_measure=run.entropy_measure,
            rescues=[one for one in found if one.is_rescue],
            refusals=[one for one in found if not one.is_rescue],
        )  # fmt: skip


class Token(BaseModel):
    """A token of a stream, and why it stands there.

    Attributes:
      text: what it adds to the answer.
      why: matched, rescued, corrected or bonus.
      other: what would stand there otherwise: of a rescued token the target's own, of a corrected
        one the draft's.
      probability: of the token in the target's plain softmax, where it is the draft's or the
        target's choice.
      other_probability: of the other one.
    """

    id: int
    text: str
    why: str
    other: str | None
    probability: float | None
    other_probability: float | None
    entropy: float

    @classmethod
    def of(cls, report: TokenReport, text: str, tokenizer: Tokenizer) -> Token:
        """The token of a report."""
        probabilities = {
            report.draft_id: report.draft_probability,
            report.choice_id: report.choice_probability,
        }
        other = {"r": report.choice_id, "c": report.draft_id}.get(report.why.letter)
        return cls(
            id=report.token_id, text=text, why=report.why.name.lower(),
            other=None if other is None else tokenizer.token_text(other),
            probability=probabilities.get(report.token_id),
            other_probability=probabilities.get(other), entropy=report.entropy,
        )  # fmt: skip


class ChoiceExtras(BaseModel):
    """The part of an answer that is FLy's: its audit, or the `fly.stream_why` of this chunk."""

    audit: AnswerAudit | None = None
    tokens: list[Token] | None = None


class TextLogprobs(BaseModel):
    r"""Log-probabilities of /v1/completions, as lists of the same length.

    Attributes:
      tokens: what each spells by itself, or "bytes:\xe2\x80" for a part of a character.
      top_logprobs: the most probable tokens at each position with theirs, and the token itself.
      text_offset: where in the answer what it adds begins.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A token of /v1/chat/completions, U+FFFD for a part of a character; in nats."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was decoded, with the most probable ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of /v1/chat/completions, of all tokens."""

    content: list[TokenLogprob]


class Choice(BaseModel):
    """The fields of all answers; the n answers to a prompt follow each other."""

    index: int
    finish_reason: Literal["stop", "length"] | None
    fly: ChoiceExtras | None = None


class TextChoice(Choice):
    """An answer of /v1/completions, or a piece of one."""

    text: str
    logprobs: TextLogprobs | None = None


class ChatMessage(BaseModel):
    """A message of the assistant, or a piece of one."""

    role: Literal["assistant"] | None = None
    content: str


class ChatChoice(Choice):
    """An answer of /v1/chat/completions."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatPiece(Choice):
    """A piece of an answer of /v1/chat/completions."""

    delta: ChatMessage
    logprobs: ChatLogprobs | None = None


class Reply(BaseModel):
    """The fields of all replies; `created` is the second of arrival."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class Completion(Reply):
    """The reply of /v1/completions, and a chunk of its stream."""

    choices: list[TextChoice]


class ChatCompletion(Reply):
    """The reply of /v1/chat/completions."""

    choices: list[ChatChoice]


class ChatChunk(Reply):
    """A chunk of the stream of /v1/chat/completions."""

    choices: list[ChatPiece]


class TextStyle:
    """The form of the replies of /v1/completions."""

    prefix: ClassVar[str] = "cmpl"
    whole = chunk = staticmethod(functools.partial(Completion, object="text_completion"))

    def answer(self, text: str, is_first: bool = True, **fields: Any) -> Choice:
        """An answer in one piece, or a piece of one, which has the same form."""
        return TextChoice(text=text, **fields)

    piece = answer

    def logprobs(
        self, found: Sequence[TokenLogprobs], texts: Sequence[str], begin: int, tokenizer: Tokenizer
    ) -> TextLogprobs:
        """Log-probabilities of tokens that add these texts after `begin` characters."""

        def top(one: TokenLogprobs) -> dict[str, float]:
            values: dict[str, float] = {}
            for token_id, value in (*one.top, (one.token_id, one.logprob)):
                # Of tokens that spell the same, the most probable one stands for all.
                values.setdefault(_spelt(token_id, tokenizer), max(value, _LEAST))
            return values

        ends = itertools.accumulate(map(len, texts), initial=begin)
        return TextLogprobs(
            tokens=[_spelt(one.token_id, tokenizer) for one in found],
            token_logprobs=[max(one.logprob, _LEAST) for one in found],
            top_logprobs=[top(one) for one in found], text_offset=list(ends)[:-1],
        )  # fmt: skip


class ChatStyle:
    """The form of the replies of /v1/chat/completions."""

    prefix: ClassVar[str] = "chatcmpl"
    whole = staticmethod(functools.partial(ChatCompletion, object="chat.completion"))
    chunk = staticmethod(functools.partial(ChatChunk, object="chat.completion.chunk"))

    def answer(self, text: str, **fields: Any) -> Choice:
        """An answer in one piece."""
        return ChatChoice(message=ChatMessage(role="assistant", content=text), **fields)

    def piece(self, text: str, is_first: bool, **fields: Any) -> Choice:
        """A piece of an answer; the first one names the role."""
        role: Any = {"role": "assistant"} if is_first else {}
        return ChatPiece(delta=ChatMessage(content=text, **role), **fields)

    def logprobs(
        self, found: Sequence[TokenLogprobs], texts: Sequence[str], begin: int, tokenizer: Tokenizer
    ) -> ChatLogprobs:
        """The log-probabilities of tokens, as in `TextStyle` but without places in the text."""

        def shown(token_id: int, logprob: float) -> dict[str, Any]:
            data = tokenizer.vocabulary.token_bytes(token_id, False)
            token = data.decode("utf-8", "replace")
            return {"token": token, "logprob": max(logprob, _LEAST), "bytes": list(data)}

        content = []
        for one in found:
            top = [TopLogprob(**shown(*other)) for other in one.top]
            content.append(TokenLogprob(**shown(one.token_id, one.logprob), top_logprobs=top))
        return ChatLogprobs(content=content)


Style = TextStyle | ChatStyle


def _spelt(token_id: int, tokenizer: Tokenizer) -> str:
    data = tokenizer.vocabulary.token_bytes(token_id, False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
