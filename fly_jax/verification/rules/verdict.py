"""What acceptance returns: what a round keeps of each row's draft, and why."""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int8, Int32


class Why(enum.IntEnum):
    """What became of one position; `letter` is for the tokens that were emitted.

    `REFUSED` comes before every other refusal. The others are in the order in which a rule checks:
    the first that fails is reported; of rules joined by |, that of the one that came furthest.
    """

    MATCHED = 0  # kept: the lossless rule accepts it
    RESCUED = 1  # kept: a mismatch that the rule loosens
    REFUSED_GATE = 2  # the target is too sure of another token
    REFUSED_MEMORY = 3  # the memory has not seen this correction often enough
    REFUSED_BUDGET = 4  # the request's risk budget, or the block's share of it, is spent
    REFUSED_WINDOW = 5  # a drafted token in its deferred window is a mismatch too
    REFUSED_BOUNDARY = 6  # only the block's end stood in the way: the window does not fit
    REFUSED = 7  # never loosened: an exact rule, a protected token, or one of probability 0
    CORRECTED = 8  # emitted by the target in place of the first refused token
    BONUS = 9  # emitted by the target after a block that was kept whole
    DROPPED = 10  # after the first refusal, or not drafted at all

    @property
    def letter(self) -> str:
        """m, r, c or b for matched, rescued, corrected and bonus; "-" for what is not emitted."""
        return _LETTERS.get(self, "-")


_LETTERS = {Why.MATCHED: "m", Why.RESCUED: "r", Why.CORRECTED: "c", Why.BONUS: "b"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a round keeps of each row's draft.

    A row emits its first `num_accepted` draft tokens and then `next_token`.

    Attributes:
      num_accepted: draft tokens kept.
      next_token: the target's token that follows them.
      next_why: `Why.CORRECTED` or `Why.BONUS`.
      why: a `Why` for every draft position; only the first refused one says what refused it.
      num_rescued: rescues among the tokens kept.
      regret: what each kept rescue takes from the row's risk budget, 0 elsewhere; None without one.
    """

    num_accepted: Int32[Array, " rows"]
    next_token: Int32[Array, " rows"]
    next_why: Int8[Array, " rows"]
    why: Int8[Array, "rows draft"]
    num_rescued: Int32[Array, " rows"]
    regret: Float32[Array, "rows draft"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuleState:
    """What a rule knows of each row from earlier rounds.

    What a rule has no use for is None, and costs nothing.

    Attributes:
      budget: the risk budget that is left, in nats.
    """

    budget: Float32[Array, " rows"] | None = None

    def after(self, verdict: Verdict, count: Int[Array, " rows"]) -> RuleState:
        """The state once the first `count` tokens of each row's block have been emitted."""
        if self.budget is None or verdict.regret is None:
            return self
        emitted = jnp.arange(verdict.regret.shape[1]) < count[:, None]
        spent = jnp.sum(jnp.where(emitted, verdict.regret, 0), axis=1)
        # The sum may round other than the running sums that were compared with the budget.
        return dataclasses.replace(self, budget=jnp.maximum(self.budget - spent, 0))
