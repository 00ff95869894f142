"""Rules: dataclasses whose numbers are data, made of alternatives; how they combine, and decide.

Rules read `TargetEvidence`, no logits, and know no model: any engine can call them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import check_parameters, parameter
from fly_jax.shapes import DraftFlags, DraftTokens
from fly_jax.verification.data import STATIC, Count, Number, data_tree, narrowed, taken
from fly_jax.verification.evidence import Needs, TargetEvidence
from fly_jax.verification.rules import conditions
from fly_jax.verification.rules.conditions import Clause, Condition, RuleState, Seen, Verdict, Why

# The most rules in one combination, and the most alternatives that they make.
_MOST_COMBINED = 8


class Rule:
    """A rule rescues the mismatches that meet all demands of any one of its `clauses`.

    A rule is a frozen dataclass under `data_tree`. Its numbers are data under `jit`, scalars or one
    for each row. The kinds of its conditions, and how they are joined, are static. FlyJaxError for
    a number outside the range that its parameter declares.

    Attributes:
      support: the loosened rule to whose support the target is cut; None where it is not.
    """

    support: Loose | None = None

    def __post_init__(self) -> None:
        check_parameters(self)

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives, any of which is enough for a rescue; none for a lossless rule."""
        return ()

    @property
    def needs(self) -> Needs:
        """The numbers that the evidence must carry; static."""
        wanted = (condition.needs for condition in self._conditions())
        return functools.reduce(operator.or_, wanted, Needs())

    @property
    def uses_memory(self) -> bool:
        """Tells whether the rule looks mismatches up in a memory of corrections."""
        return any(condition.uses_memory for condition in self._conditions())

    @property
    def budget(self) -> Number | None:
        """The risk budget that every request begins with, in nats; None for no such limit."""
        return None

    def initial_state(self, num_rows: int) -> RuleState:
        """The state of rows of which the rule has seen nothing."""
        if self.budget is None:
            return RuleState()
        return RuleState(jnp.broadcast_to(jnp.asarray(self.budget, jnp.float32), (num_rows,)))

    @property
    def strict_tail(self) -> Count:
        """The last positions of a block, where no mismatch can be kept: the smallest window."""
        clauses = self.clauses()
        sizes = [clause.window_size for clause in clauses]
        array = conditions.numpy_of([*sizes, *(clause.enabled for clause in clauses)])
        none = np.int32(np.iinfo(np.int32).max)
        owned = (
            size if clause.enabled is None else array.where(clause.enabled, size, none)
            for size, clause in zip(sizes, clauses, strict=True)
        )
        least = functools.reduce(array.minimum, owned, none)
        return array.where(least == none, 0, least)

    @property
    def longest_window(self) -> int:
        """Draft tokens that a window may need after its mismatch, in any row; for the host."""
        return max((int(np.max(clause.window_size)) for clause in self.clauses()), default=0)

    def check(self, num_speculative_tokens: int) -> None:
        """Raises FlyJaxError if no deferred window fits into a block; for the host."""
        window = int(np.max(self.strict_tail))
        if self.clauses() and num_speculative_tokens <= window:
            raise FlyJaxError(
                f"With num_speculative_tokens={num_speculative_tokens} no deferred window of "
                f"window_size={window} fits into a block, and the published rule rescues nothing: "
                f"draft at least {window + 1} tokens, shorten the window, or give boundary=defer."
            )

    def _conditions(self) -> Iterable[Condition]:
        return (condition for clause in self.clauses() for condition in clause.conditions)


@data_tree
class Exact(Rule):
    """Keeps what the lossless rule accepts, and nothing else.

    Greedy, that is the target's most probable token. With sampling it is rejection sampling: what
    is emitted has exactly the target's processed distribution (Leviathan et al., arXiv 2211.17192;
    Chen et al., arXiv 2302.01318). The draws are made with the evidence. With a `support` the
    target's distribution is first cut to that of this rule; see `truncated`.
    """

    support: Loose | None = None

    def __post_init__(self) -> None:
        """Raises FlyJaxError for a support that looks beyond a position."""
        own = self.support
        if own is not None and (own.uses_memory or own.budget is not None):
            raise FlyJaxError(
                f"{own} is no support of a distribution: a memory or a budget looks beyond "
                "the position; give the rule without them."
            )


