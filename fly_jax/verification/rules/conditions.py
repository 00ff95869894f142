"""Verdicts, and what rules are made of: conditions on one mismatch, deferred windows, clauses.

Logits and probabilities are the target's raw ones, whatever the temperature, so that a threshold
means the same at every temperature.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, Int, Int8, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.shapes import DraftFlags, DraftTokens, RowInts
from fly_jax.verification.correction_memory import is_remembered
from fly_jax.verification.data import STATIC, Count, Number, Switch, column, data_tree, log, taken
from fly_jax.verification.evidence import Entropy, Needs, TargetEvidence


class Why(enum.IntEnum):
    """The fate of one position; `letter` is for the tokens that were emitted.

    `REFUSED` takes precedence over every other refusal. Of the others a rule reports the first of
    its checks that fails, in this order; rules joined by | report the one that came furthest.
    """

    MATCHED = 0  # kept: the lossless rule accepts it
    RESCUED = 1  # kept: a mismatch that the rule loosens
    REFUSED_GATE = 2  # the target is too sure of another token
    REFUSED_MEMORY = 3  # the memory has not seen this correction often enough
    REFUSED_BUDGET = 4  # the rest of the request's risk budget does not pay for it
    REFUSED_WINDOW = 5  # a drafted token in its deferred window is a mismatch too
    REFUSED_BOUNDARY = 6  # only the block's end stood in the way: the window does not fit
    REFUSED = 7  # never loosened: an exact rule, a protected token, or one of probability 0
    CORRECTED = 8  # emitted by the target in place of the first refused token
    BONUS = 9  # emitted by the target after a block that was kept whole
    DROPPED = 10  # after the first refusal, or not drafted at all

    @property
    def letter(self) -> str:
        """The letter of a token: m(atched), r(escued), c(orrected), b(onus); "-" for all else."""
        return _LETTERS.get(self, "-")


_LETTERS = {Why.MATCHED: "m", Why.RESCUED: "r", Why.CORRECTED: "c", Why.BONUS: "b"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision about a round: how much of each row's draft is kept.

    A row emits its first `num_accepted` draft tokens and then `next_token`.

    Attributes:
      next_why: `Why.CORRECTED` or `Why.BONUS`.
      why: a `Why` for every draft position; only the first refused one says what refused it.
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
    """A rule's knowledge of each row from earlier rounds: the budget left, in nats, or None."""

    budget: Float32[Array, " rows"] | None = None

    def after(self, verdict: Verdict, count: RowInts) -> RuleState:
        """The state once the first `count` tokens of each row's block have been emitted."""
        if self.budget is None or verdict.regret is None:
            return self
        emitted = jnp.arange(verdict.regret.shape[1]) < count[:, None]
        spent = jnp.sum(jnp.where(emitted, verdict.regret, 0), axis=1)
        # The sum may round other than the running sums that were compared with the budget.
        return dataclasses.replace(self, budget=jnp.maximum(self.budget - spent, 0))


# Thresholds up to this one switch the gate off, as in FLy's reference code.
GATE_OFF = 0.01

_Given = TypeVar("_Given")
WindowKind = Literal["paper", "reference"]


def entropy_gate(evidence: TargetEvidence, threshold: Number) -> Bool[Array, "rows positions"]:
    """Tells where the target is undecided enough for a mismatch to be considered for rescue.

    `threshold` is the least entropy, in the measure's unit; `GATE_OFF` or less opens the gate.
    """
    threshold = column(threshold)
    entropy = asked_for(evidence.entropy, "an entropy", "needs=rule.needs to evidence")
    return (entropy >= threshold) | (threshold <= GATE_OFF)


def asked_for(value: _Given | None, name: str, remedy: str) -> _Given:
    """Returns a value that a rule reads; FlyJaxError if it was not given."""
    if value is None:
        raise FlyJaxError(
            f"This rule needs {name}, which it was not given; pass {remedy}, or call verify."
        )
    return value


