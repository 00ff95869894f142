"""Which draft tokens a row keeps, what follows them, and why.

Rules are frozen, hashable dataclasses, static under `jit`. They read `TargetEvidence`, no logits,
and know no model: any engine can call them with evidence of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int8, Int32

from fly_jax.decoding.evidence import Entropy, EntropyMeasure, TargetEvidence
from fly_jax.decoding.sampling import Sampling
from fly_jax.errors import FlyJaxError

# Thresholds up to this one switch the gate off, as in FLy's reference code.
GATE_OFF = 0.01


class Why(enum.IntEnum):
    """What became of one position; `letter` is for the tokens that were emitted."""

    MATCHED = 0  # kept: the lossless rule accepts it
    RESCUED = 1  # kept: a mismatch that the rule loosens
    REFUSED_GATE = 2  # the target is too sure of another token
    REFUSED_WINDOW = 3  # a drafted token in its deferred window is a mismatch too
    REFUSED_BOUNDARY = 4  # only the block's end stood in the way: the window does not fit
    REFUSED = 5  # never loosened: an exact rule, a protected token, or one of probability 0
    CORRECTED = 6  # emitted by the target in place of the first refused token
    BONUS = 7  # emitted by the target after a block that was kept whole
    DROPPED = 8  # after the first refusal, or not drafted at all

    @property
    def letter(self) -> str:
        """m, r, c or b for matched, rescued, corrected and bonus; "-" for what is not emitted."""
        return _LETTERS.get(self, "-")


_LETTERS = {Why.MATCHED: "m", Why.RESCUED: "r", Why.CORRECTED: "c", Why.BONUS: "b"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What a round keeps of each row's draft.

    A row emits its first `num_accepted` draft tokens and then `next_token`.

    Attributes:
      num_accepted: draft tokens kept.
      next_token: the target's token that follows them.
      next_why: `Why.CORRECTED` or `Why.BONUS`.
      why: a `Why` for every draft position; only the first refused one says what refused it.
      num_rescued: rescues among the tokens kept.
    """

    num_accepted: Int32[Array, " rows"]
    next_token: Int32[Array, " rows"]
    next_why: Int8[Array, " rows"]
    why: Int8[Array, "rows draft"]
    num_rescued: Int32[Array, " rows"]


class Rule(Protocol):
    """What every rule offers."""

    @property
    def sampling(self) -> Sampling | None:
        """What target and draft are sampled with; None for greedy decoding."""
        ...

    @property
    def entropy_measure(self) -> Entropy | None:
        """The entropy that the evidence must carry, if any."""
        ...

    def accept(
        self,
        evidence: TargetEvidence,
        draft_tokens: Int[Array, "rows draft"],
        *,
        protected: Bool[Array, " vocab"] | None = None,
        num_drafted: Int[Array, " rows"] | None = None,
    ) -> Acceptance:
        """Decides; see `accept`."""
        ...


def accept(
    rule: Rule,
    evidence: TargetEvidence,
    draft_tokens: Int[Array, "rows draft"],
    *,
    protected: Bool[Array, " vocab"] | None = None,
    num_drafted: Int[Array, " rows"] | None = None,
) -> Acceptance:
    """Keeps a prefix of every row's draft. Pure, and cheap: it works on [rows, draft] only.

    Args:
      rule: how mismatches are treated.
      evidence: of the same draft tokens, made with the rule's `sampling` and `entropy_measure`.
      draft_tokens: what was drafted.
      protected: True for tokens that must not take part in a rescue, neither as the draft token nor
        as the target's argmax (say, those that end a text); None for no such token. The lossless
        rule accepts them as ever.
      num_drafted: draft tokens of each row, the same as the evidence was made with; the row's
        block, and with it the last window, ends there. None if every row has all.

    Raises:
      FlyJaxError: if the evidence does not have one position more than the draft.
    """
    return rule.accept(evidence, draft_tokens, protected=protected, num_drafted=num_drafted)


