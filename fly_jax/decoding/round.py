"""A dispatch of rounds on the device: propose, verify, commit, observe, fused under one `jit`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.deferral import Emitted, close, defer
from fly_jax.decoding.depth import Choice, choose_depth, observe, worth_drafting
from fly_jax.decoding.drafters.drafter import Draft, Drafter, Terms
from fly_jax.decoding.drafters.model import slice_rows
from fly_jax.decoding.reports import report
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.models.cache import KVCache, NewEntries
from fly_jax.models.llama import Llama
from fly_jax.shapes import DraftTokens, RowFlags, RowInts, RowKeys, Text
from fly_jax.verification.evidence import TargetEvidence, evidence
from fly_jax.verification.rules import Verdict, Why, accept
from fly_jax.verification.verify import truncated

_Carry = tuple[Array, DecodeState, RoundOutput]
_Seen = tuple[TargetEvidence, NewEntries, Float[Array, "rows block embed"] | None]


@dataclasses.dataclass(frozen=True, eq=False)
class RoundProgram:
    """The program of a dispatch: rounds with their static part, models and exchangeable inputs."""

    static: RoundStatic
    target: Llama
    drafter: Drafter | None
    inputs: RuleInputs

    def dispatch(self, state: DecodeState) -> tuple[DecodeState, RoundOutput]:
        """Runs up to `rounds_per_dispatch` rounds, none once every row is finished.

        With `RuleInputs.seated` it ends with the first row that is done: another gets its place.
        A single round runs without a loop around it. Within a loop, the TPU compiler gives finely
        split matrices another order in memory than they arrive in, and copies them whole: a 405B
        target would not fit (docs/planner.md). The price is the round that the host has dispatched
        ahead when the last row finishes: it runs, and changes nothing.
        """
        # Jitted to be traced once, for its shapes and for the loop.
        one_round, most = jax.jit(self.decode, inline=True), self.static.rounds_per_dispatch
        if most == 1:
            return one_round(state)
        shapes = jax.eval_shape(one_round, state)[1]
        empty = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape[1:]), leaf.dtype), shapes)

        def run(carry: _Carry) -> _Carry:
            index, state, outputs = carry
            state, output = one_round(state)
            put = functools.partial(
                jax.lax.dynamic_update_slice_in_dim,
                start_index=index, axis=0, allow_negative_indices=False,
            )  # fmt: skip
            outputs = jax.tree.map(put, outputs, output)
            return index + 1, state, outputs

        def unfinished(carry: _Carry) -> Bool[Array, ""]:
            index, state, _ = carry
            goes_on = (index < most) & ~jnp.all(state.finished)
            if self.inputs.seated is not None:
                goes_on &= jnp.all(state.finished == ~self.inputs.seated)
            return goes_on

        _, state, outputs = jax.lax.while_loop(unfinished, run, (jnp.int32(0), state, empty))
        return state, outputs

    def decode(self, state: DecodeState) -> tuple[DecodeState, RoundOutput]:
        """Drafts up to K tokens and keeps a prefix; the output has a leading axis of one round."""
        static, drafter, inputs, live = self.static, self.drafter, self.inputs, ~state.finished
        draft_keys = verify_keys = None
        if inputs.sampling is not None:
            split = jax.vmap(lambda key: jax.random.split(key, 3))(state.keys)
            draft_keys, verify_keys = split[:, 1], split[:, 2]
            state = dataclasses.replace(state, keys=split[:, 0])

        # 1) Propose.
        draft, drafter_state, choice, is_asked = self._chosen_draft(state, draft_keys)

        # 2) Verify: the target's pass, its evidence about the draft, and the rule's verdict.
        seen, new, hidden = self._verify(state, draft, verify_keys)
        cache = state.target.with_length(state.length - 1).written(new, self.target.layout)
        state = dataclasses.replace(state, target=cache, drafter=drafter_state)
        num_drafted = draft.num_drafted if self._may_be_short else None
        verdict = accept(
            inputs.rule, seen, draft.tokens, protected=inputs.protected, memory=inputs.memory,
            state=state.rule, num_drafted=num_drafted,
        )  # fmt: skip

        # 3) Commit: what is kept is appended, and what is certain settles.
        settle = self._settle_deferring if static.deferred_window else self._settle_all
        state, settled = settle(state, draft, seen, verdict, is_asked)

        # 4) Observe.
        if drafter is not None:
            observed = drafter.observe(state.drafter, verdict, hidden, draft=draft, live=live)
            state = dataclasses.replace(state, drafter=observed)

        # Tokens cut off by an end of text or the limit are counted nowhere.
        counts = jnp.arange(settled.why.shape[1]) < settled.count[:, None]
        rescued = counts & (settled.why == Why.RESCUED)
        matched = counts & (settled.why == Why.MATCHED)
        output = RoundOutput(
            tokens=settled.tokens, why=settled.why, count=settled.count, live=live,
            num_drafted=jnp.where(live, draft.num_drafted, 0),
            num_accepted=jnp.sum(matched | rescued, axis=1, dtype=jnp.int32),
            num_rescued=jnp.sum(rescued, axis=1, dtype=jnp.int32),
            num_draft_passes=draft.num_passes[0] if draft.num_passes.size else jnp.int32(0),
            finished=state.finished, reports=settled.reports, budget=state.rule.budget,
            rolled_back=settled.rolled_back, depth=None if choice is None else choice.depth,
            expected=None if choice is None else choice.expected,
            draft_tokens=draft.tokens if static.reports_evidence else None,
            evidence=seen if static.reports_evidence else None,
        )  # fmt: skip
        return state, jax.tree.map(lambda leaf: leaf[None], output)

    def _chosen_draft(
        self, state: DecodeState, keys: RowKeys | None
    ) -> tuple[Draft, object, Choice | None, Bool[Array, ""] | None]:
        """The draft, the drafter's state, the K if it is chosen, and whether the drafter was asked.

        Where a lookup promises more tokens a second than the drafter, it drafts in its place.
        """
        drafter, depths, live = self.drafter, self.static.depths, ~state.finished
        if drafter is None or not depths or state.stats is None:
            return *self._propose(state, keys, None), None, None
        likely = self._choice(state, live)
        copied, is_asked = None, jnp.bool_(True)
        if self.static.may_copy(drafter) and self.inputs.sampling is None:
            copied = self._copied(state)
            choice = self._choice(state, live, copied)
            is_asked = likely.speed > choice.speed
            if state.window is not None:  # which a lookup may find nothing for
                is_asked |= jnp.any(state.window.is_open & live)
        depth, least_rate = likely.depth, None
        if self._is_rated:
            depth, least_rate = worth_drafting(state.stats, depths)
            room = state.limit - state.length - 1
            most = self.static.num_speculative_tokens
            depth = jnp.minimum(depth, jnp.where(least_rate > 0, room, most))
        wanted = jnp.broadcast_to(jnp.where(is_asked, depth, 0), state.length.shape)
        draft, drafter_state = self._propose(state, keys, wanted, least_rate)
        if copied is not None:
            rates = None if draft.rates is None else copied.rates
            copied = dataclasses.replace(copied, num_passes=draft.num_passes, rates=rates)
            either = functools.partial(jnp.where, is_asked)
            draft, likely = jax.tree.map(either, (draft, likely), (copied, choice))
        if self._is_rated:
            likely = self._choice(state, live, draft)
        fewer = jnp.minimum(draft.num_drafted, likely.depth)
        return dataclasses.replace(draft, num_drafted=fewer), drafter_state, likely, is_asked

    def _copied(self, state: DecodeState) -> Draft:
        """What the lookup proposes by itself; without one, tokens of no chance."""
        k, lookup, rows = self.static.num_speculative_tokens, self.static.lookup, len(state.length)
        if lookup is None:
            zeros, count = jnp.zeros((rows, k), jnp.int32), jnp.full_like(state.length, k)
            return Draft(zeros, None, count, jnp.zeros(0, jnp.int32), zeros.astype(jnp.float32))
        terms = Terms(earlier=self.inputs.earlier)
        return lookup.propose((), state.tokens, state.length, k, terms)[0]

    def _choice(self, state: DecodeState, live: RowFlags, draft: Draft | None = None) -> Choice:
        """The K of this round, of a draft that is made or, as far as is known, of the drafter's."""
        static, drafter = self.static, self.drafter
        assert drafter is not None
        assert state.stats is not None
        strict_tail = 0 if static.deferred_window else self.inputs.rule.strict_tail
        stats, num_behind, rates, num_passes = state.stats, jnp.int32(0), None, None
        if state.window is not None and static.depths[0] == 0:
            # Only draft tokens can complete it.
            is_open = jnp.any(state.window.is_open & live)
            costs = stats.costs.at[0, 0].add(jnp.where(is_open, jnp.inf, 0))
            stats = dataclasses.replace(stats, costs=costs)
        if draft is not None and draft.rates is not None:
            is_real = jnp.arange(draft.rates.shape[1]) < draft.num_drafted[:, None]
            rates, num_passes = jnp.where(is_real, draft.rates, 0), jnp.sum(draft.num_passes)
        else:
            num_behind = drafter.passes_behind(state.drafter, state.length, live)
            if drafter.rates_drafts:
                num_passes = jnp.asarray(static.depths, jnp.int32)
        left = state.limit - state.length
        given = static.depths, strict_tail, left, num_behind, rates, num_passes
        return choose_depth(stats, live, *given)

    def _propose(
        self, state: DecodeState, keys: RowKeys | None, wanted: RowInts | None,
        least_rate: Float[Array, ""] | None = None,
    ) -> tuple[Draft, object]:  # fmt: skip
        drafter, k = self.drafter, self.static.num_speculative_tokens
        if drafter is None:
            nothing = jnp.zeros((state.tokens.shape[0], 0), jnp.int32)
            return Draft(nothing, None, jnp.zeros_like(state.length), jnp.zeros(0, jnp.int32)), None
        # For a finished row nobody is to wait.
        if drafter.adapts or drafter.rests or least_rate is not None:
            wanted = jnp.where(state.finished, 0, k if wanted is None else wanted)
        terms = Terms(wanted, self.inputs.sampling, keys, self.inputs.earlier, least_rate)
        return drafter.propose(state.drafter, state.tokens, state.length, k, terms)

    def _verify(self, state: DecodeState, draft: Draft, keys: RowKeys | None) -> _Seen:
        """The target's pass, as wide as the longest draft of a live row."""
        target, drafter, inputs = self.target, self.drafter, self.inputs
        cache = state.target.with_length(state.length - 1)
        num_draft, is_short = draft.tokens.shape[1], self._may_be_short

        def run(width: int) -> _Seen:  # as a branch, only reads the cache: returned, it is copied
            tokens, missing = draft.tokens[:, :width], num_draft - width
            block = _block(state.tokens, state.length, tokens)
            layers = () if drafter is None else drafter.hidden_layers
            hidden, new, read = target.hidden_and_inputs(block, cache, layers)
            logits = truncated(
                inputs.rule.support, target.logits(hidden),
                protected=inputs.protected, layout=target.layout,
            )  # fmt: skip
            seen = evidence(
                logits, tokens, needs=self.static.needs(inputs.rule),
                sampling=inputs.sampling,
                draft_logits=None if draft.logits is None else draft.logits[:, :width], key=keys,
                num_drafted=jnp.minimum(draft.num_drafted, width) if is_short else None,
                layout=target.layout,
            )  # fmt: skip
            whole = (0, 0), (0, missing)
            seen = jax.tree.map(
                lambda leaf: jnp.pad(leaf, (*whole, *((0, 0),) * (leaf.ndim - 2))), seen
            )
            wanted = drafter is not None and drafter.needs_hidden
            padded = jnp.pad(read, (*whole, (0, 0))) if wanted else None
            return seen, new.padded(num_draft + 1), padded

        widths = self.static.widths(drafter)
        if len(widths) == 1:
            return run(num_draft)
        longest = jnp.max(jnp.where(state.finished, 0, draft.num_drafted))
        index = jnp.searchsorted(jnp.asarray(widths), longest)
        return jax.lax.switch(index, [functools.partial(run, width) for width in widths])

    @property
    def _is_rated(self) -> bool:
        """Whether K is chosen behind the draft, whose drawn tokens must not say how many count."""
        if (drafter := self.drafter) is None:
            return False
        draws = self.inputs.sampling is not None and drafter.num_models > 0
        return drafter.rates_drafts and not draws

    @property
    def _may_be_short(self) -> bool:
        drafter = self.drafter
        some_fall_short = drafter is not None and drafter.may_fall_short
        return some_fall_short or len(self.static.widths(drafter)) > 1

    def _settle_all(
        self, state: DecodeState, proposal: Draft, seen: TargetEvidence, verdict: Verdict,
        is_asked: Bool[Array, ""] | None,
    ) -> tuple[DecodeState, Emitted]:  # fmt: skip
        if state.stats is not None:
            stats = observe(state.stats, verdict, ~state.finished, is_asked)
            state = dataclasses.replace(state, stats=stats)
        state, block = self._append(state, proposal.tokens, verdict)
        state = dataclasses.replace(state, rule=state.rule.after(verdict, block.count))
        if self.static.reports:
            reports = report(proposal.tokens, seen, verdict.why, block.why)
            block = dataclasses.replace(block, reports=reports)
        return state, block

    def _settle_deferring(
        self, state: DecodeState, proposal: Draft, seen: TargetEvidence, verdict: Verdict,
        is_asked: Bool[Array, ""] | None,
    ) -> tuple[DecodeState, Emitted]:  # fmt: skip
        """Settles as `_settle_all`, where the end of a row may be provisional."""
        static, drafted = self.static, proposal.num_drafted
        assert state.stats is not None
        assert state.window is not None
        live, before, window = ~state.finished, state.length, state.window
        room = state.limit - state.length
        whole, new = defer(verdict, seen, state.stats, room, drafted, static.deferred_window)
        stats = observe(state.stats, whole, live, is_asked)
        state, block = self._append(state, proposal.tokens, whole)
        ended = state.finished & live
        if static.reports:
            deferred = new.is_new[:, None] & (verdict.why == Why.REFUSED_BOUNDARY)
            decided = jnp.where(deferred, verdict.why, whole.why)
            reports = report(proposal.tokens, seen, decided, block.why, deferred)
            block = dataclasses.replace(block, reports=reports)
        left = close(
            window, new, verdict.next_token, state.tokens, before, block, drafted,
            seen.accepted, ended,
        )  # fmt: skip
        assert left.emitted.rolled_back is not None
        rule = state.rule.after(whole, left.charged)
        if rule.budget is not None:
            rule = dataclasses.replace(rule, budget=rule.budget + left.refund)
        ends_anew = self._is_end(left.window.replacement) | (left.length >= state.limit)
        state = dataclasses.replace(
            state, tokens=left.text, length=left.length,
            finished=jnp.where(left.emitted.rolled_back, ends_anew, state.finished), rule=rule,
            stats=stats, window=left.window,
        )  # fmt: skip
        return state, left.emitted

    def _append(
        self, state: DecodeState, draft_tokens: DraftTokens, verdict: Verdict
    ) -> tuple[DecodeState, Emitted]:
        """Appends what was accepted, up to an end of text or the row's limit."""
        drafted = draft_tokens.shape[1]
        steps = jnp.arange(drafted + 1, dtype=jnp.int32)
        kept = verdict.num_accepted[:, None]
        pad = ((0, 0), (0, 1))
        tokens = jnp.where(steps < kept, jnp.pad(draft_tokens, pad), verdict.next_token[:, None])
        why = jnp.where(steps < kept, jnp.pad(verdict.why, pad), verdict.next_why[:, None])
        tokens, why = tokens.astype(jnp.int32), why.astype(jnp.int8)
        is_end = self._is_end(tokens) & (steps <= kept)
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
        return state, Emitted(tokens, why, count, None)

    def _is_end(self, tokens: Int[Array, rows * block]) -> Bool[Array, rows * block]:
        none, eos = jnp.zeros(tokens.shape, bool), self.static.eos_token_ids
        found = functools.reduce(jnp.logical_or, (tokens == one for one in eos), none)
        ends = self.inputs.ends
        return found if ends is None else found & ends.reshape(-1, *(1,) * (tokens.ndim - 1))


def verify_step(
    model: Llama, cache: KVCache, text: Text, length: RowInts, draft_tokens: DraftTokens
) -> tuple[Float[Array, "rows block vocab"], KVCache]:
    """Runs the target over each row's last token and its K draft tokens.

    The cache is valid up to `length - 1`. Returns the logits of the K + 1 tokens that may follow,
    and the cache with the block's keys.
    """
    cache = cache.with_length(length - 1)
    hidden, new = model.hidden(_block(text, length, draft_tokens), cache)
    return model.logits(hidden), cache.written(new, model.layout)


def _block(text: Text, length: RowInts, draft: DraftTokens) -> Int[Array, "rows block"]:
    return jnp.concatenate((slice_rows(text, length - 1, 1), draft), axis=1)
