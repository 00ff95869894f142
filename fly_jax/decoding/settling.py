"""The end of a round: what the rule keeps is appended to the rows, and most of it settles."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fly_jax.decoding.deferral import close, defer, is_broken
from fly_jax.decoding.depth import observe
from fly_jax.decoding.drafters.drafter import Draft
from fly_jax.decoding.reports import Reports, report
from fly_jax.decoding.spec import RoundStructure
from fly_jax.decoding.state import DecodeState
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules import Verdict, Why


@dataclasses.dataclass(frozen=True)
class Emitted:
    """What a round settles, as `RoundOutput` has it."""

    tokens: Int[Array, "rows width"]
    why: Int[Array, "rows width"]
    count: Int[Array, " rows"]
    reports: Reports | None
    rolled_back: Bool[Array, " rows"] | None = None


def settle_all(
    structure: RoundStructure,
    state: DecodeState,
    proposal: Draft,
    seen: TargetEvidence,
    verdict: Verdict,
    ends: Bool[Array, " rows"] | None,
) -> tuple[DecodeState, Emitted]:
    """Appends what was accepted; `ends` is `RuleInputs.ends`."""
    if state.pace is not None:
        pace = observe(state.pace, verdict, ~state.finished)
        state = dataclasses.replace(state, pace=pace)
    state, tokens, why, count = append(structure, state, proposal.tokens, verdict, ends)
    state = dataclasses.replace(state, rule=state.rule.after(verdict, count))
    reports = report(proposal.tokens, seen, verdict.why, why) if structure.reports else None
    return state, Emitted(tokens, why, count, reports)


def settle_deferring(
    structure: RoundStructure,
    state: DecodeState,
    proposal: Draft,
    seen: TargetEvidence,
    verdict: Verdict,
    ends: Bool[Array, " rows"] | None,
) -> tuple[DecodeState, Emitted]:
    """`settle_all`, where the end of a row may be provisional."""
    drafted = proposal.num_drafted
    assert state.pace is not None
    assert state.window is not None
    live, before, window = ~state.finished, state.length, state.window
    room = state.limit - state.length
    whole, new = defer(verdict, seen, state.pace, room, drafted, structure.deferred_window)
    pace = observe(state.pace, whole, live)
    state, _, why, count = append(structure, state, proposal.tokens, whole, ends)
    ended = state.finished & live
    broken = is_broken(window, seen, drafted, count)
    reports = None
    if structure.reports:
        deferred = new.is_new[:, None] & (verdict.why == Why.REFUSED_BOUNDARY)
        decided = jnp.where(deferred, verdict.why, whole.why)
        reports = report(proposal.tokens, seen, decided, why, deferred)
    left = close(
        window,
        new,
        verdict.next_token,
        state.tokens,
        before,
        (why, reports),
        count,
        drafted,
        broken,
        ended,
    )
    rule = state.rule.after(whole, left.charged)
    if rule.budget is not None:
        rule = dataclasses.replace(rule, budget=rule.budget + left.refund)
    ends_anew = _is_end(left.window.replacement, structure.eos_token_ids, ends)
    ends_anew |= left.length >= state.limit
    state = dataclasses.replace(
        state,
        tokens=left.text,
        length=left.length,
        finished=jnp.where(left.rolled_back, ends_anew, state.finished),
        rule=rule,
        pace=pace,
        window=left.window,
    )
    return state, Emitted(left.tokens, left.why, left.count, left.reports, left.rolled_back)


def append(
    structure: RoundStructure,
    state: DecodeState,
    draft_tokens: Int[Array, "rows draft"],
    verdict: Verdict,
    ends: Bool[Array, " rows"] | None = None,
) -> tuple[DecodeState, Int[Array, "rows block"], Int[Array, "rows block"], Int[Array, " rows"]]:
    """Appends what was accepted, up to an end of text or the row's limit.

    Returns:
      The state, the block's tokens, why each stands there, and how many of them are settled.
    """
    drafted = draft_tokens.shape[1]
    steps = jnp.arange(drafted + 1, dtype=jnp.int32)
    kept = verdict.num_accepted[:, None]
    pad = ((0, 0), (0, 1))
    tokens = jnp.where(
        steps < kept, jnp.pad(draft_tokens, pad), verdict.next_token[:, None]
    ).astype(jnp.int32)
    why = jnp.where(steps < kept, jnp.pad(verdict.why, pad), verdict.next_why[:, None]).astype(
        jnp.int8
    )
    is_end = _is_end(tokens, structure.eos_token_ids, ends) & (steps <= kept)
    until_end = jnp.where(jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1), drafted) + 1
    room = state.limit - state.length
    count = jnp.minimum(jnp.minimum(verdict.num_accepted + 1, until_end), room)
    count = jnp.where(state.finished, 0, count).astype(jnp.int32)
    ended = jnp.any(is_end & (steps < count[:, None]), axis=1)
    text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        state.tokens, tokens, state.length
    )
    length = state.length + count
    finished = state.finished | ended | (length >= state.limit)
    state = dataclasses.replace(state, tokens=text, length=length, finished=finished)
    return state, tokens, why, count


def _is_end(
    tokens: Int[Array, rows * block],
    eos_token_ids: tuple[int, ...],
    ends: Bool[Array, " rows"] | None,
) -> Bool[Array, rows * block]:
    """Tokens that end the text of their row."""
    none = jnp.zeros(tokens.shape, bool)
    found = functools.reduce(jnp.logical_or, (tokens == one for one in eos_token_ids), none)
    if ends is None:
        return found
    return found & ends.reshape(-1, *(1,) * (tokens.ndim - 1))
