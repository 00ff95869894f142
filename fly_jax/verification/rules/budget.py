"""A limit on what a request's rescues may cost in all."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import asked_for
from fly_jax.verification.rules.rule import Loose
from fly_jax.verification.rules.verdict import RuleState


@data_tree
@dataclasses.dataclass(frozen=True)
class Budget(Loose):
    """A loosened rule that may lose so much and no more (after ASD, arXiv 2608.03447).

    A rescue's regret is max z - z(x), in nats: how much more probable, as a logarithm, the target
    finds its own choice. A mismatch is rescued iff
      - the rule rescues it;
      - the request's budget is not spent, and the regrets of this request's rescues up to and
        including this one do not exceed it.
    With a budget of 0, and once the budget is spent, decoding is lossless.

    Attributes:
      rule: what is limited.
      total: the budget of each request, in nats; None for no limit.

    Raises:
      FlyJaxError: a negative budget, or a budget around a budget.
    """

    is_limited: ClassVar[bool] = True

    rule: Loose
    total: Number | None = parameter(
        None,
        "nats that all rescues of a prompt may cost; 0 is lossless",
        name="risk_budget", kind=float, low=0.0,
    )  # fmt: skip

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
        self,
        evidence: TargetEvidence,
        mismatch: Bool[Array, "rows draft"],
        state: RuleState | None,
    ) -> Bool[Array, "rows draft"] | None:
        """Mismatches that what is left of the budget pays for."""
        if self.total is None:
            return None
        given = None if state is None else state.budget
        left = asked_for(
            given, "the state of its rows' budgets", "state=rule.initial_state(rows), "
            "and from then on what RuleState.after returns"
        )[:, None]  # fmt: skip
        # A refused mismatch ends the block, so that at any position that is reached all mismatches
        # before it have been rescued: the regrets of mismatches add up to what was spent.
        spent = jnp.cumsum(jnp.where(mismatch, evidence.gap, 0), axis=1)
        return (spent <= left) & (left > 0)
