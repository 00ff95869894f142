"""Requests to the engine, and their states and results."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.reports import TokenLogprobs, TokenReport, token_logprobs, token_reports
from fly_jax.decoding.state import RoundOutput
from fly_jax.errors import FlyJaxError
from fly_jax.models.tokenizer import TextStream, Tokenizer
from fly_jax.verification.rules import Exact, Rule, Why
from fly_jax.verification.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Settled:
    """Tokens of one row that will not change any more.

    Attributes:
      finish_reason: "stop" (an end of text, or one of the request's stop strings), "length" (the
        limit), or None while the row goes on.
      texts: what each of them adds to the text; empty from whoever has no tokenizer.
    """

    token_ids: tuple[int, ...]
    why: tuple[Why, ...]
    finish_reason: str | None
    texts: tuple[str, ...] = ()


@dataclasses.dataclass
class Generation:
    """The continuation of one prompt, and its figures.

    Attributes:
      token_ids: what followed, the end-of-text token included.
      finish_reason: "stop" or "length"; in an engine also "cancelled".
      kept: of each pass over a draft, the draft tokens that settled with it as accepted ones.
      num_draft_tokens: draft tokens that the target saw.
      num_accepted_tokens: those it kept, rescued ones and any behind a stop string included.
      num_rollbacks: deferred windows that failed.
      num_draft_passes: passes of the first draft model while the row was live.
      seconds: from the end of its prefill to the arrival of its last token; prefill of other
        prompts meanwhile counts, and so does its own where a round had ended before anyone looked.
      regret: what the rescues took from the row's risk budget, in nats; None without a budget.
      reports: what is known of each token, if `RoundStatic.audits`.
      logprobs: of each token, if they are asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    why: list[Why] = dataclasses.field(default_factory=list)
    finish_reason: str = "length"
    num_rounds: int = 0
    kept: list[int] = dataclasses.field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rescued_tokens: int = 0
    num_rollbacks: int = 0
    num_draft_passes: int = 0
    seconds: float = 0.0
    regret: float | None = None
    reports: list[TokenReport] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    def stop(self, num_dropped: int) -> None:
        """Ends at a stop string, without the tokens that settled behind it."""
        self.finish_reason = "stop"
        kept = len(self.token_ids) - num_dropped
        for column in (self.token_ids, self.why, self.reports, self.logprobs):
            del column[kept:]

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and its continuation."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def mean_accepted_tokens(self) -> float:
        """The settled tokens per target pass, bonus included."""
        return len(self.token_ids) / max(self.num_rounds, 1)

    @property
    def tokens_per_second(self) -> float:
        """The settled tokens per second of `seconds`."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue, and how. Nothing of it depends on what else is decoded; see `Engine`.

    Attributes:
      rule: which draft tokens are kept; None for the engine's own rule.
      sampling: how tokens are drawn; None for greedy decoding.
      stop: texts before which the continuation ends, wherever tokens cut them.
      logprobs: fills `Generation.logprobs` with so many of the most probable tokens at each
        position, besides each token itself; None for not at all.
      ignores_eos: goes on to its limit, whatever ends of text come.
      protected_token_ids: tokens that are never rescued, nor replaced by a rescue, besides the ends
        of text; None for the engine's own.
      cache_salt: the beginning of the prompt is shared only with requests of the same salt.
      repeats: the same seed draws the same text again, whatever is decoded beside it.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    rule: Rule | None = None
    sampling: Sampling | None = None
    seed: int = 0
    stop: Sequence[str] = ()
    logprobs: int | None = None
    ignores_eos: bool = False
    protected_token_ids: Sequence[int] | None = None
    cache_salt: str = ""
    repeats: bool = True

    @property
    def is_drawn(self) -> bool:
        """Tells whether its tokens are drawn; with a temperature of 0 they are not."""
        return self.sampling is not None and bool(self.sampling.temperature > 0)


class RequestState:
    """A request that was submitted.

    Attributes:
      budget: what the rule may lose to the target, in nats; None for any amount.
      num_reused: tokens of the prompt that another request had brought into the caches.
      submitted: when it was, by `time.perf_counter`, as for all that follow, which are None before.
      seated: when its prompt had been dispatched and it got a slot.
      prefilled: when its prompt had been run, as far as the host has seen; else as `seated`.
      first_token: when it was read.
      finished: when its last token was read, or it was cancelled.
    """

    def __init__(self, request: Request, rule: Rule, tokenizer: Tokenizer | None = None) -> None:
        self.request, self.rule = request, rule
        self.budget = None if rule.budget is None else float(rule.budget)
        self._stop_checker = None if tokenizer is None else StopChecker(tokenizer, request.stop)
        self.generation = Generation(tuple(request.prompt))
        self.num_reused = 0
        self.submitted = time.perf_counter()
        self.seated: float | None = None
        self.prefilled: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None

    @property
    def is_finished(self) -> bool:
        """Tells whether its last token has been read, or it was cancelled."""
        return self.finished is not None

    @property
    def first_token_seconds(self) -> float | None:
        """The seconds from its submission to its first token; None before."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def inter_token_seconds(self) -> float | None:
        """The mean seconds between its tokens; None before the end, or where all came at once."""
        later = len(self.generation.token_ids) - 1
        if self.first_token is None or self.finished in (None, self.first_token) or later < 1:
            return None
        return (self.finished - self.first_token) / later

    @property
    def lets_k_vary(self) -> bool:
        """Tells whether K may change: its text stays the same, or another draw is as good."""
        return isinstance(self.rule, Exact) and not (self.request.is_drawn and self.request.repeats)

    def update_from_output(
        self, output: RoundOutput, at: tuple[int, int], spec: RoundSpec
    ) -> Settled | None:
        """Adds a round's results for its row; returns what has settled, or None."""
        one, (index, row) = self.generation, at
        if not output.live[at]:
            return None
        count, drafted = int(output.count[at]), int(output.num_drafted[at])
        tokens = tuple(output.tokens[index, row, :count].tolist())
        why = tuple(Why(code) for code in output.why[index, row, :count].tolist())
        one.token_ids.extend(tokens)
        one.why.extend(why)
        if output.reports is not None and spec.static.audits:
            one.reports += token_reports(tokens, why, output.reports, at)
        if output.reports is not None and self.request.logprobs is not None:
            one.logprobs += token_logprobs(tokens, output.reports, at, self.request.logprobs)
        one.num_rounds += 1
        if drafted:
            one.kept.append(int(output.num_accepted[at]))
        one.num_draft_tokens += drafted
        one.num_accepted_tokens += int(output.num_accepted[at])
        one.num_rescued_tokens += int(output.num_rescued[at])
        one.num_draft_passes += int(output.num_draft_passes[index])
        # A row without a budget may be beside one with it.
        if output.budget is not None and self.budget is not None and math.isfinite(self.budget):
            one.regret = max(self.budget - float(output.budget[at]), 0.0)
        if output.rolled_back is not None:
            one.num_rollbacks += int(output.rolled_back[at])
        if not tokens:
            return None  # all of it is provisional
        reason = None
        if output.finished[at]:
            is_end = tokens[-1] in spec.static.eos_token_ids and not self.request.ignores_eos
            reason = one.finish_reason = "stop" if is_end else "length"
        return Settled(tokens, why, reason)

    def detokenize(self, settled: Settled) -> Settled | None:
        """The part to hand out, with its texts; ends the generation at a stop string."""
        if self._stop_checker is None:
            return settled
        shown, num_kept = self._stop_checker.push(settled)
        if shown is not None and shown.finish_reason == "stop":
            self.generation.stop(len(settled.token_ids) - num_kept)
        return shown


