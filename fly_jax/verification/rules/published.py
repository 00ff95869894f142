"""The loosened rules of the literature, each by its own name and parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from fly_jax.errors import FlyJaxError
from fly_jax.verification.evidence import Entropy, EntropyMeasure
from fly_jax.verification.rules.conditions import (
    Condition,
    DrawnLeniently,
    Near,
    Probable,
    Remembered,
    RunnerUp,
    TypicalEnough,
    Undecided,
    Window,
    WindowKind,
)
from fly_jax.verification.rules.loose import Clause, Loose
from fly_jax.verification.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Fly(Loose):
    """FLy: keeps a mismatch that an undecided target then goes along with (arXiv 2511.22972).

    The mismatch at position j (from 1) of a block of K draft tokens is rescued iff
      - the gate is open: the target's entropy at j is at least `entropy_threshold`;
      - its deferred window is clean: the lossless rule accepts j+1 .. j+W (W = `window_size`), each
        considered on its own, so that a second mismatch in the window refuses the first one even
        where it would itself be rescued;
      - the window fits into the block: j + W <= K;
      - the target gives the draft token a probability above 0 (in float32; with sampling, also
        after top-k and top-p), and neither it nor the target's argmax is protected.

    With `sampling` the lossless rule is that of `Sampled`. Fly then rescues only what that rule has
    refused and never redraws what it has accepted, so that the emitted distribution is no longer
    the target's: it is moved towards the draft's, at undecided positions, by the probability that
    the draft token is refused and its window clean. The gate always sees untempered logits.

    Attributes:
      entropy_threshold: in the unit of `entropy`; `GATE_OFF` or less switches the gate off.
      window_size: W; 0 rescues every mismatch that passes the gate.
      entropy: see `Entropy.measure`. The published results come from "top_k" with 0.3; with
        "normalized", the formula printed in the paper, 0.3 rescues almost nothing.
      entropy_top_k: see `Entropy.top_k`.
      window: "paper", or "reference" for FLy's reference code, which looks at j+1 .. j+W-1 only and
        yet demands j + W <= K.
      sampling: None for greedy decoding.
      window_mismatches: so many mismatches in a window leave it clean, if each of them passes the
        gate (and whatever else is joined to this rule with &); 0 as published.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    entropy_threshold: float = 0.3
    window_size: int = 6
    entropy: EntropyMeasure = "top_k"
    entropy_top_k: int = 3
    window: WindowKind = "paper"
    sampling: Sampling | None = None
    window_mismatches: int = 0

    def __post_init__(self) -> None:
        _ = self.entropy_measure  # checks its values
        if not (math.isfinite(self.entropy_threshold) and self.entropy_threshold >= 0):
            raise FlyJaxError(
                f"entropy_threshold is {self.entropy_threshold}; it must be a number of at least "
                "0: give 0 to switch the gate off."
            )
        if self.window_size < 0:
            raise FlyJaxError(
                f"window_size is {self.window_size}; it must not be negative: "
                "give 0 for the gate alone."
            )
        if self.window not in ("paper", "reference"):
            raise FlyJaxError(f"window is {self.window!r}; choose 'paper' or 'reference'.")
        if self.window_mismatches < 0:
            raise FlyJaxError(
                f"window_mismatches is {self.window_mismatches}; it must not be negative: give 0 "
                "for the published window."
            )

    def clauses(self) -> tuple[Clause, ...]:
        """The gate and the deferred window."""
        gate = Undecided(self.entropy_threshold, Entropy(self.entropy, self.entropy_top_k))
        return (Clause((gate,), (Window(self.window_size, self.window, self.window_mismatches),)),)


@dataclasses.dataclass(frozen=True)
class Csd(Loose):
    """Calibrated speculative decoding: rescues what the target has often corrected for little.

    Zhou et al., arXiv 2604.13634. Greedy only. The mismatch of draft token x is rescued iff
      - the memory has seen the target's choice take the place of x more than lambda times (lambda
        is the memory's `min_count`);
      - z(x) - max z >= ln(`consistency`), in raw logits: x is at least so probable, relative to the
        target's choice.

    Attributes:
      consistency: tau; None leaves this half out.
      memory: False leaves the other half out.

    Raises:
      FlyJaxError: both halves left out, or a tau that is no ratio.
    """

    consistency: float | None = 0.01
    memory: bool = True

    def __post_init__(self) -> None:
        if self.consistency is None and not self.memory:
            raise FlyJaxError(
                "The rule csd was given neither its memory nor its consistency gate; leave at "
                "least one of them on."
            )
        if self.consistency is not None:
            _check_share("csd_consistency", self.consistency)

    @property
    def sampling(self) -> None:  # type: ignore[override]
        """Greedy."""

    def clauses(self) -> tuple[Clause, ...]:
        """The halves that are on."""
        halves: tuple[Condition, ...] = ()
        if self.consistency is not None:
            halves += (Near(-math.log(self.consistency)),)
        if self.memory:
            halves += (Remembered(),)
        return (Clause(halves),)


