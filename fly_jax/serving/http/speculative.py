"""What speculation did for a request: vLLM's figures by vLLM's names, and FLy's own."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from pydantic import BaseModel

from fly_jax.decoding.generation import Generation
from fly_jax.evaluation.audit import refused_by


class SpeculativeDecoding(BaseModel):
    """Figures of one request, over all its answers.

    Attributes:
      mean_acceptance_length: 1 + accepted draft tokens per step, as vLLM has it.
      draft_acceptance_rate: accepted over drafted tokens.
      acceptance_histogram: how many steps kept 0, 1, ... K draft tokens.
      num_spec_steps: passes of the target over a draft.
      num_accepted_draft_tokens: draft tokens kept, rescued ones included.
      num_draft_tokens: draft tokens that the target saw.
      num_spec_tokens: K.
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


def speculative_decoding(generations: Sequence[Generation], k: int) -> SpeculativeDecoding:
    """The figures of some generations.

    Args:
      generations: with reports.
      k: draft tokens of a round.
    """
    # A deferred window may settle more than K tokens at once.
    kept = collections.Counter(min(number, k) for one in generations for number in one.kept)
    accepted = sum(one.num_accepted_tokens for one in generations)
    drafted = sum(one.num_draft_tokens for one in generations)
    refused = collections.Counter(
        reason
        for one in generations
        for report in one.reports
        if (reason := refused_by(report)) is not None
    )
    regrets = [one.regret for one in generations if one.regret is not None]
    return SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / max(kept.total(), 1),
        draft_acceptance_rate=accepted / max(drafted, 1),
        acceptance_histogram=[kept[number] for number in range(k + 1)] if k else [],
        num_spec_steps=kept.total(),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=k,
        mean_accepted_tokens=sum(len(one.token_ids) for one in generations)
        / max(sum(one.num_rounds for one in generations), 1),
        num_rescued_tokens=sum(one.num_rescued_tokens for one in generations),
        num_revoked_windows=sum(one.num_rollbacks for one in generations),
        refused_by=dict(refused),
        regret=sum(regrets) if regrets else None,
    )
