"""What loosened rules are made of: conditions on one mismatch, and the deferred window after it.

Logits and probabilities are the target's raw ones, whatever the temperature, so that a threshold
means the same at every temperature.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.correction_memory import is_remembered
from fly_jax.verification.evidence import Entropy, Extra, TargetEvidence
from fly_jax.verification.rules.acceptance import Why

# Thresholds up to this one switch the gate off, as in FLy's reference code.
GATE_OFF = 0.01

_Given = TypeVar("_Given")
WindowKind = Literal["paper", "reference"]


def entropy_gate(evidence: TargetEvidence, threshold: float) -> Bool[Array, "rows positions"]:
    """True where the target is undecided enough for a mismatch to be considered for rescue.

    Args:
      evidence: with the entropy that the threshold is meant for.
      threshold: least entropy, in the measure's unit; `GATE_OFF` or less opens the gate everywhere.
    """
    return (evidence.entropy >= threshold) | (threshold <= GATE_OFF)


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

    @property
    def log_prob(self) -> Float32[Array, "rows draft"]:
        """Of the draft token in the target's plain softmax, in nats."""
        return self.evidence.draft_logit - self.evidence.log_sum_exp

    @property
    def gap(self) -> Float32[Array, "rows draft"]:
        """How far the draft token's logit lies below the largest one."""
        return self.evidence.argmax_logit - self.evidence.draft_logit


class Condition:
    """What must hold at a mismatch, considered on its own; one decision per position."""

    why: ClassVar[Why] = Why.REFUSED_GATE
    uses_memory: ClassVar[bool] = False

    @property
    def entropy_measure(self) -> Entropy | None:
        """The entropy that the evidence must carry."""
        return None

    @property
    def extra(self) -> Extra:
        """What else the evidence must carry."""
        return Extra()

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """True where a mismatch may be rescued as far as this condition goes."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Undecided(Condition):
    """The target's entropy is at least `threshold`: FLy's gate."""

    threshold: float
    measure: Entropy

    @property
    def entropy_measure(self) -> Entropy:
        """Measured with the gate off too, so that an audit can show it."""
        return self.measure

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """H >= threshold, or the threshold is as good as 0."""
        return entropy_gate(seen.evidence, self.threshold)


@dataclasses.dataclass(frozen=True)
class Near(Condition):
    """The draft token's logit is at most `nats` below the largest: p(x) >= exp(-nats) max p."""

    nats: float

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """Max z - z(x) <= nats."""
        return seen.gap <= self.nats


@dataclasses.dataclass(frozen=True)
class RunnerUp(Condition):
    """The draft token is the target's second choice, by logits of a ratio above `ratio`.

    Of second choices that tie, each will do. A ratio says nothing where the largest logit is not
    positive: nothing is rescued there.
    """

    ratio: float

    @property
    def extra(self) -> Extra:
        """The second choice's logit."""
        return Extra(runner_up=True)

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """Z(x) = z2, z2 > ratio z1 and z1 > 0; with sampling, x may also be the first choice."""
        found = seen.evidence
        second = _asked_for(found.runner_up_logit, "the runner-up's logit")
        is_second = found.draft_logit >= second
        is_close = found.draft_logit > self.ratio * found.argmax_logit
        return is_second & is_close & (found.argmax_logit > 0)


@dataclasses.dataclass(frozen=True)
class Probable(Condition):
    """The target gives the draft token a probability of at least `threshold`."""

    threshold: float

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """P(x) >= threshold."""
        return seen.log_prob >= math.log(self.threshold)


@dataclasses.dataclass(frozen=True)
class TypicalEnough(Condition):
    """P(x) > min(epsilon, delta exp(-H)), with the entropy H of the whole softmax, in nats."""

    epsilon: float
    delta: float

    @property
    def extra(self) -> Extra:
        """H."""
        return Extra(full_entropy=True)

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """The comparison is made between logarithms."""
        entropy = _asked_for(seen.evidence.full_entropy, "the full entropy")
        return seen.log_prob > jnp.minimum(math.log(self.epsilon), math.log(self.delta) - entropy)


@dataclasses.dataclass(frozen=True)
class DrawnLeniently(Condition):
    """When sampling: the draw that refused the token accepts it at `lenience` times its q."""

    lenience: float

    @property
    def extra(self) -> Extra:
        """The draw's second verdict."""
        return Extra(lenience=self.lenience)

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """U < p(x) / (lenience q(x)), with the very u that decided about the token."""
        return _asked_for(seen.evidence.lenient, "the lenient verdict")


@dataclasses.dataclass(frozen=True)
class Remembered(Condition):
    """The memory has seen the target put its choice in the draft token's place often enough."""

    why: ClassVar[Why] = Why.REFUSED_MEMORY
    uses_memory: ClassVar[bool] = True

    def holds(self, seen: Seen) -> Bool[Array, "rows draft"]:
        """The pair (draft token, argmax) is among the memory's keys."""
        keys = _asked_for(seen.memory, "the keys of a CorrectionMemory")
        return is_remembered(keys, seen.draft_tokens, seen.evidence.argmax)


@dataclasses.dataclass(frozen=True)
class Window:
    """The deferred window: the lossless rule accepts the next `size` draft tokens as well.

    Attributes:
      size: W; 0 for no window.
      kind: "paper" looks at all W of them, "reference" at W - 1; both demand that W fit.
      mismatches: so many of them may be mismatches after all, if each meets the conditions that
        are joined to this window.
    """

    size: int
    kind: WindowKind = "paper"
    mismatches: int = 0

    def is_clean(
        self, mismatch: Bool[Array, "rows draft"], allowed: Bool[Array, "rows draft"]
    ) -> Bool[Array, "rows draft"]:
        """True where what was drafted of the window after a position is as it should be.

        Args:
          mismatch: drafted tokens that the lossless rule refuses.
          allowed: positions at which all conditions hold.
        """
        followers = self.size
        if self.kind == "reference":
            followers = max(followers - 1, 0)
        followers = min(followers, mismatch.shape[1])

        def after(found: Bool[Array, "rows draft"]) -> Int[Array, "rows draft"]:
            # The count up to the last follower less that up to here.
            count = jnp.cumsum(found, axis=1)
            return jnp.pad(count, ((0, 0), (0, followers)), mode="edge")[:, followers:] - count

        if self.mismatches == 0:
            return after(mismatch) == 0
        return (after(mismatch) <= self.mismatches) & (after(mismatch & ~allowed) == 0)

    def fits(self, num_draft: int, end: Int32[Array, " rows"]) -> Bool[Array, "rows draft"]:
        """True where the whole window lies within the row's block."""
        return jnp.arange(1, num_draft + 1) + self.size <= end[:, None]


def _asked_for(value: _Given | None, name: str) -> _Given:
    if value is None:
        raise FlyJaxError(
            f"This rule needs {name}, which it was not given; pass what the rule's extra and "
            "uses_memory ask for."
        )
    return value
