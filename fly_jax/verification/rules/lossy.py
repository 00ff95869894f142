"""A fixed probability that is enough."""

from __future__ import annotations

import dataclasses

from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import Probable
from fly_jax.verification.rules.rule import Loose


@data_tree
@dataclasses.dataclass(frozen=True)
class Lossy(Loose):
    """Rescues a draft token of at least a fixed probability: p(x) >= `threshold`.

    In greedy decoding a threshold above 0.5 rescues nothing: a token that probable is the target's
    own choice.

    Attributes:
      threshold: least probability in the target's plain softmax.

    Raises:
      FlyJaxError: no probability.
    """

    threshold: Number = parameter(
        0.3,
        "lossy: least probability of the draft's token",
        name="lossy_threshold", above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The threshold."""
        return (Clause((Probable(self.threshold),)),)
