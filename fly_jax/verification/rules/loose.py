"""What loosened rules have in common: they are alternatives of conditions, and combine."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.evidence import Entropy, Extra, TargetEvidence
from fly_jax.verification.rules.acceptance import (
    Acceptance,
    RuleState,
    Why,
    checked_draft,
    drafted_positions,
    keep_prefix,
)
from fly_jax.verification.rules.conditions import Condition, Seen, Window
from fly_jax.verification.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Clause:
    """Conditions and windows, all of which must hold for a mismatch to be rescued."""

    conditions: tuple[Condition, ...]
    windows: tuple[Window, ...] = ()

    def __and__(self, other: Clause) -> Clause:
        """All that either of two demands."""
        return Clause(self.conditions + other.conditions, self.windows + other.windows)

    def judge(self, seen: Seen, block: Block) -> tuple[Bool[Array, "rows draft"], Array]:
        """Whether it allows a rescue at each position, and the `Why` of a refusal."""
        holds = [condition.holds(seen) for condition in self.conditions]
        refusals = [condition.why.value for condition in self.conditions]
        if block.affordable is not None:
            holds.append(block.affordable)
            refusals.append(Why.REFUSED_BUDGET.value)
        allowed = functools.reduce(operator.and_, holds, ~block.barred)
        clean = [window.is_clean(block.mismatch, allowed) for window in self.windows]
        fits = [window.fits(block.mismatch.shape[1], block.end) for window in self.windows]
        refusal = jnp.select(
            [~held for held in holds + clean],
            [*refusals, *[Why.REFUSED_WINDOW.value] * len(clean)],
            Why.REFUSED_BOUNDARY.value,
        )
        return functools.reduce(operator.and_, clean + fits, allowed), refusal


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows' blocks, as far as they are the same for all clauses.

    Attributes:
      mismatch: drafted tokens that the lossless rule refuses.
      barred: tokens that nothing can rescue.
      affordable: within the risk budget; None without one.
      end: draft tokens of each row.
    """

    mismatch: Bool[Array, "rows draft"]
    barred: Bool[Array, "rows draft"]
    affordable: Bool[Array, "rows draft"] | None
    end: Int32[Array, " rows"]