def check_sizes(num_slots: int, prefill_chunk: int, max_length: int, context: int) -> None:
    """Raises FlyJaxError for an engine without a slot or room for a request."""
    sizes = (num_slots, 1), (prefill_chunk, 1), (max_length, 2)
    if not all(isinstance(one, numbers.Integral) and one >= least for one, least in sizes):
        raise FlyJaxError(
            f"An engine was asked for with num_slots={num_slots}, prefill_chunk={prefill_chunk} and"
            f" max_length={max_length}; they must be whole numbers, the first two at least 1, and "
            "the last at least 2, a prompt's token and a new one: correct them."
        )
    if max_length > context:
        raise FlyJaxError(
            f"max_length is {max_length}; give at most {context}, the target's context."
        )


def check_spec(spec: RoundSpec, rules: Sequence[Rule]) -> None:
    """Raises FlyJaxError for rounds in which requests cannot stand beside each other."""
    if spec.sampling is not None:
        raise FlyJaxError(
            "A temperature was given for the whole engine, and each request has its own; leave it "
            "out, and give Request(..., sampling=Sampling(temperature))."
        )
    if spec.static.deferred_window:
        for rule in rules:
            check_window(rule, spec.static.deferred_window)


def check_window(rule: Rule, size: int) -> None:
    """Raises FlyJaxError for a rule whose windows cannot be deferred beside those of this size."""
    if rule.longest_window not in (0, size):
        raise FlyJaxError(
            f"A rule {type(rule).__name__} with window_size={rule.longest_window} was given to an "
            f"engine that defers windows of {size}, which must be of one size; change the "
            "rule, or make the engine with boundary='reject'."
        )