@dataclasses.dataclass(frozen=True)
class Seen:
    """The inputs of conditions, at the draft positions only; `CorrectionMemory.keys`, if any."""

    evidence: TargetEvidence
    draft_tokens: DraftTokens
    memory: Int32[Array, "pairs 2"] | None


class Condition:
    """A demand on a mismatch, considered on its own; one decision per position.

    A condition is a frozen dataclass under `data_tree`. Its numbers may be one for each row: they
    meet [rows, draft] as `column(number)`. `why` is what a refusal by it is called; one that
    `uses_memory` reads `Seen.memory`.
    """

    why: ClassVar[Why] = Why.REFUSED_GATE
    uses_memory: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """The needs beyond what every evidence has; none by default."""
        return Needs()

    def holds(self, seen: Seen) -> DraftFlags:
        """Tells where this condition lets a mismatch be rescued."""
        raise NotImplementedError


@data_tree
class Undecided(Condition):
    """The target's entropy is at least `threshold`: FLy's gate."""

    threshold: Number
    measure: Entropy = dataclasses.field(metadata=STATIC)

    @property
    def needs(self) -> Needs:
        """The entropy, measured with the gate off too so that an audit can show it."""
        return Needs(entropy=self.measure)

    def holds(self, seen: Seen) -> DraftFlags:
        """Tells where H >= threshold, or everywhere if the gate is off."""
        return entropy_gate(seen.evidence, self.threshold)


@data_tree
class Near(Condition):
    """The draft token's logit is at most `nats` below the largest: p(x) >= exp(-nats) max p."""

    nats: Number

    def holds(self, seen: Seen) -> DraftFlags:
        """Tells where max z - z(x) <= nats."""
        return seen.evidence.gap <= column(self.nats)


@data_tree
class Probable(Condition):
    """The target gives the draft token a probability of at least `threshold`."""

    threshold: Number

    def holds(self, seen: Seen) -> DraftFlags:
        """Tells where p(x) >= threshold."""
        return seen.evidence.log_prob >= column(log(self.threshold))


@data_tree
class TypicalEnough(Condition):
    """The test p(x) > min(epsilon, delta exp(-H)), with H of the whole softmax, in nats."""

    epsilon: Number
    delta: Number

    @property
    def needs(self) -> Needs:
        """The entropy of the whole softmax."""
        return Needs(full_entropy=True)

    def holds(self, seen: Seen) -> DraftFlags:
        """Tells where ln p(x) > min(ln epsilon, ln delta - H)."""
        found, remedy = seen.evidence.full_entropy, "needs=rule.needs to evidence"
        entropy = asked_for(found, "the full entropy", remedy)
        epsilon, delta = column(log(self.epsilon)), column(log(self.delta))
        return seen.evidence.log_prob > jnp.minimum(epsilon, delta - entropy)


@data_tree
class Lenient(Condition):
    """The draw that refused the token accepts it at `lenience` times its q.

    In rows that are decoded greedily: p(x) >= lenience max p, by the plain softmax.
    """

    lenience: Number

    def holds(self, seen: Seen) -> DraftFlags:
        """Tells where u < p(x) / (lenience q(x)), with the very u that decided about the token."""
        found = seen.evidence
        near = found.gap <= column(-log(self.lenience))
        if found.scaled_uniform is None:
            return near
        drawn = column(self.lenience) * found.scaled_uniform < jnp.exp(found.draft_log_prob)
        return jnp.where(found.scaled_uniform < 0, near, drawn)


@data_tree
class Remembered(Condition):
    """The memory has seen the target put its choice in the draft token's place often enough."""

    why: ClassVar[Why] = Why.REFUSED_MEMORY
    uses_memory: ClassVar[bool] = True

    def holds(self, seen: Seen) -> DraftFlags:
        """The pair (draft token, argmax) is among the memory's keys."""
        name, remedy = "the keys of a CorrectionMemory", "memory=memory.keys() to accept"
        keys = asked_for(seen.memory, name, remedy)
        return is_remembered(keys, seen.draft_tokens, seen.evidence.argmax)


