"""What loosened rules are made of: conditions on one mismatch, and the deferred window after it.

Logits and probabilities are the target's raw ones, whatever the temperature, so that a threshold
means the same at every temperature.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.correction_memory import is_remembered
from fly_jax.verification.data import STATIC, Count, Number, column, data_tree, log
from fly_jax.verification.evidence import Entropy, Needs, TargetEvidence
from fly_jax.verification.rules.verdict import Why

# Thresholds up to this one switch the gate off, as in FLy's reference code.
GATE_OFF = 0.01

_Given = TypeVar("_Given")
WindowKind = Literal["paper", "reference"]


def entropy_gate(evidence: TargetEvidence, threshold: Number) -> Bool[Array, "rows positions"]:
    """True where the target is undecided enough for a mismatch to be considered for rescue.

    Args:
      evidence: with the entropy that the threshold is meant for.
      threshold: least entropy, in the measure's unit; `GATE_OFF` or less opens the gate everywhere.

    Raises:
      FlyJaxError: no entropy was measured.
    """
    threshold = column(threshold)
    entropy = asked_for(evidence.entropy, "an entropy", "needs=rule.needs to evidence")
    return (entropy >= threshold) | (threshold <= GATE_OFF)


def asked_for(value: _Given | None, name: str, remedy: str) -> _Given:
    """What a rule reads, if it is there.

    Raises:
      FlyJaxError: it is not, and nothing could be decided without it.
    """
    if value is None:
        raise FlyJaxError(
            f"This rule needs {name}, which it was not given; pass {remedy}, or call verify."
        )
    return value


@dataclasses.dataclass(frozen=True)
class Seen:
    """What conditions look at, at the draft positions only.

    Attributes:
      evidence: without the position after the last draft token.
      draft_tokens: what was drafted.
      memory: `CorrectionMemory.keys`, if there is one.
    """

    evidence: TargetEvidence
    draft_tokens: Int[Array, "rows draft"]
    memory: Int32[Array, "pairs 2"] | None


class Condition:
    """What must hold at a mismatch, considered on its own; one decision per position.

    A condition is a frozen dataclass under `data_tree`. Its numbers may be one for each row: they
    meet [rows, draft] as `column(number)`.

    Attributes:
      why: what a refusal by it is called.
      needs: what the evidence must carry.
      uses_memory: it reads `Seen.memory`.
    """

    why: ClassVar[Why] = Why.REFUSED_GATE
    uses_memory: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """What every evidence has is enough."""
        return Needs()

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """True where a mismatch may be rescued as far as this condition goes."""
        raise NotImplementedError


@data_tree
@dataclasses.dataclass(frozen=True)
class Undecided(Condition):
    """The target's entropy is at least `threshold`: FLy's gate."""

    threshold: Number
    measure: Entropy = dataclasses.field(metadata=STATIC)

    @property
    def needs(self) -> Needs:
        """Measured with the gate off too, so that an audit can show it."""
        return Needs(entropy=self.measure)

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """H >= threshold, or the threshold is as good as 0."""
        return entropy_gate(seen.evidence, self.threshold)


@data_tree
@dataclasses.dataclass(frozen=True)
class Near(Condition):
    """The draft token's logit is at most `nats` below the largest: p(x) >= exp(-nats) max p."""

    nats: Number

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """Max z - z(x) <= nats."""
        return seen.evidence.gap <= column(self.nats)


@data_tree
@dataclasses.dataclass(frozen=True)
class Probable(Condition):
    """The target gives the draft token a probability of at least `threshold`."""

    threshold: Number

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """P(x) >= threshold."""
        return seen.evidence.log_prob >= column(log(self.threshold))


@data_tree
@dataclasses.dataclass(frozen=True)
class TypicalEnough(Condition):
    """P(x) > min(epsilon, delta exp(-H)), with the entropy H of the whole softmax, in nats."""

    epsilon: Number
    delta: Number

    @property
    def needs(self) -> Needs:
        """H."""
        return Needs(full_entropy=True)

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """The comparison is made between logarithms."""
        entropy = asked_for(
            seen.evidence.full_entropy, "the full entropy", "needs=rule.needs to evidence"
        )
        epsilon, delta = column(log(self.epsilon)), column(log(self.delta))
        return seen.evidence.log_prob > jnp.minimum(epsilon, delta - entropy)


@data_tree
@dataclasses.dataclass(frozen=True)
class Lenient(Condition):
    """The draw that refused the token accepts it at `lenience` times its q.

    In rows that are decoded greedily: p(x) >= lenience max p, by the plain softmax.
    """

    lenience: Number

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """U < p(x) / (lenience q(x)), with the very u that decided about the token."""
        found = seen.evidence
        near = found.gap <= column(-log(self.lenience))
        if found.asked is None:
            return near
        drawn = column(self.lenience) * found.asked < jnp.exp(found.draft_log_prob)
        return jnp.where(found.asked < 0, near, drawn)


@data_tree
@dataclasses.dataclass(frozen=True)
class Remembered(Condition):
    """The memory has seen the target put its choice in the draft token's place often enough."""

    why: ClassVar[Why] = Why.REFUSED_MEMORY
    uses_memory: ClassVar[bool] = True

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """The pair (draft token, argmax) is among the memory's keys."""
        keys = asked_for(
            seen.memory, "the keys of a CorrectionMemory", "memory=memory.keys() to accept"
        )
        return is_remembered(keys, seen.draft_tokens, seen.evidence.argmax)


@data_tree
@dataclasses.dataclass(frozen=True)
class Window:
    """The deferred window: the lossless rule accepts the next `size` draft tokens as well.

    Attributes:
      size: W; 0 for no window.
      kind: "paper" looks at all W of them, "reference" at W - 1; both demand that W fit.
    """

    size: Count
    kind: WindowKind = dataclasses.field(default="paper", metadata=STATIC)

    def is_clean(self, mismatch: Bool[Array, "rows draft"]) -> Bool[Array, "rows draft"]:
        """True where the window after a position has none of the row's mismatches."""
        followers = jnp.asarray(column(self.size))
        if self.kind == "reference":
            followers = jnp.maximum(followers - 1, 0)
        num_draft = mismatch.shape[1]
        last = jnp.minimum(jnp.arange(num_draft) + followers, num_draft - 1)
        # The count up to the last follower less that up to here.
        count = jnp.cumsum(mismatch, axis=1)
        last = jnp.broadcast_to(last, mismatch.shape)
        return jnp.take_along_axis(count, last, axis=1) == count

    def fits(self, num_draft: int, end: Int32[Array, " rows"]) -> Bool[Array, "rows draft"]:
        """True where the whole window lies within the row's block."""
        return jnp.arange(1, num_draft + 1) + column(self.size) <= end[:, None]
