"""A limit on what a request's rescues may cost in all."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameter
from fly_jax.verification.data import Count, Number, column, data_tree
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules.clause import Block, Clause
from fly_jax.verification.rules.conditions import asked_for
from fly_jax.verification.rules.rule import Loose
from fly_jax.verification.rules.verdict import RuleState


@data_tree
@dataclasses.dataclass(frozen=True)
class Budget(Loose):
    """A loosened rule that may lose so much and no more (after ASD, arXiv 2608.03447).

    A rescue's regret is max z - z(x), in nats: how much more probable, as a logarithm, the target
    finds its own choice. The mismatch at position j (from 1) of K draft tokens is rescued iff
      - the rule rescues it;
      - the request's budget is not spent, and the regrets of this request's rescues up to and
        including this one do not exceed it;
      - its regret is at most `per_token` for each of the K - j + 1 draft tokens from it on, so that
        a late rescue, which can save little, may cost little;
      - it is at most the `per_block`-th rescue of the block.
    With a budget of 0, and once the budget is spent, decoding is lossless.

    Attributes:
      rule: what is limited.
      total: the budget of each request, in nats; None for no such limit, as below.
      per_token: in nats.
      per_block: rescues.

    Raises:
      FlyJaxError: a negative limit, or a budget around a budget.
    """

    is_limited: ClassVar[bool] = True

    rule: Loose
    total: Number | None = parameter(
        None,
        "nats that all rescues of a prompt may cost; 0 is lossless",
        name="risk_budget", kind=float, low=0.0,
    )  # fmt: skip
    per_token: Number | None = parameter(
        None,
        "nats that a rescue may cost for each draft token from it on",
        name="risk_per_token", kind=float, low=0.0,
    )  # fmt: skip
    per_block: Count | None = parameter(
        None, "rescues of a round", name="risk_per_block", kind=int, low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rule, Loose) or self.rule.is_limited:
            raise FlyJaxError(
                f"A budget was put around {type(self.rule).__name__}; it goes around one loosened "
                "rule, or one combination of them."
            )

    @property
    def budget(self) -> Number | None:
        """What every request begins with."""
        return self.total

    def clauses(self) -> tuple[Clause, ...]:
        """The rule's."""
        return self.rule.clauses()

    def affordable(
        self, evidence: TargetEvidence, block: Block, state: RuleState | None
    ) -> Bool[Array, "rows draft"]:
        """Mismatches that none of the limits stands against."""
        # A refused mismatch ends the block, so that at any position that is reached all mismatches
        # before it have been rescued: the regrets of mismatches add up to what was spent.
        affordable = jnp.ones_like(block.mismatch)
        if self.total is not None:
            given = None if state is None else state.budget
            left = asked_for(
                given, "the state of its rows' budgets", "state=rule.initial_state(rows), "
                "and from then on what RuleState.after returns"
            )[:, None]  # fmt: skip
            spent = jnp.cumsum(jnp.where(block.mismatch, evidence.gap, 0), axis=1)
            affordable = (spent <= left) & (left > 0)
        if self.per_token is not None:
            ahead = block.end[:, None] - jnp.arange(block.mismatch.shape[1])
            affordable &= evidence.gap <= column(self.per_token) * ahead
        if self.per_block is not None:
            affordable &= jnp.cumsum(block.mismatch, axis=1) <= column(self.per_block)
        return affordable
