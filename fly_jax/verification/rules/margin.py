"""A margin between the draft token and the target's choice."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import Condition, Near, RunnerUp
from fly_jax.verification.rules.rule import Loose

MarginKind = Literal["gap", "runner_up"]


@data_tree
@dataclasses.dataclass(frozen=True)
class Margin(Loose):
    """Rescues a draft token that is nearly the target's choice.

    Attributes:
      kind: "gap": max ln p - ln p(x) <= `gap`. "runner_up": x is the target's second choice, and
        the ratio of the two logits is above `ratio` (MARS, arXiv 2601.15498).
      gap: in nats.
      ratio: of raw logits; nothing is rescued where the largest is not positive.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    kind: MarginKind = parameter(
        "gap", "margin: what is compared", name="margin", choices=get_args(MarginKind), static=True
    )
    gap: Number = parameter(
        0.3,
        "margin: most nats that the draft's token may be less probable than the target's choice",
        name="margin_gap", low=0.0,
    )  # fmt: skip
    ratio: Number = parameter(
        0.9,
        "margin, runner_up: the second choice's logit over the first's must be above this",
        name="margin_ratio", above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The margin that was chosen."""
        margin: Condition = Near(self.gap) if self.kind == "gap" else RunnerUp(self.ratio)
        return (Clause((margin,)),)
