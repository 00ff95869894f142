"""Typical acceptance."""

from __future__ import annotations

import dataclasses

from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import TypicalEnough
from fly_jax.verification.rules.rule import Loose


@data_tree
@dataclasses.dataclass(frozen=True)
class Typical(Loose):
    """Medusa's typical acceptance (arXiv 2401.10774): p(x) > min(`epsilon`, `delta` exp(-H)).

    H is the entropy of the target's plain softmax, in nats: the flatter it is, the less is asked.

    Attributes:
      epsilon: what is enough anywhere.
      delta: what is enough where the target is sure.

    Raises:
      FlyJaxError: a value that is no probability.
    """

    epsilon: Number = parameter(
        0.09,
        "typical: probability that is enough anywhere",
        name="typical_epsilon", above=0.0, high=1.0,
    )  # fmt: skip
    delta: Number = parameter(
        0.3,
        "typical: probability that is enough where the target is sure",
        name="typical_delta", above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The threshold that moves with the entropy."""
        return (Clause((TypicalEnough(self.epsilon, self.delta),)),)
