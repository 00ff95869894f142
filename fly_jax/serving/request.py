"""What the engine is asked for, and what has become of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from fly_jax.decoding.generation import Generation, Settled
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import RoundOutput
from fly_jax.models.tokenizers.tokenizer import Tokenizer
from fly_jax.serving.spelling import Spelling
from fly_jax.verification.rules import Exact, Rule
from fly_jax.verification.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue, and how. Nothing of it depends on what else is decoded.

    Attributes:
      prompt: token ids.
      max_new_tokens: limit of the continuation.
      rule: which draft tokens are kept; None for the engine's own rule.
      sampling: how tokens are drawn; None for greedy decoding.
      seed: of the draws.
      stop: texts before which the continuation ends, wherever tokens cut them.
      logprobs: fills `Generation.logprobs` with so many of the most probable tokens at each
        position, besides each token itself; None for not at all.
      ignores_eos: goes on to its limit, whatever ends of text come.
      protected_token_ids: tokens that are never rescued, nor anything in their place, besides the
        ends of text; None for the engine's own.
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


class Ticket:
    """A request that was handed in.

    Attributes:
      request: what is asked for.
      rule: the request's own, or the engine's.
      generation: what the prompt has become so far.
      num_reused: tokens of the prompt that another request had brought into the caches.
      is_finished: nothing more will come.
      submitted: when it was handed in, by `time.perf_counter`.
      seated: when its prompt had been dispatched and it got a slot; None before.
      first_token: when its first token was read; None before.
      finished: when its last token was read, or it was cancelled; None before.
    """

    def __init__(self, request: Request, rule: Rule, tokenizer: Tokenizer | None = None) -> None:
        """Waits.

        Args:
          request: has been checked.
          rule: what it is decoded with.
          tokenizer: spells its tokens; None if nobody asks for text.
        """
        self.request, self.rule = request, rule
        self._spelling = None if tokenizer is None else Spelling(tokenizer, request.stop)
        self.generation = Generation(tuple(request.prompt))
        self.num_reused = 0
        self.submitted = time.perf_counter()
        self.seated: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None

    @property
    def is_finished(self) -> bool:
        """Its last token has been read, or it was cancelled."""
        return self.finished is not None

    @property
    def is_settled(self) -> bool:
        """Its tokens are the target's own greedy ones, whatever is drafted."""
        return isinstance(self.rule, Exact) and self.request.sampling is None

    @property
    def budget(self) -> float | None:
        """What its rule may lose to the target, in nats; None for any amount."""
        budget = self.rule.budget
        return None if budget is None else float(budget)

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn, with every step in the program."""
        given = self.request.sampling
        if given is None:
            return Sampling(0.0, top_k=0, top_p=1.0)
        top_k = 0 if given.top_k is None else given.top_k
        top_p = 1.0 if given.top_p is None else given.top_p
        return Sampling(given.temperature, top_k=top_k, top_p=top_p)

    def book(self, output: RoundOutput, at: tuple[int, int], spec: RoundSpec) -> Settled | None:
        """Adds what one round has done to its row; see `Generation.book`."""
        return self.generation.book(
            output,
            at,
            spec,
            self.budget,
            num_logprobs=self.request.logprobs,
            ignores_eos=self.request.ignores_eos,
        )

    def spell(self, settled: Settled) -> Settled | None:
        """Adds the texts to what has settled, and ends the generation at a stop string.

        Returns:
          What may be handed out; None for nothing yet.
        """
        if self._spelling is None:
            return settled
        shown, num_kept = self._spelling.push(settled)
        if shown is not None and shown.finish_reason == "stop":
            self.generation.stop(len(settled.token_ids) - num_kept)
        return shown