def entropy_gate(evidence: TargetEvidence, threshold: float) -> Bool[Array, "rows positions"]:
    """True where the target is undecided enough for a mismatch to be considered for rescue.

    Args:
      evidence: with the entropy that the threshold is meant for.
      threshold: least entropy, in the measure's unit; `GATE_OFF` or less opens the gate everywhere.
    """
    return (evidence.entropy >= threshold) | (threshold <= GATE_OFF)


class _Lossless:
    """What the rules share that keep nothing but what the evidence says is accepted."""

    @property
    def entropy_measure(self) -> None:
        """None needed."""

    def accept(
        self,
        evidence: TargetEvidence,
        draft_tokens: Int[Array, "rows draft"],
        *,
        protected: Bool[Array, " vocab"] | None = None,
        num_drafted: Int[Array, " rows"] | None = None,
    ) -> Acceptance:
        """Keeps the accepted prefix; nothing is rescued, so `protected` changes nothing."""
        return _lossless(evidence, draft_tokens, num_drafted)


@dataclasses.dataclass(frozen=True)
class Exact(_Lossless):
    """Keeps a draft token only if it is the target's most probable one: lossless and greedy."""

    @property
    def sampling(self) -> None:
        """Greedy."""


@dataclasses.dataclass(frozen=True)
class Sampled(_Lossless):
    """Rejection sampling: what is emitted has exactly the target's processed distribution.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. The draws are made with the
    evidence.

    Attributes:
      temperature: see `Sampling`.
      top_k: see `Sampling`.
      top_p: see `Sampling`.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _ = self.sampling  # checks the values

    @property
    def sampling(self) -> Sampling:
        """The three values as they are handed to evidence and draft."""
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class Fly:
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

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    entropy_threshold: float = 0.3
    window_size: int = 6
    entropy: EntropyMeasure = "top_k"
    entropy_top_k: int = 3
    window: Literal["paper", "reference"] = "paper"
    sampling: Sampling | None = None

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

    @property
    def entropy_measure(self) -> Entropy:
        """The gate's entropy; measured with the gate off too, so that an audit can show it."""
        return Entropy(self.entropy, self.entropy_top_k)

    def check(self, num_speculative_tokens: int) -> None:
        """Refuses blocks in which this rule could not rescue anything.

        Raises:
          FlyJaxError: if no deferred window fits.
        """
        if num_speculative_tokens <= self.window_size:
            raise FlyJaxError(
                f"With num_speculative_tokens={num_speculative_tokens} no deferred window of "
                f"window_size={self.window_size} fits into a block, so the published rule would "
                f"rescue nothing: draft at least {self.window_size + 1} tokens, or make the "
                "window smaller."
            )

    def accept(
        self,
        evidence: TargetEvidence,
        draft_tokens: Int[Array, "rows draft"],
        *,
        protected: Bool[Array, " vocab"] | None = None,
        num_drafted: Int[Array, " rows"] | None = None,
    ) -> Acceptance:
        """Keeps the prefix of matches and rescues.

        A refused mismatch is reported as `REFUSED` first, then `REFUSED_GATE`, `REFUSED_WINDOW` and
        `REFUSED_BOUNDARY`: the last one means that all of its window that was drafted is clean.
        """
        num_draft = _checked_draft(evidence, draft_tokens)
        present, end = _present(draft_tokens, num_drafted)
        accepted = evidence.accepted[:, :num_draft]

        followers = self.window_size
        if self.window == "reference":
            followers = max(followers - 1, 0)
        followers = min(followers, num_draft)
        # Mismatches among the followers: the count up to the last follower less that up to here.
        count = jnp.cumsum(~accepted & present, axis=1)
        later = jnp.pad(count, ((0, 0), (0, followers)), mode="edge")[:, followers:]
        is_clean = later == count
        fits = jnp.arange(1, num_draft + 1) + self.window_size <= end[:, None]

        gate = entropy_gate(evidence, self.entropy_threshold)[:, :num_draft]
        barred = _impossible(evidence)[:, :num_draft]
        if protected is not None:
            barred |= protected.at[draft_tokens].get(mode="fill", fill_value=True)
            barred |= protected[evidence.argmax[:, :num_draft]]

        refusal = jnp.select(
            [barred, ~gate, ~is_clean],
            [Why.REFUSED.value, Why.REFUSED_GATE.value, Why.REFUSED_WINDOW.value],
            Why.REFUSED_BOUNDARY.value,
        )
        rescued = ~accepted & gate & is_clean & fits & ~barred
        return _settle(evidence, present, end, accepted, rescued, refusal)


