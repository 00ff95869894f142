"""Speculative sampling with lenience."""

from __future__ import annotations

import dataclasses

from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import Lenient
from fly_jax.verification.rules.rule import Loose


@data_tree
@dataclasses.dataclass(frozen=True)
class Lenience(Loose):
    """Speculative sampling that asks less of the draft (appendix of arXiv 2211.17192).

    When sampling, a draft token x ~ q is kept with probability min(1, p(x) / (l q(x))), by the draw
    of the lossless rule, which is l = 1; a token that is not kept is replaced as by that rule. No
    token is then emitted with more than 1/l times its probability. What l = 1 would refuse counts
    as rescued. Greedy decoding is the limit of temperature 0 with the plain softmax on both sides:
    x is kept iff p(x) >= l max p.

    Attributes:
      lenience: l.

    Raises:
      FlyJaxError: no ratio.
    """

    lenience: Number = parameter(
        0.5,
        "lenience: by how much less the draft's token has to be probable",
        above=0.0, high=1.0,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The lenient draw, or the ratio."""
        return (Clause((Lenient(self.lenience),)),)