@data_tree
class Window:
    """The deferred window: the lossless rule accepts the next `size` draft tokens as well.

    Attributes:
      size: W; 0 for no window.
      kind: "paper" looks at all W of them, "reference" at W - 1; both demand that W fit.
    """

    size: Count
    kind: WindowKind = dataclasses.field(default="paper", metadata=STATIC)

    def is_clean(self, mismatch: DraftFlags) -> DraftFlags:
        """Tells where the window after a position has none of the row's mismatches."""
        followers = jnp.asarray(column(self.size))
        if self.kind == "reference":
            followers = jnp.maximum(followers - 1, 0)
        num_draft = mismatch.shape[1]
        place = jnp.arange(num_draft)
        last = place + jnp.minimum(followers, num_draft - 1 - place)  # however many followers
        # The count up to the last follower less that up to here.
        count = jnp.cumsum(mismatch, axis=1)
        return taken(count, jnp.zeros_like(count) + last) == count  # which lies as the count does

    def fits(self, num_draft: int, end: Int32[Array, " rows"]) -> DraftFlags:
        """Tells where the whole window lies within the row's block."""
        return column(self.size) <= end[:, None] - jnp.arange(1, num_draft + 1)


@data_tree
class Clause:
    """Conditions and windows, all of which must hold for a mismatch to be rescued.

    A refusal is looked for in their order. `enabled` are the rows with this clause, None for all.
    """

    conditions: tuple[Condition, ...]
    windows: tuple[Window, ...] = ()
    enabled: Switch | None = None

    def __and__(self, other: Clause) -> Clause:
        """Joins two clauses: all demands of both, in the rows that have both."""
        both = [one.enabled for one in (self, other) if one.enabled is not None]
        enabled = functools.reduce(operator.and_, both) if both else None
        return Clause(self.conditions + other.conditions, self.windows + other.windows, enabled)

    @property
    def window_size(self) -> Count:
        """The size of the largest window, 0 without one."""
        sizes = [window.size for window in self.windows]
        return functools.reduce(numpy_of(sizes).maximum, sizes, np.zeros((), np.int32))

    def judge(
        self, seen: Seen, mismatch: DraftFlags, barred: DraftFlags, affordable: DraftFlags | None,
        end: Int32[Array, " rows"],
    ) -> tuple[DraftFlags, Int[Array, "rows draft"]]:  # fmt: skip
        """Tells where it allows a rescue, and gives the `Why` of each refusal.

        Nothing can rescue `barred` tokens. `affordable` marks mismatches within the risk budget,
        None without one. `end` is the number of draft tokens of each row.
        """
        checks = [(condition.why, condition.holds(seen)) for condition in self.conditions]
        if affordable is not None:
            checks.append((Why.REFUSED_BUDGET, affordable))
        checks += [(Why.REFUSED_WINDOW, window.is_clean(mismatch)) for window in self.windows]
        fits = [window.fits(mismatch.shape[1], end) for window in self.windows]
        checks += [(Why.REFUSED_BOUNDARY, fit) for fit in fits]
        allowed, refusal = ~barred, jnp.full(mismatch.shape, Why.REFUSED_BOUNDARY.value)
        for why, holds in reversed(checks):
            allowed, refusal = allowed & holds, jnp.where(holds, refusal, why.value)
        if self.enabled is None:
            return allowed, refusal
        enabled = jnp.asarray(column(self.enabled))
        return allowed & enabled, jnp.where(enabled, refusal, 0)  # any other comes further


def numpy_of(numbers: Sequence[Any]) -> Any:
    """NumPy, or JAX's if any of the numbers is traced."""
    return jnp if any(isinstance(number, Tracer) for number in numbers) else np
