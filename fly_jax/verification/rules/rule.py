"""What a rule is: a dataclass whose numbers are data, made of alternatives, and how rules combine.

Rules read `TargetEvidence`, no logits, and know no model: any engine can call them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import check_parameters
from fly_jax.verification.data import Count, Number, data_tree
from fly_jax.verification.evidence import Needs, TargetEvidence
from fly_jax.verification.rules.clause import Clause, strict_tail
from fly_jax.verification.rules.conditions import Condition
from fly_jax.verification.rules.verdict import RuleState


class Rule:
    """Which mismatches are rescued: those that meet all of any one of its `clauses`.

    A rule is a frozen dataclass under `data_tree`: its numbers are data under `jit`, scalars or one
    for each row, and only what kind of conditions it has, and how they are joined, is static.

    Raises:
      FlyJaxError: a number outside the range that its parameter declares.
    """

    def __post_init__(self) -> None:
        check_parameters(self)

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives, any of which is enough for a rescue; none for a lossless rule."""
        return ()

    @property
    def needs(self) -> Needs:
        """What the evidence must carry; static."""
        wanted = (condition.needs for condition in self._conditions())
        return functools.reduce(operator.or_, wanted, Needs())

    @property
    def uses_memory(self) -> bool:
        """The rule looks mismatches up in a memory of corrections."""
        return any(condition.uses_memory for condition in self._conditions())

    @property
    def budget(self) -> Number | None:
        """The risk budget that every request begins with, in nats; None for no such limit."""
        return None

    def initial_state(self, num_rows: int) -> RuleState:
        """What the rule knows of rows of which it has seen nothing."""
        if self.budget is None:
            return RuleState()
        budget = jnp.asarray(self.budget, jnp.float32)
        return RuleState(jnp.broadcast_to(budget, (num_rows,)))

    def affordable(
        self,
        evidence: TargetEvidence,
        mismatch: Bool[Array, "rows draft"],
        state: RuleState | None,
    ) -> Bool[Array, "rows draft"] | None:
        """Mismatches within the limit around the conditions; None for no such limit."""
        return None

    @property
    def strict_tail(self) -> Count:
        """Last positions of a block in which no mismatch can be kept, the others being open.

        That is the smallest window of the alternatives. Data under `jit`; a number for each row if
        the windows' sizes are.
        """
        return strict_tail(self.clauses())

    @property
    def longest_window(self) -> int:
        """Draft tokens that a deferred window may need after its mismatch, in any row.

        For the host: it is known of a rule that is no tracer.
        """
        return max((int(np.max(clause.window_size)) for clause in self.clauses()), default=0)

    def check(self, num_speculative_tokens: int) -> None:
        """Refuses blocks in which this rule could not rescue anything; for the host.

        Raises:
          FlyJaxError: if no deferred window fits.
        """
        window = int(np.max(self.strict_tail))
        if self.clauses() and num_speculative_tokens <= window:
            raise FlyJaxError(
                f"With num_speculative_tokens={num_speculative_tokens} no deferred window of "
                f"window_size={window} fits into a block, so the published rule would "
                f"rescue nothing: draft at least {window + 1} tokens, or make the "
                "window smaller."
            )

    def _conditions(self) -> Iterable[Condition]:
        return (condition for clause in self.clauses() for condition in clause.conditions)


@data_tree
@dataclasses.dataclass(frozen=True)
class Exact(Rule):
    """Keeps what the lossless rule accepts, and nothing else.

    Greedy, that is the target's most probable token. With sampling it is rejection sampling: what
    is emitted has exactly the target's processed distribution (Leviathan et al., arXiv 2211.17192;
    Chen et al., arXiv 2302.01318). The draws are made with the evidence.
    """


class Loose(Rule):
    """A rule that rescues mismatches; `a & b` rescues what both would, `a | b` what either would.

    It rescues only what the lossless rule has refused and never redraws what that has accepted.
    With sampling the emitted distribution is then no longer the target's.
    """

    is_limited: ClassVar[bool] = False

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives, any of which is enough for a rescue."""
        raise NotImplementedError

    def __and__(self, other: Any) -> Both:
        return Both(_loosened(self), _loosened(other))

    def __rand__(self, other: Any) -> Both:
        return Both(_loosened(other), _loosened(self))

    def __or__(self, other: Any) -> Either:
        return Either(_loosened(self), _loosened(other))

    def __ror__(self, other: Any) -> Either:
        return Either(_loosened(other), _loosened(self))


def _loosened(rule: object) -> Loose:
    """The rule, if it can be combined with others."""
    if isinstance(rule, Loose) and not rule.is_limited:
        return rule
    reason = (
        "a budget goes around the whole combination"
        if isinstance(rule, Loose)
        else "only loosened rules combine with & and |"
    )
    raise FlyJaxError(f"{type(rule).__name__} cannot be part of a combination: {reason}.")


@dataclasses.dataclass(frozen=True)
class _Pair(Loose):
    """Two rules in one.

    Attributes:
      left: a loosened rule.
      right: another, with the same entropy if both have one.

    Raises:
      FlyJaxError: different entropies.
    """

    left: Loose
    right: Loose

    def __post_init__(self) -> None:
        _ = self.needs  # which must be the same for both


@data_tree
@dataclasses.dataclass(frozen=True)
class Both(_Pair):
    """`left & right`: rescues what both would."""

    def clauses(self) -> tuple[Clause, ...]:
        """Every alternative of one with every alternative of the other."""
        return tuple(a & b for a in self.left.clauses() for b in self.right.clauses())


@data_tree
@dataclasses.dataclass(frozen=True)
class Either(_Pair):
    """`left | right`: rescues what either would."""

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives of both."""
        return self.left.clauses() + self.right.clauses()