def _impossible(evidence: TargetEvidence) -> Bool[Array, "rows positions"]:
    """True where the target gives the draft token probability 0.

    That is less than the smallest normal float32, which accelerators round to 0: so defined, it is
    the same on all of them.
    """
    smallest = math.log(jnp.finfo(jnp.float32).tiny)
    log_prob = jnp.minimum(evidence.draft_logit - evidence.log_sum_exp, evidence.draft_log_prob)
    return ~(log_prob >= smallest)


def _lossless(
    evidence: TargetEvidence,
    draft_tokens: Int[Array, "rows draft"],
    num_drafted: Int[Array, " rows"] | None,
) -> Acceptance:
    """Keeps what `evidence.accepted` says."""
    num_draft = _checked_draft(evidence, draft_tokens)
    present, end = _present(draft_tokens, num_drafted)
    accepted = evidence.accepted[:, :num_draft]
    none = jnp.zeros_like(accepted)
    refusal = jnp.full(accepted.shape, Why.REFUSED.value)
    return _settle(evidence, present, end, accepted, none, refusal)


def _checked_draft(evidence: TargetEvidence, draft_tokens: Int[Array, "rows draft"]) -> int:
    """The number of draft positions, once the shapes are known to fit."""
    rows, num_draft = draft_tokens.shape
    if evidence.accepted.shape != (rows, num_draft + 1):
        raise FlyJaxError(
            f"The evidence has shape {evidence.accepted.shape} for draft tokens of shape "
            f"{draft_tokens.shape}; it needs shape {(rows, num_draft + 1)}: "
            "make it from the same draft tokens."
        )
    return num_draft


def _present(
    draft_tokens: Int[Array, "rows draft"], num_drafted: Int[Array, " rows"] | None
) -> tuple[Bool[Array, "rows draft"], Int32[Array, " rows"]]:
    """Which positions hold a draft token, and how many do in each row."""
    rows, num_draft = draft_tokens.shape
    if num_drafted is None:
        num_drafted = jnp.full((rows,), num_draft)
    end = num_drafted.astype(jnp.int32)
    return jnp.arange(num_draft) < end[:, None], end


def _settle(
    evidence: TargetEvidence,
    present: Bool[Array, "rows draft"],
    end: Int32[Array, " rows"],
    accepted: Bool[Array, "rows draft"],
    rescued: Bool[Array, "rows draft"],
    refusal: Int[Array, "rows draft"],
) -> Acceptance:
    """Keeps tokens up to the first that is neither accepted nor rescued."""
    prefix = jnp.cumprod((accepted | rescued) & present, axis=1).astype(bool)
    num_accepted = jnp.sum(prefix, axis=1, dtype=jnp.int32)
    is_end = jnp.arange(present.shape[1]) == num_accepted[:, None]
    why = jnp.select(
        [prefix & accepted, prefix, is_end & present],
        [Why.MATCHED.value, Why.RESCUED.value, refusal],
        Why.DROPPED.value,
    )
    next_why = jnp.where(num_accepted == end, Why.BONUS.value, Why.CORRECTED.value)
    return Acceptance(
        num_accepted=num_accepted,
        next_token=jnp.take_along_axis(evidence.replacement, num_accepted[:, None], axis=1)[:, 0],
        next_why=next_why.astype(jnp.int8),
        why=why.astype(jnp.int8),
        num_rescued=jnp.sum(prefix & rescued, axis=1, dtype=jnp.int32),
    )
