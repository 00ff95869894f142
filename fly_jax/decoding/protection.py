"""Which tokens are never rescued, beyond control tokens: those whose text looks like something."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fly_jax.errors import FlyJaxError

if TYPE_CHECKING:
    from fly_jax.models.tokenizers.tokenizer import Tokenizer


def compile_patterns(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """The regular expressions, as of the module `re`.

    Raises:
      FlyJaxError: one that is none.
    """
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise FlyJaxError(
                f"protect is {pattern!r}, which is no regular expression ({reason}); correct it, "
                r"or give one such as '\d'."
            ) from error
    return compiled


def matching_tokens(tokenizer: Tokenizer, patterns: Sequence[str]) -> tuple[int, ...]:
    """The ids of tokens in whose own text one of the patterns is found.

    Args:
      tokenizer: says what the text of a token is (`Tokenizer.token_text`).
      patterns: regular expressions.

    Raises:
      FlyJaxError: a pattern that is no regular expression.
    """
    compiled = compile_patterns(patterns)
    if not compiled:
        return ()
    return tuple(
        index
        for index in range(tokenizer.vocab_size)
        if any(pattern.search(tokenizer.token_text(index)) for pattern in compiled)
    )