@dataclasses.dataclass(frozen=True)
class Lossy(Loose):
    """Rescues a draft token of at least a fixed probability: p(x) >= `threshold`.

    Attributes:
      threshold: least probability in the target's plain softmax.
      sampling: None for greedy decoding.

    Raises:
      FlyJaxError: no probability, or one that no mismatch can have.
    """

    threshold: float = 0.3
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        _check_share("lossy_threshold", self.threshold)
        if self.sampling is None and self.threshold > 0.5:
            raise FlyJaxError(
                f"lossy_threshold is {self.threshold} and decoding is greedy: a draft token that "
                "probable is the target's own choice, so nothing would be rescued; give at most "
                "0.5."
            )

    def clauses(self) -> tuple[Clause, ...]:
        """The threshold."""
        return (Clause((Probable(self.threshold),)),)


@dataclasses.dataclass(frozen=True)
class Lenience(Loose):
    """Speculative sampling that asks less of the draft (appendix of arXiv 2211.17192).

    When sampling, a draft token x ~ q is kept with probability min(1, p(x) / (l q(x))); a token
    that is not kept is replaced as by `Sampled`. No token is then emitted with more than 1/l times
    its probability. What l = 1 would refuse by the same draw counts as rescued. Greedy decoding is
    the limit of temperature 0 with the plain softmax on both sides: x is kept iff p(x) >= l max p.

    Attributes:
      lenience: l.
      sampling: None for greedy decoding.

    Raises:
      FlyJaxError: no ratio.
    """

    lenience: float = 0.5
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        _check_share("lenience", self.lenience)

    def clauses(self) -> tuple[Clause, ...]:
        """The lenient draw, or the ratio."""
        if self.sampling is not None:
            return (Clause((DrawnLeniently(self.lenience),)),)
        return (Clause((Near(-math.log(self.lenience)),)),)


@dataclasses.dataclass(frozen=True)
class Typical(Loose):
    """Medusa's typical acceptance (arXiv 2401.10774): p(x) > min(`epsilon`, `delta` exp(-H)).

    H is the entropy of the target's plain softmax, in nats: the flatter it is, the less is asked.

    Attributes:
      epsilon: what is enough anywhere.
      delta: what is enough where the target is sure.
      sampling: None for greedy decoding.

    Raises:
      FlyJaxError: a value that is no probability.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        _check_share("typical_epsilon", self.epsilon)
        _check_share("typical_delta", self.delta)

    def clauses(self) -> tuple[Clause, ...]:
        """The threshold that moves with the entropy."""
        return (Clause((TypicalEnough(self.epsilon, self.delta),)),)


@dataclasses.dataclass(frozen=True)
class Margin(Loose):
    """Rescues a draft token that is nearly the target's choice.

    Attributes:
      kind: "gap": max ln p - ln p(x) <= `gap`. "runner_up": x is the target's second choice, and
        the ratio of the two logits is above `ratio` (MARS, arXiv 2601.15498).
      gap: in nats.
      ratio: of raw logits; nothing is rescued where the largest is not positive.
      sampling: None for greedy decoding.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    kind: Literal["gap", "runner_up"] = "gap"
    gap: float = 0.3
    ratio: float = 0.9
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("gap", "runner_up"):
            raise FlyJaxError(f"margin is {self.kind!r}; choose 'gap' or 'runner_up'.")
        if not (math.isfinite(self.gap) and self.gap >= 0):
            raise FlyJaxError(
                f"margin_gap is {self.gap}; it must be a number of nats of at least 0: give one "
                "such as 0.3."
            )
        _check_share("margin_ratio", self.ratio)

    def clauses(self) -> tuple[Clause, ...]:
        """The margin that was chosen."""
        margin: Condition = Near(self.gap) if self.kind == "gap" else RunnerUp(self.ratio)
        return (Clause((margin,)),)


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise FlyJaxError(f"{name} is {value}; it must be above 0 and at most 1: correct it.")
