"""What the engine refuses, in a sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from fly_jax.decoding.spec import RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.serving.request import Request
from fly_jax.verification.rules import Rule


def check_sizes(num_slots: int, prefill_chunk: int, max_length: int, context: int) -> None:
    """Raises FlyJaxError for an engine without a slot or room for a request."""
    if num_slots < 1 or prefill_chunk < 1:
        raise FlyJaxError(
            f"An engine was asked for with num_slots={num_slots} and prefill_chunk={prefill_chunk};"
            " both must be at least 1: raise them."
        )
    if not 2 <= max_length <= context:
        raise FlyJaxError(
            f"max_length is {max_length}; it must be at least 2, a prompt's token and a new one, "
            f"and at most {context}, the target's context: correct it."
        )


def check_room(length: int, max_new_tokens: int, max_length: int) -> None:
    """Raises FlyJaxError for a prompt that leaves no room, or no new token asked for."""
    if length >= max_length:
        raise FlyJaxError(
            f"The prompt has {length} tokens and the engine was made for {max_length} with the "
            "answer; shorten it, or raise max_length."
        )
    if max_new_tokens < 1:
        raise FlyJaxError(
            f"max_new_tokens is {max_new_tokens}; decoding needs at least 1: raise it."
        )


def check_spec(spec: RoundSpec, rules: Sequence[Rule]) -> None:
    """Raises FlyJaxError for rounds in which requests cannot stand beside each other."""
    if spec.sampling is not None:
        raise FlyJaxError(
            "A temperature was given for the whole engine, and each request has its own; leave it "
            "out, and give Request(..., sampling=Sampling(temperature))."
        )
    if spec.boundary == "defer":
        for rule in rules:
            check_window(rule, spec.deferred_window)


def check_window(rule: Rule, size: int) -> None:
    """Raises FlyJaxError for a rule whose windows cannot be deferred beside those of this size."""
    if rule.longest_window not in (0, size) or rule.has_lax_windows:
        raise FlyJaxError(
            f"A rule {type(rule).__name__} with window_size={rule.longest_window} was given to an "
            f"engine that defers windows of {size}, which must be of one size and without "
            "window_mismatches; change the rule, or make the engine with boundary='reject'."
        )


def check_logprobs(logprobs: int | None, most: int) -> None:
    """Raises FlyJaxError for more log-probabilities than the program gives."""
    if logprobs is not None and not (most and 0 <= logprobs <= most):
        has = f"at most {most}" if most else "none"
        raise FlyJaxError(
            f"A request asks for the log-probabilities of {logprobs} tokens at each position and "
            f"the engine gives {has}; ask for fewer, or raise max_logprobs (--max_logprobs of the "
            "server)."
        )


def check_deferred(request: Request, rule: Rule, size: int) -> None:
    """Raises FlyJaxError for a request whose windows cannot be deferred."""
    if request.sampling is not None:
        raise FlyJaxError(
            "A request asks for sampling and the engine defers windows, which is for greedy"
            " decoding; make it with boundary='reject', or leave sampling out."
        )
    check_window(rule, size)


def check_drawn(request: Request, rule: Rule) -> None:
    """Raises FlyJaxError for a drawn request with a rule for greedy decoding."""
    if rule.uses_memory and request.sampling is not None and request.sampling.temperature > 0:
        raise FlyJaxError(
            "A request asks for sampling and for a rule with a memory (csd), which is for greedy "
            "decoding; leave one of the two out."
        )


def check_stop(stop: Sequence[str], has_tokenizer: bool) -> None:
    """Raises FlyJaxError for stop strings that cannot be looked for."""
    if isinstance(stop, str) or not all(stop):
        raise FlyJaxError(
            f"stop is {stop!r}; it must be a list of texts of at least one character: correct it."
        )
    if stop and not has_tokenizer:
        raise FlyJaxError(
            "A request has stop strings and the engine has no tokenizer to find them with; make it "
            "with Engine.of, or with tokenizer=."
        )
