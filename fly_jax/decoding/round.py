"""One round on the device: draft, verify, gate, accept and advance, fused under one `jit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fly_jax.decoding.config import AUTO_DEPTHS
from fly_jax.decoding.deferral import close, defer, is_broken
from fly_jax.decoding.depth import choose_depth, drafted_of, observe
from fly_jax.decoding.drafting import Draft, draft_room, draft_step
from fly_jax.decoding.evidence import TargetEvidence, evidence
from fly_jax.decoding.lookup import Lookup
from fly_jax.decoding.rules import Acceptance, Rule, Why, accept
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.decoding.stopping import EntropyStop, only_live
from fly_jax.errors import FlyJaxError
from fly_jax.models.cache import KVCache
from fly_jax.models.llama import Llama

Boundary = Literal["reject", "defer"]


@dataclasses.dataclass(frozen=True)
class RoundSpec:
    """What is static about a round: change any of it and the round compiles anew.

    Attributes:
      rule: which draft tokens are kept.
      num_speculative_tokens: K, or the largest one; 0 decodes one token at a time.
      depths: what K is chosen from, round by round, in ascending order and ending with
        `num_speculative_tokens`; empty for the same K in all rounds.
      lookup: the lowest drafting level, below the draft models, if any.
      eos_token_ids: tokens that end a row.
      rounds_per_dispatch: rounds that run before their tokens leave the device.
      reports_mismatches: fills `RoundOutput.other`, which a memory of corrections learns from.
      reports_evidence: fills `RoundOutput.draft_tokens` and `RoundOutput.evidence`, from which
        other settings of the rule can be judged.
      boundary: what becomes of a mismatch whose window does not fit into its block: "reject", the
        published rule, or "defer", which may complete the window in the next rounds.
      level_speculative_tokens: tokens that each draft model but the first proposes at a time for
        the one before it, at most.
      draft_stop: ends a row's drafting before K; None for never.
    """

    rule: Rule
    num_speculative_tokens: int
    lookup: Lookup | None = None
    eos_token_ids: tuple[int, ...] = ()
    rounds_per_dispatch: int = 1
    depths: tuple[int, ...] = ()
    reports_mismatches: bool = False
    reports_evidence: bool = False
    boundary: Boundary = "reject"
    level_speculative_tokens: tuple[int, ...] = ()
    draft_stop: EntropyStop | None = None

    def __post_init__(self) -> None:
        if self.depths and not (
            self.depths == tuple(sorted(set(self.depths)))
            and self.depths[0] >= 1
            and self.depths[-1] == self.num_speculative_tokens
        ):
            raise FlyJaxError(
                f"The depths to choose from are {self.depths}; they must be positive, ascend and "
                f"end with num_speculative_tokens={self.num_speculative_tokens}: correct them."
            )
        if self.num_speculative_tokens < 0 or self.rounds_per_dispatch < 1:
            raise FlyJaxError(
                f"A round was asked for with num_speculative_tokens={self.num_speculative_tokens} "
                f"and rounds_per_dispatch={self.rounds_per_dispatch}; they must be at least 0 and "
                "1: correct them."
            )
        if any(size < 1 for size in self.level_speculative_tokens):
            raise FlyJaxError(
                f"level_speculative_tokens is {self.level_speculative_tokens}; a draft model "
                "proposes at least 1 token at a time: give larger numbers."
            )
        if self.boundary == "defer" and (
            self.rule.longest_window == 0
            or self.rule.sampling is not None
            or self.rule.has_lax_windows
        ):
            raise FlyJaxError(
                f"boundary='defer' was asked for with the rule {type(self.rule).__name__}; it "
                "defers the windows of greedy decoding, without mismatches in them: choose a rule "
                "with such a window, as Fly has by default, and temperature 0, or "
                "boundary='reject'."
            )

    @property
    def deferred_window(self) -> int:
        """Size of the windows that may stay open after a round; 0 if none may."""
        return self.rule.longest_window if self.boundary == "defer" else 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Draft tokens that the target's pass may be made for, in ascending order."""
        k = self.num_speculative_tokens
        if self.depths or self.draft_stop is None:
            return self.depths or (k,)
        return (*(depth for depth in AUTO_DEPTHS if depth < k), k)

    @property
    def room(self) -> int:
        """Positions beyond a row's last token that a round may write to."""
        return draft_room(self.num_speculative_tokens, self.level_speculative_tokens, self.lookup)


