"""A limit on what a request's rescues may cost in all."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.rules.acceptance import Acceptance, RuleState, Why
from fly_jax.verification.rules.conditions import Seen
from fly_jax.verification.rules.loose import Clause, Loose
from fly_jax.verification.sampling import Sampling


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
      total: the budget of each request, in nats.
      per_token: in nats; None for no such limit.
      per_block: rescues; None for no such limit.

    Raises:
      FlyJaxError: a negative limit, or a budget around a budget.
    """

    rule: Loose
    total: float
    per_token: float | None = None
    per_block: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "risk_budget": self.total,
            "risk_per_token": self.per_token,
            "risk_per_block": self.per_block,
        }
        for name, value in limits.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise FlyJaxError(
                    f"{name} is {value}; it must be a number of at least 0: give 0 for lossless "
                    "decoding, or leave it out."
                )
        if not isinstance(self.rule, Loose) or self.rule.budget is not None:
            raise FlyJaxError(
                f"A budget was put around {type(self.rule).__name__}; it goes around one loosened "
                "rule, or one combination of them."
            )

    @property
    def sampling(self) -> Sampling | None:  # type: ignore[override]
        """The rule's."""
        return self.rule.sampling

    @property
    def budget(self) -> float:
        """What every request begins with."""
        return self.total

    def clauses(self) -> tuple[Clause, ...]:
        """The rule's."""
        return self.rule.clauses()

    def _affordable(
        self,
        seen: Seen,
        mismatch: Bool[Array, "rows draft"],
        end: Int32[Array, " rows"],
        state: RuleState | None,
    ) -> Bool[Array, "rows draft"]:
        if state is None or state.budget is None:
            raise FlyJaxError(
                "A rule with a budget was given no state of the rows; begin with initial_state and "
                "go on with RuleState.after."
            )
        # A refused mismatch ends the block, so that at any position that is reached all mismatches
        # before it have been rescued: the regrets of mismatches add up to what was spent.
        spent = jnp.cumsum(jnp.where(mismatch, seen.gap, 0), axis=1)
        left = state.budget[:, None]
        affordable = (spent <= left) & (left > 0)
        if self.per_token is not None:
            ahead = end[:, None] - jnp.arange(mismatch.shape[1])
            affordable &= seen.gap <= self.per_token * ahead
        if self.per_block is not None:
            affordable &= jnp.cumsum(mismatch, axis=1) <= self.per_block
        return affordable

    def _charged(self, seen: Seen, acceptance: Acceptance) -> Acceptance:
        regret = jnp.where(acceptance.why == Why.RESCUED.value, seen.gap, 0)
        return dataclasses.replace(acceptance, regret=regret)