class Loose(Rule):
    """A rule that rescues mismatches; `a & b` rescues what both would, `a | b` what either would.

    It rescues only what the lossless rule has refused and never redraws what that has accepted.
    With sampling the emitted distribution is then no longer the target's.
    """

    def clauses(self) -> tuple[Clause, ...]:
        """The alternatives, any of which is enough for a rescue."""
        raise NotImplementedError

    def __and__(self, other: Any) -> Combination:
        return Combination("&", self, other)

    def __rand__(self, other: Any) -> Combination:
        return Combination("&", other, self)

    def __or__(self, other: Any) -> Combination:
        return Combination("|", self, other)

    def __ror__(self, other: Any) -> Combination:
        return Combination("|", other, self)


@data_tree
class Combination(Loose):
    """A rule made of two: "&" rescues what both would, "|" what either would.

    FlyJaxError for a rule that cannot be combined, too many of them, or different entropies.
    """

    operator: Literal["&", "|"] = dataclasses.field(metadata=STATIC)
    left: Loose
    right: Loose

    def __post_init__(self) -> None:
        for rule in (self.left, self.right):
            if not isinstance(rule, Loose) or isinstance(rule, Budget):
                raise FlyJaxError(
                    f"{type(rule).__name__} cannot be part of a combination: only loosened rules "
                    "combine with & and |, and a budget goes around the whole."
                )
        sides = len(self.left.clauses()), len(self.right.clauses())
        num_alternatives = sum(sides) if self.operator == "|" else math.prod(sides)
        check_size("The combination", _num_rules(self), num_alternatives)
        _ = self.needs  # which must be the same for both

    def clauses(self) -> tuple[Clause, ...]:
        """The clauses of both for |; for & each clause of the one joined with each of the other."""
        ones, others = self.left.clauses(), self.right.clauses()
        if self.operator == "|":
            return ones + others
        return tuple(one & other for one in ones for other in others)


def _num_rules(rule: Loose) -> int:
    return sum(map(_num_rules, (rule.left, rule.right))) if isinstance(rule, Combination) else 1


def check_size(combination: str, num_rules: int, num_alternatives: int) -> None:
    """Raises FlyJaxError for too large a combination, before its alternatives are built."""
    if max(num_rules, num_alternatives) > _MOST_COMBINED:
        raise FlyJaxError(
            f"{combination} joins {num_rules} rules, which makes {num_alternatives} alternatives "
            f"(& multiplies those of its sides); at most {_MOST_COMBINED} of each are possible: "
            "join fewer."
        )


@data_tree
class Budget(Loose):
    """A loosened rule that may lose so much and no more (after ASD, arXiv 2608.03447).

    A rescue's regret is max z - z(x), in nats: how much more probable, as a logarithm, the target
    finds its own choice. A mismatch is rescued iff
      - the rule rescues it;
      - the request's budget is not spent, and the regrets of this request's rescues up to and
        including this one do not exceed it.
    With a budget of 0, and once the budget is spent, decoding is lossless. FlyJaxError for a
    negative budget, or a budget around a budget.
    """

    rule: Loose
    total: Number | None = parameter(
        None, "nats that all rescues of a prompt may cost; 0 is lossless",
        name="risk_budget", kind=float, low=0.0, high=1e4,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rule, Loose) or isinstance(self.rule, Budget):
            raise FlyJaxError(
                f"A budget was put around {type(self.rule).__name__}; it goes around one loosened "
                "rule, or one combination of them."
            )

    @property
    def budget(self) -> Number | None:
        """The budget that every request begins with."""
        return self.total

    def clauses(self) -> tuple[Clause, ...]:
        """The clauses of the rule within the budget."""
        return self.rule.clauses()