def check_request(
    request: Request, rule: Rule, static: RoundStatic, max_length: int, *, has_tokenizer: bool
) -> None:
    """Raises FlyJaxError for a request, of a checked prompt, that these rounds cannot answer."""
    length, stop, logprobs = len(request.prompt), request.stop, request.logprobs
    whole, drawn = [request.max_new_tokens, request.seed], request.sampling
    whole += [] if request.protected_token_ids is None else request.protected_token_ids
    is_one = isinstance(drawn, Sampling | None) and not any(map(np.ndim, jax.tree.leaves(drawn)))
    is_one &= isinstance(rule, Rule)
    if not (is_one and all(isinstance(one, numbers.Integral) for one in whole)):
        raise FlyJaxError(
            f"A request has rule={rule!r}, max_new_tokens={request.max_new_tokens!r}, seed="
            f"{request.seed!r}, sampling={drawn!r} and protected_token_ids="
            f"{request.protected_token_ids!r}; rule must be a Rule, such as Fly(), sampling None "
            "or a Sampling with one number for each parameter, and all others whole numbers."
        )
    if request.max_new_tokens < 1:
        raise FlyJaxError(
            f"max_new_tokens is {request.max_new_tokens}; decoding needs at least 1: raise it."
        )
    if length >= max_length:
        raise FlyJaxError(
            f"The prompt has {length} tokens and the engine was made for {max_length} with the "
            "answer; shorten it, or raise max_length."
        )
    if not (isinstance(stop, list | tuple) and all(isinstance(one, str) and one for one in stop)):
        raise FlyJaxError(
            f"stop is {stop!r}; it must be a list of texts of at least one character: correct it."
        )
    if stop and not has_tokenizer:
        raise FlyJaxError(
            "A request has stop strings and the engine has no tokenizer to find them with; make it "
            "with Engine.of, or with tokenizer=."
        )
    most = static.max_logprobs
    if logprobs is not None and not (most and 0 <= logprobs <= most):
        has = f"at most {most}" if most else "none"
        raise FlyJaxError(
            f"A request asks for the log-probabilities of {logprobs} tokens at each position and "
            f"the engine gives {has}; ask for fewer, or raise max_logprobs (--max_logprobs of the "
            "server)."
        )
    if rule.uses_memory and request.is_drawn:
        raise FlyJaxError(
            "A request asks for sampling and for a rule with a memory (csd), which is for greedy "
            "decoding; leave one of the two out."
        )
    if static.deferred_window and request.is_drawn:
        raise FlyJaxError(
            "A request asks for sampling and the engine defers windows, which is for greedy"
            " decoding; make it with boundary='reject', or leave sampling out."
        )
    if static.deferred_window:
        check_window(rule, static.deferred_window)
    elif static.num_speculative_tokens:
        rule.check(static.num_speculative_tokens)


class _Token(NamedTuple):
    """A token and what it adds to the text."""

    token_id: int
    why: Why
    text: str


class StopChecker:
    """The text of a request; it holds tokens back while a stop string may have begun in them."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, continues=True)
        self._stops = tuple(stops)
        self._held: list[_Token] = []

    def push(self, settled: Settled) -> tuple[Settled | None, int]:
        """Takes what has settled; returns what may be handed out, if any, with its texts.

        Also returns how many of the given tokens stand: fewer where a stop string ends the text.
        """
        text = "".join(token.text for token in self._held)
        for number, pair in enumerate(zip(settled.token_ids, settled.why, strict=True), 1):
            added = self._stream.push([pair[0]])
            text += added
            self._held.append(_Token(*pair, added))
            stops = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
            if stops:  # before the one that is complete first, of several the longest
                left = min(stops)[1]
                for at, token in enumerate(self._held):
                    self._held[at] = token._replace(text=token.text[:left])
                    left = max(left - len(token.text), 0)
                stopped = dataclasses.replace(settled, finish_reason="stop")
                return self._released(stopped, len(self._held)), number
        if settled.finish_reason is not None:
            last = self._held[-1]
            self._held[-1] = last._replace(text=last.text + self._stream.finish())
            return self._released(settled, len(self._held)), len(settled.token_ids)
        return self._released(settled, self._num_safe(text)), len(settled.token_ids)

    def _num_safe(self, text: str) -> int:
        """The number of held tokens before any in whose text a stop string may have begun."""
        parts = ((at, text[at:]) for at in range(len(text)))
        begins = (at for at, part in parts if any(stop.startswith(part) for stop in self._stops))
        ends = itertools.accumulate(len(token.text) for token in self._held)
        safe = next(begins, len(text))
        return sum(end <= safe for end in ends)

    def _released(self, settled: Settled, number: int) -> Settled | None:
        given, self._held = self._held[:number], self._held[number:]
        if not given:
            return None
        ids, why, texts = zip(*given, strict=True)
        return dataclasses.replace(settled, token_ids=ids, why=why, texts=texts)