def verify_step(
    model: Llama,
    cache: KVCache,
    text: Int[Array, "rows capacity"],
    length: Int[Array, " rows"],
    draft_tokens: Int[Array, "rows draft"],
) -> tuple[Float[Array, "rows block vocab"], KVCache]:
    """The target's pass over each row's last token and its K draft tokens.

    Args:
      model: the target.
      cache: its cache, valid up to `length - 1`.
      text: the rows' tokens.
      length: tokens of each row.
      draft_tokens: what to verify.

    Returns:
      Logits of the K + 1 tokens that may follow, and the cache with the block's keys.
    """
    last = jnp.take_along_axis(text, (length - 1)[:, None], axis=1)
    block = jnp.concatenate((last, draft_tokens), axis=1)
    hidden, cache = model.hidden(block, cache.with_length(length - 1))
    return model.logits(hidden), cache


def settle(
    spec: RoundSpec,
    state: DecodeState,
    draft_tokens: Int[Array, "rows draft"],
    acceptance: Acceptance,
) -> tuple[DecodeState, Int[Array, "rows block"], Int[Array, "rows block"], Int[Array, " rows"]]:
    """Appends what was accepted, up to an end of text or the row's limit.

    Returns:
      The state, the block's tokens, why each stands there, and how many of them are settled.
    """
    drafted = draft_tokens.shape[1]
    steps = jnp.arange(drafted + 1, dtype=jnp.int32)
    kept = acceptance.num_accepted[:, None]
    pad = ((0, 0), (0, 1))
    tokens = jnp.where(
        steps < kept, jnp.pad(draft_tokens, pad), acceptance.next_token[:, None]
    ).astype(jnp.int32)
    why = jnp.where(
        steps < kept, jnp.pad(acceptance.why, pad), acceptance.next_why[:, None]
    ).astype(jnp.int8)
    ends = _is_one_of(tokens, spec.eos_token_ids) & (steps <= kept)
    until_end = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1), drafted) + 1
    room = state.limit - state.length
    count = jnp.minimum(jnp.minimum(acceptance.num_accepted + 1, until_end), room)
    count = jnp.where(state.finished, 0, count).astype(jnp.int32)
    ended = jnp.any(ends & (steps < count[:, None]), axis=1)
    text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        state.tokens, tokens, state.length
    )
    length = state.length + count
    finished = state.finished | ended | (length >= state.limit)
    state = dataclasses.replace(state, tokens=text, length=length, finished=finished)
    return state, tokens, why, count


def decode_round(
    spec: RoundSpec,
    target: Llama,
    drafts: tuple[Llama, ...],
    state: DecodeState,
    inputs: RuleInputs,
) -> tuple[DecodeState, RoundOutput]:
    """Drafts K tokens, verifies them and accepts a prefix.

    Args:
      spec: the static part.
      target: the target.
      drafts: the draft models, the first proposing to the target and each other one to the one
        before it; none where K is 0.
      state: the rows; rows that are finished stay as they are.
      inputs: what the rule reads besides the evidence.

    Returns:
      The next state, and this round's output with a leading axis of one round.
    """
    key, draft_key, verify_key = _split(spec, state.key)
    live = ~state.finished
    depth = None
    if spec.depths and state.pace is not None:
        strict_tail = 0 if spec.deferred_window else spec.rule.strict_tail
        depth = choose_depth(state.pace, live, spec.depths, strict_tail)
    state = dataclasses.replace(state, key=key)
    proposal, state = _propose(spec, drafts, state, draft_key, depth)
    if spec.draft_stop is not None:
        longest = jnp.max(jnp.where(live, proposal.num_drafted, 0))
        depth = jnp.searchsorted(jnp.asarray(spec.widths), longest)
    seen, cache = _verify(spec, target, state, proposal, verify_key, depth)
    drafted = proposal.num_drafted
    state = dataclasses.replace(state, target=cache)
    acceptance = accept(
        spec.rule,
        seen,
        proposal.tokens,
        protected=inputs.protected,
        memory=inputs.memory,
        state=state.rule,
        num_drafted=None if depth is None else drafted,
    )
    if spec.draft_stop is not None and state.threshold is not None:
        adapted = spec.draft_stop.after(state.threshold, acceptance.num_accepted, drafted)
        state = dataclasses.replace(state, threshold=jnp.where(live, adapted, state.threshold))
    conclude = _conclude_deferring if spec.deferred_window else _conclude
    state, output = conclude(spec, state, proposal, seen, acceptance, drafted)
    if spec.reports_evidence:
        output = dataclasses.replace(output, draft_tokens=proposal.tokens, evidence=seen)
    return state, jax.tree.map(lambda leaf: leaf[None], output)


