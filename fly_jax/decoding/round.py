"""One round on the device: draft, verify, gate, accept and advance, fused under one `jit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fly_jax.decoding.config import AUTO_DEPTHS
from fly_jax.decoding.depth import choose_depth, drafted_of
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.model import Draft, draft_room, draft_step
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.settling import settle_all, settle_deferring
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.errors import FlyJaxError
from fly_jax.models.cache import KVCache
from fly_jax.models.llama import Llama
from fly_jax.verification.evidence import Entropy, TargetEvidence, evidence
from fly_jax.verification.rules import Rule, Why, accept

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
      reports_mismatches: fills `RoundOutput.reports`, which a memory of corrections learns from.
      audits: fills it too, with an entropy even where the rule asks for none, and with it
        `Generation.reports`.
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
    audits: bool = False
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
    def reports(self) -> bool:
        """Rounds report on every token."""
        return self.reports_mismatches or self.audits

    @property
    def entropy_measure(self) -> Entropy | None:
        """The entropy that the evidence carries: the rule's own, or what an audit is given.

        That is the one over the whole vocabulary where the rule asks for that anyhow, and
        otherwise the one that FLy's gate is published with.
        """
        own = self.rule.entropy_measure
        if own is not None or not self.audits:
            return own
        return Entropy("full") if self.rule.extra.full_entropy else Entropy()

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
    settle = settle_deferring if spec.deferred_window else settle_all
    state, settled = settle(spec, state, proposal, seen, acceptance)
    # What an end of text or the limit cuts off is counted nowhere.
    counts = jnp.arange(settled.why.shape[1]) < settled.count[:, None]
    rescued = counts & (settled.why == Why.RESCUED)
    matched = counts & (settled.why == Why.MATCHED)
    output = RoundOutput(
        tokens=settled.tokens,
        why=settled.why,
        count=settled.count,
        num_drafted=jnp.where(live, drafted, 0),
        num_accepted=jnp.sum(matched | rescued, axis=1, dtype=jnp.int32),
        num_rescued=jnp.sum(rescued, axis=1, dtype=jnp.int32),
        num_draft_passes=proposal.num_passes[0],
        finished=state.finished,
        reports=settled.reports,
        budget=state.rule.budget,
        rolled_back=settled.rolled_back,
        draft_tokens=proposal.tokens if spec.reports_evidence else None,
        evidence=seen if spec.reports_evidence else None,
    )
    return state, jax.tree.map(lambda leaf: leaf[None], output)


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
        entropy=spec.entropy_measure,
        sampling=spec.rule.sampling,
        draft_logits=proposal.logits,
        key=key,
        num_drafted=None if spec.draft_stop is None else proposal.num_drafted,
        layout=target.layout,
        extra=spec.rule.extra,
    )


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
        threshold=state.threshold,
        live=~state.finished,
    )
    return proposal, dataclasses.replace(state, drafts=caches)
