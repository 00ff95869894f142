"""Calibrated speculative decoding: a memory of corrections, and a consistency gate."""

from __future__ import annotations

import dataclasses

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameter
from fly_jax.verification.data import Number, data_tree, log
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import Condition, Near, Remembered
from fly_jax.verification.rules.rule import Loose


@data_tree
@dataclasses.dataclass(frozen=True)
class Csd(Loose):
    """Calibrated speculative decoding: rescues what the target has often corrected for little.

    Zhou et al., arXiv 2604.13634, for greedy decoding. The mismatch of draft token x is rescued iff
      - the memory has seen the target's choice take the place of x more than lambda times (lambda
        is the memory's `min_count`);
      - z(x) - max z >= ln(`consistency`), in raw logits: x is at least so probable, relative to the
        target's choice.

    Attributes:
      consistency: tau; 0 demands nothing, and None leaves this half out of the program.
      memory: False leaves the other half out.

    Raises:
      FlyJaxError: both halves left out, or a tau that is no ratio.
    """

    consistency: Number | None = parameter(
        0.01,
        "csd: least probability of the draft's token, as a share of that of the target's choice; "
        "0 for no such demand",
        name="csd_consistency", low=0.0, high=1.0,
    )  # fmt: skip
    memory: bool = parameter(
        True,
        "csd: keep only what the memory knows to be corrected often",
        name="csd_memory", static=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory and (self.consistency is None or _is_zero(self.consistency)):
            raise FlyJaxError(
                "The rule csd was given neither its memory nor its consistency gate; leave at "
                "least one of them on."
            )

    def clauses(self) -> tuple[Clause, ...]:
        """The halves that are on."""
        halves: tuple[Condition, ...] = ()
        if self.consistency is not None:
            halves += (Near(-log(self.consistency)),)
        if self.memory:
            halves += (Remembered(),)
        return (Clause(halves),)


def _is_zero(number: Number) -> bool:
    """True for Python's zeros; what an array holds is data."""
    return isinstance(number, int | float) and number == 0
