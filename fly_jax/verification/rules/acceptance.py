"""From evidence to a verdict: which draft tokens a row keeps, and what follows them."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules.conditions import Block, RuleState, Seen, Verdict, Why, asked_for
from fly_jax.verification.rules.rule import Rule


def accept(
    rule: Rule,
    evidence: TargetEvidence,
    draft_tokens: Int[Array, "rows draft"],
    *,
    protected: Bool[Array, "*rows vocab"] | None = None,
    num_drafted: Int[Array, " rows"] | None = None,
    memory: Int32[Array, "pairs 2"] | None = None,
    state: RuleState | None = None,
) -> Verdict:
    """Keeps a prefix of every row's draft. Pure, and cheap: it works on [rows, draft] only.

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

    Raises:
      FlyJaxError: the evidence does not have one position more than the draft, or the rule lacks
        what it asks for.
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
    mismatch, barred = ~accepted & present, _barred(here, draft_tokens, protected)
    affordable = None if rule.budget is None else _affordable(here, mismatch, state)
    block = Block(mismatch, barred, affordable, end)
    seen = Seen(here, draft_tokens, memory)
    allowed, refusals = [jnp.zeros_like(accepted)], [jnp.zeros(accepted.shape, jnp.int32)]
    for clause in rule.clauses():
        allows, refusal = clause.judge(seen, block)
        allowed.append(allows)
        refusals.append(refusal)
    rescued = ~accepted & functools.reduce(operator.or_, allowed)
    refusal = functools.reduce(jnp.maximum, refusals)
    refusal = jnp.where(barred | (refusal == 0), Why.REFUSED.value, refusal)

    # A prefix is kept: up to the first token that is neither accepted nor rescued.
    prefix = jnp.cumprod((accepted | rescued) & present, axis=1).astype(bool)
    num_accepted = jnp.sum(prefix, axis=1, dtype=jnp.int32)
    is_end = jnp.arange(num_draft) == num_accepted[:, None]
    why = jnp.select(
        [prefix & accepted, prefix, is_end & present],
        [Why.MATCHED.value, Why.RESCUED.value, refusal],
        Why.DROPPED.value,
    )
    next_why = jnp.where(num_accepted == end, Why.BONUS.value, Why.CORRECTED.value)
    is_rescue = prefix & rescued
    return Verdict(
        num_accepted=num_accepted,
        next_token=jnp.take_along_axis(evidence.replacement, num_accepted[:, None], axis=1)[:, 0],
        next_why=next_why.astype(jnp.int8),
        why=why.astype(jnp.int8),
        num_rescued=jnp.sum(is_rescue, axis=1, dtype=jnp.int32),
        regret=None if rule.budget is None else jnp.where(is_rescue, here.gap, 0),
    )


def _barred(
    evidence: TargetEvidence,
    draft_tokens: Int[Array, "rows draft"],
    protected: Bool[Array, "*rows vocab"] | None,
) -> Bool[Array, "rows draft"]:
    """True for protected tokens, and where the target gives the draft token probability 0.

    That is less than the smallest normal float32, which accelerators round to 0: so defined, it is
    the same on all of them.
    """
    smallest = math.log(jnp.finfo(jnp.float32).tiny)
    barred = ~(jnp.minimum(evidence.log_prob, evidence.draft_log_prob) >= smallest)
    if protected is not None:
        protected = jnp.asarray(protected)
        rows = (jnp.arange(len(draft_tokens))[:, None],) if protected.ndim == 2 else ()
        barred |= protected.at[*rows, draft_tokens].get(mode="fill", fill_value=True)
        barred |= protected[*rows, evidence.argmax]
    return barred


def _affordable(
    evidence: TargetEvidence, mismatch: Bool[Array, "rows draft"], state: RuleState | None
) -> Bool[Array, "rows draft"]:
    """Mismatches that what is left of the rows' budgets pays for."""
    left = asked_for(
        None if state is None else state.budget,
        "the state of its rows' budgets",
        "state=rule.initial_state(rows), and from then on what RuleState.after returns",
    )[:, None]
    # A refused mismatch ends the block, so that at any position that is reached all mismatches
    # before it have been rescued: the regrets of mismatches add up to what was spent.
    spent = jnp.cumsum(jnp.where(mismatch, evidence.gap, 0), axis=1)
    return (spent <= left) & (left > 0)