def _conclude(
    spec: RoundSpec,
    state: DecodeState,
    proposal: Draft,
    seen: TargetEvidence,
    acceptance: Acceptance,
    drafted: Int[Array, " rows"],
) -> tuple[DecodeState, RoundOutput]:
    """Appends what was accepted, and says what the host is told of it."""
    live = ~state.finished
    if state.pace is not None:
        state = dataclasses.replace(state, pace=observe(state.pace, acceptance, live))
    state, tokens, why, count = settle(spec, state, proposal.tokens, acceptance)
    state = dataclasses.replace(state, rule=state.rule.after(acceptance, count))
    # What an end of text or the limit cuts off is counted nowhere.
    rescued = (why == Why.RESCUED) & (jnp.arange(why.shape[1]) < count[:, None])
    return state, RoundOutput(
        tokens=tokens,
        why=why,
        count=count,
        num_drafted=jnp.where(live, drafted, 0),
        num_accepted=jnp.minimum(acceptance.num_accepted, count),
        num_rescued=jnp.sum(rescued, axis=1, dtype=jnp.int32),
        num_draft_passes=proposal.num_passes[0],
        finished=state.finished,
        other=_other(proposal.tokens, seen, why) if spec.reports_mismatches else None,
        budget=state.rule.budget,
    )


def _conclude_deferring(
    spec: RoundSpec,
    state: DecodeState,
    proposal: Draft,
    seen: TargetEvidence,
    acceptance: Acceptance,
    drafted: Int[Array, " rows"],
) -> tuple[DecodeState, RoundOutput]:
    """`_conclude`, where the end of a row may be provisional."""
    assert state.pace is not None
    assert state.window is not None
    live, before, window = ~state.finished, state.length, state.window
    room = state.limit - state.length
    whole, new = defer(acceptance, seen, state.pace, room, drafted, spec.deferred_window)
    pace = observe(state.pace, whole, live)
    state, _, why, count = settle(spec, state, proposal.tokens, whole)
    ended = state.finished & live
    broken = is_broken(window, seen, drafted, count)
    left = close(
        window,
        new,
        acceptance.next_token,
        state.tokens,
        before,
        (why, _other(proposal.tokens, seen, why)),
        count,
        drafted,
        broken,
        ended,
    )
    rule = state.rule.after(whole, left.charged)
    if rule.budget is not None:
        rule = dataclasses.replace(rule, budget=rule.budget + left.refund)
    ends_anew = _is_one_of(left.window.replacement, spec.eos_token_ids)
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
    settled = jnp.arange(left.why.shape[1]) < left.count[:, None]
    rescued = settled & (left.why == Why.RESCUED)
    matched = settled & (left.why == Why.MATCHED)
    return state, RoundOutput(
        tokens=left.tokens,
        why=left.why,
        count=left.count,
        num_drafted=jnp.where(live, drafted, 0),
        num_accepted=jnp.sum(matched | rescued, axis=1, dtype=jnp.int32),
        num_rescued=jnp.sum(rescued, axis=1, dtype=jnp.int32),
        num_draft_passes=proposal.num_passes[0],
        finished=state.finished,
        other=left.other if spec.reports_mismatches else None,
        budget=rule.budget,
        rolled_back=left.rolled_back,
    )


