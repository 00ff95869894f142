"""A margin between the draft token and the target's choice."""

from __future__ import annotations

import dataclasses

from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import Near
from fly_jax.verification.rules.rule import Loose


@data_tree
@dataclasses.dataclass(frozen=True)
class Margin(Loose):
    """Rescues a draft token that is nearly the target's choice: max ln p - ln p(x) <= `gap`.

    Attributes:
      gap: in nats.

    Raises:
      FlyJaxError: a negative gap.
    """

    gap: Number = parameter(
        0.3,
        "margin: most nats that the draft's token may be less probable than the target's choice",
        name="margin_gap", low=0.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The margin."""
        return (Clause((Near(self.gap),)),)
