"""What decoding gives: tokens as they settle, and what a prompt has become."""

from __future__ import annotations

import dataclasses

from fly_jax.decoding.reports import TokenReport
from fly_jax.verification.rules import Why


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