@data_tree
class UnitedRules(Loose):
    """A loosened rule that is given by its clauses, of which each row has some."""

    alternatives: tuple[Clause, ...]

    def clauses(self) -> tuple[Clause, ...]:
        """The given clauses."""
        return self.alternatives


def per_row(rules: Sequence[Rule], like: Sequence[Rule] = ()) -> Loose:
    """Unites the rules of a batch: each row gets what its own rule would give it alone.

    The result has the alternatives of all rules, with a number for each row, and switches each off
    in the rows whose rule lacks it. Two batches run the same program if their rules differ only in
    numbers and in the order of rows. A server therefore passes as `like` a rule of every kind that
    a request may ask for, whose alternatives and limits the program then has as well: every batch
    runs the same program. It works on the host; rules that read an entropy must all read the same.
    FlyJaxError for a rule whose numbers are arrays of one for each row, or that cuts the target.
    """
    if any(rule.support is not None for rule in (*rules, *like)):
        raise FlyJaxError(
            "per_row was given a rule that cuts the target to a support, which all rows must have "
            "in common; give that rule to verify alone, for all rows."
        )
    # As they are inside `jit`, whole numbers made floats: an int would be another program.
    rules, like = ([jax.tree.map(lambda leaf: leaf, one) for one in some] for some in (rules, like))
    owned: list[dict[tuple[str, int], Clause]] = []
    for rule in (*rules, *like):
        clauses: dict[tuple[str, int], Clause] = {}
        for clause in rule.clauses():
            if clause.enabled is None:
                clause = dataclasses.replace(clause, enabled=True)
            kind = str(jax.tree.structure(clause))
            # A rule may have several alternatives of one kind.
            clauses[kind, sum(kind == other for other, _ in clauses)] = clause
        owned.append(clauses)
    # In an order that does not depend on the order of rows.
    alternatives = []
    for name in sorted({name for clauses in owned for name in clauses}):
        any_other = next(clauses[name] for clauses in owned if name in clauses)
        absent = dataclasses.replace(any_other, enabled=False)
        column = [clauses.get(name, absent) for clauses in owned[: len(rules)]]
        alternatives.append(jax.tree.map(lambda *numbers: _stacked(numbers), *column))
    united = UnitedRules(tuple(alternatives))
    _ = united.needs  # which must be the same for all
    budgets = [rule.budget for rule in (*rules, *like)]
    if all(budget is None for budget in budgets):
        return united
    none = np.float32(np.inf)
    return Budget(united, _stacked([none if one is None else one for one in budgets[: len(rules)]]))


def _stacked(numbers: Sequence[Any]) -> np.ndarray:
    """A number for each row, of the types that arrays on a device have."""
    arrays = [np.asarray(number) for number in numbers]
    if any(array.ndim for array in arrays):
        raise FlyJaxError(
            "per_row was given a rule with an array of numbers; give it one rule for each row, "
            "with one number for each parameter."
        )
    return narrowed(np.stack(arrays))


