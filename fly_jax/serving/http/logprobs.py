"""Log-probabilities in the two shapes that OpenAI's endpoints give them in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pydantic import BaseModel

from fly_jax.decoding.reports import TokenLogprobs
from fly_jax.models.tokenizers.tokenizer import Tokenizer

# What JSON has instead of -inf, as in OpenAI's and vLLM's replies.
_LEAST = -9999.0


class TextLogprobs(BaseModel):
    r"""Of /v1/completions: lists of the same length.

    Attributes:
      tokens: what each spells by itself, or "bytes:\xe2\x80" for a part of a character.
      token_logprobs: theirs.
      top_logprobs: the most probable tokens at each position with theirs, and the token itself.
      text_offset: where in the answer what it adds begins.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A token of /v1/chat/completions.

    Attributes:
      token: what it spells by itself; U+FFFD stands for a part of a character.
      logprob: in nats.
      bytes: the UTF-8 of what it spells.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was decoded.

    Attributes:
      top_logprobs: the most probable ones there.
    """

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of /v1/chat/completions.

    Attributes:
      content: all tokens.
    """

    content: list[TokenLogprob]


def text_logprobs(
    found: Sequence[TokenLogprobs], texts: Sequence[str], begin: int, tokenizer: Tokenizer
) -> TextLogprobs:
    """In the shape of /v1/completions.

    Args:
      found: of some tokens.
      texts: what each of them adds to the answer.
      begin: characters of the answer before them.
      tokenizer: of the models.
    """

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
        top_logprobs=[top(one) for one in found],
        text_offset=list(ends)[:-1],
    )


def chat_logprobs(found: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """In the shape of /v1/chat/completions."""

    def shown(token_id: int, logprob: float) -> dict[str, object]:
        data = _bytes(token_id, tokenizer)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST),
            "bytes": list(data),
        }

    return ChatLogprobs(
        content=[
            TokenLogprob.model_validate(
                shown(one.token_id, one.logprob)
                | {"top_logprobs": [shown(*other) for other in one.top]}
            )
            for one in found
        ]
    )


def _bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    return tokenizer.vocabulary.token_bytes(token_id, False)


def _spelt(token_id: int, tokenizer: Tokenizer) -> str:
    data = _bytes(token_id, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