def _is_one_of(tokens: Int[Array, "*shape"], some: tuple[int, ...]) -> Bool[Array, "*shape"]:
    none = jnp.zeros(tokens.shape, bool)
    return functools.reduce(jnp.logical_or, (tokens == one for one in some), none)


def _verify(
    spec: RoundSpec,
    target: Llama,
    state: DecodeState,
    proposal: Draft,
    key: Key[Array, ""],
    depth: Int[Array, ""] | None,
) -> tuple[TargetEvidence, KVCache]:
    """The target's pass, as wide as the chosen depth, and what it says about the draft."""

    def at(width: int) -> Callable[[KVCache], tuple[TargetEvidence, KVCache]]:
        part = Draft(
            proposal.tokens[:, :width],
            None if proposal.logits is None else proposal.logits[:, :width],
            proposal.num_passes,
            jnp.minimum(proposal.num_drafted, width),
        )

        def run(cache: KVCache) -> tuple[TargetEvidence, KVCache]:
            logits, cache = verify_step(target, cache, state.tokens, state.length, part.tokens)
            seen = gather_evidence(spec, target, logits, part, key)
            missing = proposal.tokens.shape[1] - width
            padded = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, missing))), seen)
            return padded, cache

        return run

    if depth is None:
        return at(spec.num_speculative_tokens)(state.target)
    return jax.lax.switch(depth, [at(k) for k in spec.widths], state.target)


def gather_evidence(
    spec: RoundSpec,
    target: Llama,
    logits: Float[Array, "rows block vocab"],
    proposal: Draft,
    key: Key[Array, ""],
) -> TargetEvidence:
    """The evidence that the rule asks for."""
    return evidence(
        logits,
        proposal.tokens,
        entropy=spec.rule.entropy_measure,
        sampling=spec.rule.sampling,
        draft_logits=proposal.logits,
        key=key,
        num_drafted=None if spec.draft_stop is None else proposal.num_drafted,
        layout=target.layout,
        extra=spec.rule.extra,
    )


def _other(
    draft_tokens: Int[Array, "rows draft"], seen: TargetEvidence, why: Int[Array, "rows block"]
) -> Int[Array, "rows block"]:
    """Where draft and target disagreed, the token that does not stand there; else -1."""
    drafted = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    conditions = [why == Why.RESCUED.value, why == Why.CORRECTED.value]
    return jnp.select(conditions, [seen.argmax, drafted], -1).astype(jnp.int32)


def _split(spec: RoundSpec, key: Key[Array, ""]) -> tuple[Array, Array, Array]:
    if spec.rule.sampling is None:
        return key, key, key
    return tuple(jax.random.split(key, 3))


def _propose(
    spec: RoundSpec,
    drafts: tuple[Llama, ...],
    state: DecodeState,
    key: Key[Array, ""],
    depth: Int[Array, ""] | None,
) -> tuple[Draft, DecodeState]:
    if not drafts:
        nothing = jnp.zeros((state.tokens.shape[0], 0), jnp.int32)
        return Draft(nothing, None, jnp.zeros(1, jnp.int32), jnp.zeros_like(state.length)), state
    threshold = state.threshold
    if threshold is not None:
        threshold = only_live(threshold, ~state.finished)
    proposal, caches = draft_step(
        drafts,
        state.drafts,
        state.tokens,
        state.length,
        spec.num_speculative_tokens,
        level_speculative_tokens=spec.level_speculative_tokens,
        sampling=spec.rule.sampling,
        lookup=spec.lookup,
        key=key,
        depth=None if depth is None else drafted_of(depth, spec.depths),
        stop=spec.draft_stop,
        threshold=threshold,
    )
    return proposal, dataclasses.replace(state, drafts=caches)