def accept(
    rule: Rule, evidence: TargetEvidence, draft_tokens: DraftTokens, *,
    protected: Bool[Array, "*rows vocab"] | None = None,
    num_drafted: Int[Array, " rows"] | None = None, memory: Int32[Array, "pairs 2"] | None = None,
    state: RuleState | None = None,
) -> Verdict:  # fmt: skip
    """Keeps a prefix of every row's draft. Pure, and cheap: it works on [rows, draft] only.

    FlyJaxError where the evidence is of another draft, or the rule lacks what it asks for.

    Args:
      evidence: of the same draft tokens, made with the rule's `needs`.
      protected: True for tokens that must not take part in a rescue, neither as the draft token nor
        as the target's argmax (say, those that end a text), of all rows or of each; None for no
        such token. What the lossless rule accepts is accepted as ever.
      num_drafted: draft tokens of each row, the same as the evidence was made with; the row's
        block, and with it the last window, ends there. None if every row has all.
      memory: `CorrectionMemory.keys`, for a rule with `uses_memory`.
      state: of the rows, for a rule with a `budget`: begins as `rule.initial_state`, and goes on as
        `RuleState.after`.
    """
    rows, num_draft = draft_tokens.shape
    if evidence.accepted.shape != (rows, num_draft + 1):
        raise FlyJaxError(
            f"The evidence has shape {evidence.accepted.shape} for draft tokens of shape "
            f"{draft_tokens.shape}; it needs shape {(rows, num_draft + 1)}: "
            "make it from the same draft tokens."
        )
    if num_drafted is None:
        num_drafted = jnp.full((rows,), num_draft)
    end = num_drafted.astype(jnp.int32)
    present = jnp.arange(num_draft) < end[:, None]
    here: TargetEvidence = jax.tree.map(lambda leaf: leaf[:, :num_draft], evidence)
    accepted = here.accepted
    mismatch, barred = ~accepted & present, barred_tokens(here, draft_tokens, protected)
    affordable = None if rule.budget is None else _affordable(here, mismatch, state)
    seen = Seen(here, draft_tokens, memory)
    allowed, refusal = jnp.zeros_like(accepted), jnp.zeros(accepted.shape, jnp.int32)
    for clause in rule.clauses():
        allows, reason = clause.judge(seen, mismatch, barred, affordable, end)
        allowed, refusal = allowed | allows, jnp.maximum(refusal, reason)
    rescued = ~accepted & allowed
    refusal = jnp.where(barred | (refusal == 0), Why.REFUSED.value, refusal)

    # A prefix is kept: up to the first token that is neither accepted nor rescued.
    prefix = jnp.cumprod((accepted | rescued) & present, axis=1).astype(bool)
    num_accepted = jnp.sum(prefix, axis=1, dtype=jnp.int32)
    is_end = jnp.arange(num_draft) == num_accepted[:, None]
    kinds: list[Any] = [Why.MATCHED.value, Why.RESCUED.value, refusal]
    why = jnp.select([prefix & accepted, prefix, is_end & present], kinds, Why.DROPPED.value)
    next_why = jnp.where(num_accepted == end, Why.BONUS.value, Why.CORRECTED.value)
    is_rescue = prefix & rescued
    return Verdict(
        num_accepted=num_accepted, next_token=taken(evidence.replacement, num_accepted),
        next_why=next_why.astype(jnp.int8), why=why.astype(jnp.int8),
        num_rescued=jnp.sum(is_rescue, axis=1, dtype=jnp.int32),
        regret=None if rule.budget is None else jnp.where(is_rescue, here.gap, 0),
    )  # fmt: skip


def barred_tokens(
    evidence: TargetEvidence, drafted: DraftTokens, protected: Bool[Array, "*rows vocab"] | None
) -> DraftFlags:
    """Tells where a token is protected, or has probability 0: cut, or before the temperature."""
    # Accelerators round numbers below the smallest normal float32 to 0; here every device does.
    smallest = math.log(jnp.finfo(jnp.float32).tiny)
    barred = ~((evidence.log_prob >= smallest) & (evidence.draft_log_prob > -jnp.inf))
    if protected is not None:
        protected = jnp.asarray(protected)
        rows = (jnp.arange(len(drafted))[:, None],) if protected.ndim == 2 else ()
        barred |= protected.at[*rows, drafted].get(mode="fill", fill_value=True)
        barred |= protected[*rows, evidence.argmax]
    return barred


def _affordable(
    evidence: TargetEvidence, mismatch: DraftFlags, state: RuleState | None
) -> DraftFlags:
    """Tells which mismatches the rest of the rows' budgets pays for."""
    remedy = "state=rule.initial_state(rows), and from then on what RuleState.after returns"
    budget = None if state is None else state.budget
    left = conditions.asked_for(budget, "the state of its rows' budgets", remedy)[:, None]
    # A refused mismatch ends the block, so that at any position that is reached all mismatches
    # before it have been rescued: the regrets of mismatches add up to what was spent.
    spent = jnp.cumsum(jnp.where(mismatch, evidence.gap, 0), axis=1)
    return (spent <= left) & (left > 0)
