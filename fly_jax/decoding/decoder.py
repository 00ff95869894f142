"""The host loop: admits prompts, dispatches rounds and hands out tokens as they settle."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered
from jaxtyping import Array, Bool

from fly_jax.decoding.drafters.stopping import NEVER
from fly_jax.decoding.programs import PREFILL_PIECE, Programs
from fly_jax.decoding.reports import TokenReport, token_reports
from fly_jax.decoding.round import RoundSpec
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs, corrections
from fly_jax.errors import FlyJaxError
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama
from fly_jax.sharding.processes import decide, share
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Why

_SMALLEST_BUCKET = 16
CAPACITY_STEP = 64
_TIMINGS = 3


@dataclasses.dataclass(frozen=True)
class Settled:
    """Tokens of one row that will not change any more.

    Attributes:
      row: index of the prompt.
      token_ids: the new tokens.
      why: why each of them stands there.
      finish_reason: "stop" (an end of text), "length" (the limit), or None while the row goes on.
    """

    row: int
    token_ids: tuple[int, ...]
    why: tuple[Why, ...]
    finish_reason: str | None


@dataclasses.dataclass
class Generation:
    """What one prompt became, and what it took.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: what followed, the end-of-text token included.
      why: why each token stands there.
      finish_reason: "stop" or "length".
      num_rounds: target passes.
      num_draft_tokens: draft tokens that the target saw.
      num_accepted_tokens: those it kept, rescued ones included.
      num_rescued_tokens: mismatches kept.
      num_rollbacks: deferred windows that failed.
      num_draft_passes: passes of the first draft model while the row was live.
      seconds: from the first round's dispatch to the arrival of the row's last token.
      regret: what the rescues took from the row's risk budget, in nats; None without a budget.
      reports: what is known of each token, if `RoundSpec.audits`.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    why: list[Why] = dataclasses.field(default_factory=list)
    finish_reason: str = "length"
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rescued_tokens: int = 0
    num_rollbacks: int = 0
    num_draft_passes: int = 0
    seconds: float = 0.0
    regret: float | None = None
    reports: list[TokenReport] = dataclasses.field(default_factory=list)

    @property
    def mean_accepted_tokens(self) -> float:
        """Settled tokens per target pass, bonus included."""
        return len(self.token_ids) / max(self.num_rounds, 1)

    @property
    def tokens_per_second(self) -> float:
        """Settled tokens per second of decoding; the prefill is not counted."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


def capacity_for(
    spec: RoundSpec, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_context: int
) -> int:
    """Cache positions that these prompts need, in steps that keep the number of programs small."""
    longest = max(len(prompt) for prompt in prompts)
    needed = min(longest + max_new_tokens, max_context) + spec.room
    needed = max(needed, _bucket(longest))
    return -(-needed // CAPACITY_STEP) * CAPACITY_STEP


class Decoder:
    """Decodes batches of prompts with one rule on one pair.

    Programs are compiled at the first batch; later batches of the same row count and capacity
    reuse them.

    Attributes:
      listener: is told of every dispatch's rounds, on the host, before their tokens are handed out.
    """

    def __init__(
        self,
        target: Llama,
        draft: Llama | Sequence[Llama] | None,
        spec: RoundSpec,
        *,
        capacity: int,
        batch_size: int = 1,
        protected_token_ids: Sequence[int] = (),
        cache_dtype: jnp.dtype | None = None,
        memory: CorrectionMemory | None = None,
    ) -> None:
        """Checks the pair against the rule.

        Args:
          target: the model whose text is wanted.
          draft: the model that proposes, or several, each of which proposes to the one before it;
            None where `spec.num_speculative_tokens` is 0.
          spec: the rule, K and the lookup.
          capacity: cache positions of a row; see `capacity_for`.
          batch_size: rows decoded together.
          protected_token_ids: control tokens, never rescued; the ends of text are added.
          cache_dtype: type of the caches; that of the parameters if not given.
          memory: what a rule with `uses_memory` looks up; with `spec.reports_mismatches` it learns
            while decoding.

        Raises:
          FlyJaxError: K without a draft model, a level without a size, vocabularies of different
            sizes, or no memory where one is needed.
        """
        drafts = (draft,) if isinstance(draft, Llama) else tuple(draft or ())
        if not drafts and spec.num_speculative_tokens:
            raise FlyJaxError(
                f"{spec.num_speculative_tokens} speculative tokens were asked for without a draft "
                "model; speculation needs one: give a draft, or num_speculative_tokens=0."
            )
        if spec.num_speculative_tokens and len(drafts) != 1 + len(spec.level_speculative_tokens):
            raise FlyJaxError(
                f"{len(drafts)} draft models were given, and level_speculative_tokens has "
                f"{len(spec.level_speculative_tokens)} numbers; it needs one for each draft model "
                "but the first: correct it."
            )
        for one in drafts:
            if one.config.vocab_size != target.config.vocab_size:
                raise FlyJaxError(
                    f"A draft model has {one.config.vocab_size} tokens and the target "
                    f"{target.config.vocab_size}; both need the same vocabulary: choose a draft "
                    "model of the target's family."
                )
        if memory is None and (spec.rule.uses_memory or spec.reports_mismatches):
            raise FlyJaxError(
                "This rule looks mismatches up in a memory, or is to teach one, and none was "
                "given; pass memory=CorrectionMemory(…), empty or filled."
            )
        self.spec = spec
        self.memory = memory
        self.listener: Callable[[RoundOutput], None] | None = None
        self.capacity = capacity
        self.batch_size = batch_size
        speculates = spec.num_speculative_tokens > 0
        self._programs = Programs(target, drafts if speculates else (), cache_dtype)
        vocab = target.config.vocab_size
        protected = np.zeros(vocab, bool)
        ids = [*protected_token_ids, *spec.eos_token_ids]
        protected[[token for token in ids if token < vocab]] = True
        self._inputs = RuleInputs(self._programs.place(protected, (None,)))
        self._known: tuple[CorrectionMemory, int] | None = None
        self._seconds: np.ndarray | None = None  # of a round of each depth, once measured

    def stream(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> Iterator[tuple[Settled, Generation]]:
        """Decodes one batch, yielding tokens as they settle with the row's running account.

        The device is always one dispatch ahead of what has been read, so nothing waits for the
        host.

        Raises:
          FlyJaxError: no prompt, too many, an empty one, one longer than the context, or no new
            token asked for.
        """
        self._refresh()
        if self.spec.depths and self._seconds is None:
            self._seconds = self._measure(prompts)
        state = self._admit(prompts, max_new_tokens, seed, self._seconds)
        accounts = [Generation(tuple(prompt)) for prompt in prompts]
        live = set(range(len(prompts)))
        jax.block_until_ready(state.target.keys)
        start = time.perf_counter()
        pending: RoundOutput | None = None
        while self._goes_on(bool(live)):
            self._refresh()
            state, output = self._programs.run(self.spec, state, self._inputs)
            for leaf in jax.tree.leaves(output):
                leaf.copy_to_host_async()
            if pending is not None:
                pending = jax.device_get(pending)
                if self.memory is not None and self.spec.reports_mismatches:
                    self.memory.add(corrections(pending))
                if self.listener is not None:
                    self.listener(pending)
                for settled in self._read(pending, accounts, live):
                    accounts[settled.row].seconds = time.perf_counter() - start
                    yield settled, accounts[settled.row]
            pending = output

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> list[Generation]:
        """Decodes any number of prompts, `batch_size` at a time."""
        finished: list[Generation] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = prompts[first : first + self.batch_size]
            accounts = [Generation(tuple(prompt)) for prompt in batch]
            for settled, account in self.stream(batch, max_new_tokens, seed=seed + first):
                accounts[settled.row] = account
            finished += accounts
        return finished

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compiles what decoding these prompts needs; the memory learns nothing from it."""
        memory = self.memory
        if memory is not None:
            self.memory = memory.copy()
        try:
            self.generate(prompts, 1)
        finally:
            self.memory = memory

    def _refresh(self) -> None:
        """Puts the memory's keys where the next round finds them, if they are others by now."""
        if self.memory is None or not self.spec.rule.uses_memory:
            return
        known = (self.memory, self.memory.version)
        if known != self._known:
            keys = self._programs.place(self.memory.keys(), (None, None))
            self._inputs = dataclasses.replace(self._inputs, memory=keys)
            self._known = known

    def _measure(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Seconds of a round of each depth, on these prompts; the program is compiled before."""
        seconds = np.zeros(len(self.spec.depths), np.float32)
        for repeat in range(1 + _TIMINGS):
            for depth in range(len(seconds)):
                only_this = np.full(len(seconds), np.inf, np.float32)
                only_this[depth] = 1.0
                room = self.capacity - self.spec.room - max(map(len, prompts))
                state = self._admit(prompts, max(room, 1), 0, only_this)
                if state.threshold is not None:  # a round that stops early says nothing of its K
                    never = np.full(self.batch_size, NEVER, np.float32)
                    threshold = self._programs.place(never, (None,))
                    state = dataclasses.replace(state, threshold=threshold)
                jax.block_until_ready(state.target.keys)
                start = time.perf_counter()
                # Only what is counted is kept: the caches make room for the next ones.
                drafted = self._programs.run(self.spec, state, self._inputs)[1].num_drafted
                rounds = np.sum(np.any(jax.device_get(drafted), axis=1))
                taken = (time.perf_counter() - start) / max(rounds, 1)
                if repeat:
                    seconds[depth] = min(seconds[depth], taken) if repeat > 1 else taken
        if self._programs.spans_processes:  # which must all choose the same
            seconds = np.asarray(share(seconds.tolist()), np.float32)
        return seconds

    @property
    def max_context(self) -> int:
        """Of the target."""
        return self._programs.config.max_context

    @property
    def protected(self) -> Bool[Array, " vocab"]:
        """True for the tokens that are never rescued."""
        return self._inputs.protected

    def lower_prefill(self, prompt_length: int) -> Lowered:
        """The program that takes in prompts of this length, or their first piece.

        For a decoder of abstract models.
        Models whose parameters are `jax.ShapeDtypeStruct`, each with a sharding, can be compiled
        for devices that are not there: the planner does so.

        Raises:
          FlyJaxError: a length that the models or the decoder cannot take.
        """
        prompts = [[0] * prompt_length] * self.batch_size
        return cast(Lowered, self._admit(prompts, 1, 0))

    def lower_rounds(self, state: DecodeState) -> Lowered:
        """The program of a dispatch, given the abstract state that prefilling leaves."""
        return cast(Lowered, self._programs.run(self.spec, state, self._inputs))

    def _admit(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int,
        seconds: np.ndarray | None = None,
    ) -> DecodeState:
        if not 1 <= len(prompts) <= self.batch_size:
            raise FlyJaxError(
                f"{len(prompts)} prompts were given for {self.batch_size} rows; a batch needs 1 to "
                f"{self.batch_size}: split the prompts or raise batch_size."
            )
        if max_new_tokens < 1:
            raise FlyJaxError(
                f"max_new_tokens is {max_new_tokens}; decoding needs at least 1: raise it."
            )
        context = self._programs.config.max_context
        lengths = np.ones(self.batch_size, np.int32)
        limits = np.ones(self.batch_size, np.int32)
        text = np.zeros((self.batch_size, self.capacity), np.int32)
        for row, prompt in enumerate(prompts):
            check_prompt(prompt, self._programs.config, name=f"Prompt {row + 1}")
            lengths[row] = len(prompt)
            limits[row] = min(len(prompt) + max_new_tokens, context)
            text[row, : len(prompt)] = prompt
        bucket = _bucket(int(lengths.max()))
        if max(bucket, int(limits.max()) + self.spec.room) > self.capacity:
            raise FlyJaxError(
                f"A row needs {int(limits.max()) + self.spec.room} positions and the decoder has "
                f"{self.capacity}; make it with a larger capacity (see capacity_for)."
            )
        # Rows without a prompt are finished from the start.
        budget = None
        if self.spec.rule.budget is not None:
            budget = np.full(self.batch_size, self.spec.rule.budget, np.float32)
        window = self.spec.deferred_window
        if window and seconds is None:
            seconds = np.zeros(0, np.float32)
        carried = (window, self.spec.reports, self.spec.draft_stop)
        return self._programs.admit(text, lengths, limits, bucket, *carried, seed, budget, seconds)

    def _goes_on(self, is_live: bool) -> bool:
        """Whether there is another dispatch; process 0's word where the mesh is of several."""
        return decide(is_live) if self._programs.spans_processes else is_live

    def _read(
        self, output: RoundOutput, accounts: list[Generation], live: set[int]
    ) -> Iterator[Settled]:
        """Books one dispatch's rounds: what settled in each live row."""
        for index in range(output.count.shape[0]):
            for row in sorted(live):
                account, count = accounts[row], int(output.count[index, row])
                drafted = int(output.num_drafted[index, row])
                if count == 0 and drafted == 0:
                    continue
                tokens = tuple(output.tokens[index, row, :count].tolist())
                why = tuple(Why(code) for code in output.why[index, row, :count].tolist())
                account.token_ids.extend(tokens)
                account.why.extend(why)
                if output.reports is not None and self.spec.audits:
                    account.reports += token_reports(tokens, why, output.reports, (index, row))
                account.num_rounds += 1
                account.num_draft_tokens += drafted
                account.num_accepted_tokens += int(output.num_accepted[index, row])
                account.num_rescued_tokens += int(output.num_rescued[index, row])
                account.num_draft_passes += int(output.num_draft_passes[index])
                if output.budget is not None and self.spec.rule.budget is not None:
                    left = np.float32(self.spec.rule.budget) - output.budget[index, row]
                    account.regret = max(float(left), 0.0)
                if output.rolled_back is not None:
                    account.num_rollbacks += int(output.rolled_back[index, row])
                if not tokens:
                    continue  # all of it is provisional
                reason = None
                if output.finished[index, row]:
                    stopped = tokens[-1] in self.spec.eos_token_ids
                    reason = account.finish_reason = "stop" if stopped else "length"
                    live.discard(row)
                yield Settled(row, tokens, why, reason)


def check_prompt(prompt: Sequence[int], config: LlamaConfig, *, name: str = "The prompt") -> None:
    """Raises FlyJaxError where the model cannot continue a prompt.

    It is empty, leaves no room in the context, or has ids beyond the vocabulary (which an array
    lookup would silently take for other tokens).
    """
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


def _bucket(length: int) -> int:
    """Tokens that a prompt of this length is padded to: a power of two, or whole pieces."""
    if length > PREFILL_PIECE:
        return -(-length // PREFILL_PIECE) * PREFILL_PIECE
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
