"""Prompts as token ids, checked once."""

from __future__ import annotations

from collections.abc import Sequence

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig


class CheckedPrompt(tuple[int, ...]):
    """A prompt that `check_prompt` has passed; a decoder of the same target takes it as it is."""


def check_prompt(
    prompt: Sequence[int], config: LlamaConfig, *, name: str = "The prompt"
) -> CheckedPrompt:
    """The prompt, unless it has been checked already.

    Raises:
      FlyJaxError: the model cannot continue it: it is empty, leaves no room in the context, or has
        ids beyond the vocabulary (which an array lookup would silently take for other tokens).
    """
    if isinstance(prompt, CheckedPrompt):
        return prompt
    max_context = config.max_context
    if not prompt:
        raise FlyJaxError(f"{name} is empty; decoding needs at least one token: give some text.")
    if len(prompt) >= max_context:
        raise FlyJaxError(
            f"{name} has {len(prompt)} tokens and the model's context is {max_context}; at least "
            "one position must be left for new text: shorten the prompt."
        )

    if not all(0 <= token < config.vocab_size for token in prompt):
        raise FlyJaxError(
            f"{name} has token ids outside the model's vocabulary of {config.vocab_size}; "
            "tokenise it with the model's own tokenizer."
        )
    return CheckedPrompt(prompt)