class Loose:
    """A rule that rescues mismatches; `a & b` rescues what both would, `a | b` what either would.

    When sampling, the lossless rule is that of `Sampled`. A loosened rule then rescues only what
    that rule has refused and never redraws what it has accepted, so that the emitted distribution
    is no longer the target's.
    """

    sampling: Sampling | None

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives, any of which is enough for a rescue."""
        raise NotImplementedError

    @property
    def entropy_measure(self) -> Entropy | None:
        """The entropy that the evidence must carry, if any."""
        measures = {condition.entropy_measure for condition in self._conditions()} - {None}
        if len(measures) > 1:
            raise FlyJaxError(
                "Two rules with different entropies were combined; give both the same entropy and "
                "entropy_top_k."
            )
        return next(iter(measures), None)

    @property
    def extra(self) -> Extra:
        """What else the evidence must carry."""
        wanted = (condition.extra for condition in self._conditions())
        return functools.reduce(operator.or_, wanted, Extra())

    @property
    def uses_memory(self) -> bool:
        """The rule looks mismatches up in a memory of corrections."""
        return any(condition.uses_memory for condition in self._conditions())

    @property
    def budget(self) -> float | None:
        """No limit but the conditions."""
        return None

    @property
    def strict_tail(self) -> int:
        """The size of the smallest window that would do: too large for the block's last tokens."""
        return min(self._window_sizes())

    @property
    def longest_window(self) -> int:
        """Of all alternatives."""
        return max(self._window_sizes())

    @property
    def has_lax_windows(self) -> bool:
        """Some window may hold mismatches."""
        return any(w.mismatches > 0 for clause in self.clauses() for w in clause.windows)

    def _window_sizes(self) -> list[int]:
        return [max((w.size for w in clause.windows), default=0) for clause in self.clauses()]

    def check(self, num_speculative_tokens: int) -> None:
        """Refuses blocks in which this rule could not rescue anything.

        Raises:
          FlyJaxError: if no deferred window fits.
        """
        window = self.strict_tail
        if num_speculative_tokens <= window:
            raise FlyJaxError(
                f"With num_speculative_tokens={num_speculative_tokens} no deferred window of "
                f"window_size={window} fits into a block, so the published rule would "
                f"rescue nothing: draft at least {window + 1} tokens, or make the "
                "window smaller."
            )

    def accept(
        self,
        evidence: TargetEvidence,
        draft_tokens: Int[Array, "rows draft"],
        *,
        protected: Bool[Array, " vocab"] | None = None,
        num_drafted: Int[Array, " rows"] | None = None,
        memory: Int32[Array, "pairs 2"] | None = None,
        state: RuleState | None = None,
    ) -> Acceptance:
        """Keeps the prefix of matches and rescues."""
        num_draft = checked_draft(evidence, draft_tokens)
        present, end = drafted_positions(draft_tokens, num_drafted)
        here = jax.tree.map(lambda leaf: leaf[:, :num_draft], evidence)
        seen = Seen(here, draft_tokens, memory)
        barred = _impossible(here)
        if protected is not None:
            barred |= protected.at[draft_tokens].get(mode="fill", fill_value=True)
            barred |= protected[here.argmax]
        mismatch = ~here.accepted & present
        affordable = self._affordable(seen, mismatch, end, state)
        block = Block(mismatch, barred, affordable, end)
        allowed, refusals = zip(*(one.judge(seen, block) for one in self.clauses()), strict=True)
        rescued = ~here.accepted & functools.reduce(operator.or_, allowed)
        refusal = jnp.where(barred, Why.REFUSED.value, functools.reduce(jnp.maximum, refusals))
        return self._charged(
            seen, keep_prefix(evidence, present, end, here.accepted, rescued, refusal)
        )

    def _conditions(self) -> Iterable[Condition]:
        return (condition for clause in self.clauses() for condition in clause.conditions)

    def _affordable(
        self,
        seen: Seen,
        mismatch: Bool[Array, "rows draft"],
        end: Int32[Array, " rows"],
        state: RuleState | None,
    ) -> Bool[Array, "rows draft"] | None:
        return None

    def _charged(self, seen: Seen, acceptance: Acceptance) -> Acceptance:
        return acceptance

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
    if isinstance(rule, Loose) and rule.budget is None:
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
      right: another, with the same sampling.

    Raises:
      FlyJaxError: different samplings, entropies or leniences.
    """

    left: Loose
    right: Loose

    def __post_init__(self) -> None:
        if self.left.sampling != self.right.sampling:
            raise FlyJaxError(
                "Two rules with different samplings were combined; give both the same sampling."
            )
        _ = self.entropy_measure, self.extra  # which must be the same for both

    @property
    def sampling(self) -> Sampling | None:  # type: ignore[override]
        """That of both."""
        return self.left.sampling


@dataclasses.dataclass(frozen=True)
class Both(_Pair):
    """`left & right`: rescues what both would; mismatches in a window meet both's conditions."""

    def clauses(self) -> tuple[Clause, ...]:
        """Every alternative of one with every alternative of the other."""
        return tuple(a & b for a in self.left.clauses() for b in self.right.clauses())


@dataclasses.dataclass(frozen=True)
class Either(_Pair):
    """`left | right`: rescues what either would."""

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives of both."""
        return self.left.clauses() + self.right.clauses()


def _impossible(evidence: TargetEvidence) -> Bool[Array, "rows positions"]:
    """True where the target gives the draft token probability 0.

    That is less than the smallest normal float32, which accelerators round to 0: so defined, it is
    the same on all of them.
    """
    smallest = math.log(jnp.finfo(jnp.float32).tiny)
    log_prob = jnp.minimum(evidence.draft_logit - evidence.log_sum_exp, evidence.draft_log_prob)
    return ~(log_prob >= smallest)
