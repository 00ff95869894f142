"""What every rule takes and returns, and the lossless rules: they keep what the evidence accepts.

Rules are frozen, hashable dataclasses, static under `jit`. They read `TargetEvidence`, no logits,
and know no model: any engine can call them with evidence of its own.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int8, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.evidence import Entropy, Extra, TargetEvidence
from fly_jax.verification.sampling import Sampling


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
class Acceptance:
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

    def after(self, acceptance: Acceptance, count: Int[Array, " rows"]) -> RuleState:
        """The state once the first `count` tokens of each row's block have been emitted."""
        if self.budget is None or acceptance.regret is None:
            return self
        emitted = jnp.arange(acceptance.regret.shape[1]) < count[:, None]
        spent = jnp.sum(jnp.where(emitted, acceptance.regret, 0), axis=1)
        # The sum may round other than the running sums that were compared with the budget.
        return dataclasses.replace(self, budget=jnp.maximum(self.budget - spent, 0))


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

    @property
    def extra(self) -> Extra:
        """What else the evidence must carry."""
        ...

    @property
    def uses_memory(self) -> bool:
        """The rule looks mismatches up in a memory of corrections."""
        ...

    @property
    def budget(self) -> float | None:
        """The risk budget that every request begins with, in nats; None for no such limit."""
        ...

    @property
    def strict_tail(self) -> int:
        """Last positions of a block in which no mismatch can be kept, the others being open."""
        ...

    @property
    def longest_window(self) -> int:
        """Draft tokens that a deferred window may need after its mismatch; 0 without windows."""
        ...

    @property
    def has_lax_windows(self) -> bool:
        """Some window may hold mismatches."""
        ...

    def check(self, num_speculative_tokens: int) -> None:
        """Raises FlyJaxError for blocks in which the rule could not do what it is for."""
        ...

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
        """Decides; see `accept`."""
        ...


def accept(
    rule: Rule,
    evidence: TargetEvidence,
    draft_tokens: Int[Array, "rows draft"],
    *,
    protected: Bool[Array, " vocab"] | None = None,
    num_drafted: Int[Array, " rows"] | None = None,
    memory: Int32[Array, "pairs 2"] | None = None,
    state: RuleState | None = None,
) -> Acceptance:
    """Keeps a prefix of every row's draft. Pure, and cheap: it works on [rows, draft] only.

    Args:
      rule: how mismatches are treated.
      evidence: of the same draft tokens, made with the rule's `sampling`, `entropy_measure` and
        `extra`.
      draft_tokens: what was drafted.
      protected: True for tokens that must not take part in a rescue, neither as the draft token nor
        as the target's argmax (say, those that end a text); None for no such token. The lossless
        rule accepts them as ever.
      num_drafted: draft tokens of each row, the same as the evidence was made with; the row's
        block, and with it the last window, ends there. None if every row has all.
      memory: `CorrectionMemory.keys`, for a rule with `uses_memory`.
      state: of the rows, for a rule with a `budget`: begins as `initial_state`, and goes on as
        `RuleState.after`.

    Raises:
      FlyJaxError: the evidence does not have one position more than the draft, or the rule lacks
        what it asks for.
    """
    return rule.accept(
        evidence,
        draft_tokens,
        protected=protected,
        num_drafted=num_drafted,
        memory=memory,
        state=state,
    )


def initial_state(rule: Rule, num_rows: int) -> RuleState:
    """What a rule knows of rows of which it has seen nothing."""
    if rule.budget is None:
        return RuleState()
    return RuleState(jnp.full(num_rows, rule.budget, jnp.float32))


class _Lossless:
    """What the rules share that keep nothing but what the evidence says is accepted."""

    @property
    def entropy_measure(self) -> None:
        """None needed."""

    @property
    def extra(self) -> Extra:
        """Nothing needed."""
        return Extra()

    @property
    def uses_memory(self) -> bool:
        """No."""
        return False

    @property
    def budget(self) -> None:
        """Nothing is risked."""

    @property
    def strict_tail(self) -> int:
        """All positions are alike."""
        return 0

    @property
    def longest_window(self) -> int:
        """No window."""
        return 0

    @property
    def has_lax_windows(self) -> bool:
        """No window."""
        return False

    def check(self, num_speculative_tokens: int) -> None:
        """Every block will do."""

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
        """Keeps the accepted prefix; nothing is rescued, so all but `num_drafted` is moot."""
        num_draft = checked_draft(evidence, draft_tokens)
        present, end = drafted_positions(draft_tokens, num_drafted)
        accepted = evidence.accepted[:, :num_draft]
        none = jnp.zeros_like(accepted)
        refusal = jnp.full(accepted.shape, Why.REFUSED.value)
        return keep_prefix(evidence, present, end, accepted, none, refusal)


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


def checked_draft(evidence: TargetEvidence, draft_tokens: Int[Array, "rows draft"]) -> int:
    """The number of draft positions, once the shapes are known to fit."""
    rows, num_draft = draft_tokens.shape
    if evidence.accepted.shape != (rows, num_draft + 1):
        raise FlyJaxError(
            f"The evidence has shape {evidence.accepted.shape} for draft tokens of shape "
            f"{draft_tokens.shape}; it needs shape {(rows, num_draft + 1)}: "
            "make it from the same draft tokens."
        )
    return num_draft


def drafted_positions(
    draft_tokens: Int[Array, "rows draft"], num_drafted: Int[Array, " rows"] | None
) -> tuple[Bool[Array, "rows draft"], Int32[Array, " rows"]]:
    """Which positions hold a draft token, and how many do in each row."""
    rows, num_draft = draft_tokens.shape
    if num_drafted is None:
        num_drafted = jnp.full((rows,), num_draft)
    end = num_drafted.astype(jnp.int32)
    return jnp.arange(num_draft) < end[:, None], end


def keep_prefix(
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
