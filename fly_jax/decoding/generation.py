"""What decoding gives: tokens as they settle, and what a prompt has become."""

from __future__ import annotations

import dataclasses
import math

from fly_jax.decoding.reports import TokenLogprobs, TokenReport, token_logprobs, token_reports
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import RoundOutput
from fly_jax.verification.rules import Why


@dataclasses.dataclass(frozen=True)
class Settled:
    """Tokens of one row that will not change any more.

    Attributes:
      row: index of the prompt; in an engine, the slot.
      token_ids: the new tokens.
      why: why each of them stands there.
      finish_reason: "stop" (an end of text, or one of the request's stop strings), "length" (the
        limit), or None while the row goes on.
      texts: what each of them adds to the text; empty from whoever has no tokenizer.
    """

    row: int
    token_ids: tuple[int, ...]
    why: tuple[Why, ...]
    finish_reason: str | None
    texts: tuple[str, ...] = ()


@dataclasses.dataclass
class Generation:
    """What one prompt became, and what it took.

    Attributes:
      prompt_token_ids: the prompt.
      token_ids: what followed, the end-of-text token included.
      why: why each token stands there.
      finish_reason: "stop" or "length"; in an engine also "cancelled".
      num_rounds: target passes.
      kept: of each pass over a draft, the draft tokens that settled with it as accepted ones.
      num_draft_tokens: draft tokens that the target saw.
      num_accepted_tokens: those it kept, rescued ones included.
      num_rescued_tokens: mismatches kept.
      num_rollbacks: deferred windows that failed.
      num_draft_passes: passes of the first draft model while the row was live.
      seconds: from when its prompt had been run to the arrival of its last token; other prompts
        that are run meanwhile count.
      regret: what the rescues took from the row's risk budget, in nats; None without a budget.
      reports: what is known of each token, if `RoundSpec.audits`.
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

    def update_from_output(
        self,
        output: RoundOutput,
        at: tuple[int, int],
        spec: RoundSpec,
        budget: float | None,
        *,
        num_logprobs: int | None = None,
        ignores_eos: bool = False,
    ) -> Settled | None:
        """Adds what one round has done to its row.

        Args:
          output: of a dispatch, on the host.
          at: the round in the dispatch, and the row.
          spec: of the rounds.
          budget: that the row began with, in nats; None or infinite without one.
          num_logprobs: tokens of `TokenLogprobs.top`; None for no log-probabilities.
          ignores_eos: the row does not end at an end of text.

        Returns:
          What has settled; None where nothing has.
        """
        index, row = at
        count, drafted = int(output.count[at]), int(output.num_drafted[at])
        if count == 0 and drafted == 0:
            return None
        tokens = tuple(output.tokens[index, row, :count].tolist())
        why = tuple(Why(code) for code in output.why[index, row, :count].tolist())
        self.token_ids.extend(tokens)
        self.why.extend(why)
        if output.reports is not None and spec.audits:
            self.reports += token_reports(tokens, why, output.reports, at)
        if output.reports is not None and num_logprobs is not None:
            self.logprobs += token_logprobs(tokens, output.reports, at, num_logprobs)
        self.num_rounds += 1
        if drafted:
            self.kept.append(int(output.num_accepted[at]))
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += int(output.num_accepted[at])
        self.num_rescued_tokens += int(output.num_rescued[at])
        self.num_draft_passes += int(output.num_draft_passes[index])
        # A row without a budget may be beside one with it.
        if output.budget is not None and budget is not None and math.isfinite(budget):
            self.regret = max(budget - float(output.budget[at]), 0.0)
        if output.rolled_back is not None:
            self.num_rollbacks += int(output.rolled_back[at])
        if not tokens:
            return None  # all of it is provisional
        reason = None
        if output.finished[at]:
            is_end = tokens[-1] in spec.eos_token_ids and not ignores_eos
            reason = "stop" if is_end else "length"
            self.finish_reason = reason
        return Settled(row, tokens, why, reason)

    def stop(self, num_dropped: int) -> None:
        """Ends at a stop string, without the tokens that settled behind it."""
        self.finish_reason = "stop"
        kept = len(self.token_ids) - num_dropped
        for column in (self.token_ids, self.why, self.reports, self.logprobs):
            del column[kept:]

    @property
    def num_tokens(self) -> int:
        """Of the prompt and what followed."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def mean_accepted_tokens(self) -> float:
        """Settled tokens per target pass, bonus included."""
        return len(self.token_ids) / max(self.num_rounds, 1)

    @property
    def tokens_per_second(self) -> float:
        """Settled tokens per second of `seconds`."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0
