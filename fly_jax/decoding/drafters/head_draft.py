"""Heads, which draft from features of the model that they are of: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Terms, top_probability
from fly_jax.decoding.drafters.lookup import Growing
from fly_jax.decoding.drafters.model import LlamaDrafter, caught_up, once, slice_rows
from fly_jax.models.cache import KVCache, NewEntries, empty_cache, held_caches
from fly_jax.models.head import BlockHead, Eagle3Head
from fly_jax.models.head_config import Block
from fly_jax.shapes import Features, Hidden, Index, Logits, RowFlags, RowInts, Text, Tokens
from fly_jax.verification.data import STATIC, column
from fly_jax.verification.rules import Verdict

# The last token, the draft and its logits; what is fed next; the slots.
_Carry = tuple[tuple[Array, Growing, Array | None], Array, KVCache]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadState:
    """The state of a head between rounds.

    Attributes:
      cache: slot i has what the feature of position i and token i + 1 give. Its length counts slots
        with true features and settled tokens: the text's less one, once `propose` has run.
      features: of every position, fused; one half as keys, the other as values of as many heads.
    """

    cache: KVCache
    features: KVCache

    @property
    def length(self) -> RowInts:
        """Positions with features of each row."""
        return self.features.length


@dataclasses.dataclass(frozen=True)
class HeadDrafter(LlamaDrafter):
    """A drafter that is a head on a model (`Head.on`)."""

    resumes = True
    needs_hidden = True
    of_proposing = ("num_speculative_tokens", "lags", "least_confidence", "in_front", "rests")

    @property
    def hidden_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """The layers whose inputs are the features."""
        head = self.config.head
        assert head is not None
        assert head.layers is not None
        return head.layers

    def observe(
        self, state: Any, verdict: Verdict, hidden: Hidden | None, *, draft: Draft, live: RowFlags
    ) -> Any:
        """Keeps the features of the block; those of refused tokens are overwritten later."""
        return self.keep(state, state.length, hidden)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadDraft(HeadDrafter):
    """A head that drafts from the features of settled tokens, and then from its own hidden states.

    What it computes of its own states is dropped, as in EAGLE's code: each round begins with a pass
    over the features of the last K + 1 positions, which are as many as a round may have settled.
    Below a draft model, whose features lie as far as that model's own cache, some more are missing,
    and where it `rests` all of the rounds that it was not asked in.
    """

    rests: bool = dataclasses.field(default=False, kw_only=True, metadata=STATIC)

    rates_drafts = True

    @property
    def unseen(self) -> int:  # type: ignore[override]
        """The tokens that the last round has settled: they lie in no slot yet."""
        return self._width + 1

    @property
    def _width(self) -> int:
        """The slots that the first pass of a draft fills.

        Below a draft model more are missing: its last pass may have given K + 1 tokens, the target
        and then that model one more each, and `keep` has given up the last slot before these.
        """
        return self.num_speculative_tokens + (4 if self.lags else 2 if self.rests else 1)

    def room(self, num_speculative_tokens: int) -> int:
        """The first pass over a text that is shorter."""
        return max(self._width, num_speculative_tokens + 1)

    def passes_behind(self, state: HeadState, length: RowInts, live: RowFlags) -> Index:
        """Counts passes over the features of rounds in which it has rested."""
        lacking = jnp.where(live, length - 1 - self._width - state.cache.length, 0)
        return -(-jnp.max(lacking, initial=0) // self._width)

    @property
    def _head(self) -> Eagle3Head:
        return Eagle3Head(self.config, self.parameters, self.layout)

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> HeadState:
        """A state with empty caches."""
        given = rows, capacity, dtype, self.layout
        return HeadState(*(empty_cache(one, *given) for one in held_caches(self.config)))

    def prefill(
        self, state: HeadState, tokens: Tokens, start: Index, hidden: Features | None
    ) -> HeadState:
        """Fills the slot before the piece, and those of the piece whose next token is known."""
        assert hidden is not None
        rows, time = tokens.shape
        features = self._kept(state.features, jnp.broadcast_to(start, (rows,)), hidden)
        # A text's first piece has no slot before it: its last slot gets a wrong token, and is
        # filled anew with the next piece, or when the first draft is asked for.
        tokens = jnp.where(start == 0, jnp.roll(tokens, -1, axis=1), tokens)
        at = jnp.broadcast_to(jnp.maximum(start - 1, 0), (rows,))
        cache = state.cache.with_length(at)
        new = self._head.entries(tokens, _read(features, at, time), cache)
        # As in a draft model's cache: a row that lacked tokens before these still does.
        held = state.cache.length
        length = jnp.where(held >= at, start + time - 1, held)
        return HeadState(cache.written(new, self.layout).with_length(length), features)

    def propose(
        self, state: HeadState, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, HeadState]:  # fmt: skip
        """Drafts one token from the features, and each further one from the head's own state."""
        head, width, rows = self._head, self._width, len(length)
        start = jnp.maximum(length - 1 - width, 0)

        def given(start: RowInts, width: int) -> tuple[Tokens, Array]:
            """The tokens and features of slots from `start` on."""
            # A text of one token has no feature: its slot is always filled with the same.
            is_known = start[:, None] + jnp.arange(width, dtype=jnp.int32) < length[:, None] - 1
            features = jnp.where(is_known[..., None], _read(state.features, start, width), 0)
            tokens = jnp.where(is_known, slice_rows(text, start + 1, width), 0)
            return tokens, features.astype(head.dtype)

        def fill(cache: KVCache, start: RowInts) -> KVCache:
            cache = cache.with_length(start)
            return cache.written(head.entries(*given(start, width), cache), self.layout)

        cache, num_passes, last = state.cache, jnp.int32(0), jnp.maximum(length - 2, 0)
        wanted = terms.of_each(length, num_speculative_tokens)
        asked = wanted > 0 if self.rests else jnp.ones_like(wanted, bool)
        is_asked = jnp.any(asked)
        if self.lags or self.rests:
            needed = jnp.where(asked, start, 0)
            cache, _, num_passes = caught_up(fill, cache, cache.length, needed, width, start)

        one = given(last, 1)  # read in the branch, a TPU's features would be copied for it

        def first() -> tuple[Logits, Array]:
            hidden, fed, _ = head.run(*one, cache)
            return head.logits(hidden), fed

        if self.rests:
            cache = once(is_asked, lambda one: fill(one, start), cache).with_length(last)
            nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(first))
            logits, fed = jax.lax.cond(is_asked, first, lambda: nothing)
        else:
            cache = fill(cache, start).with_length(last)
            logits, fed = first()
        shape, least, scores = (rows, num_speculative_tokens), terms.least_rate, None
        if terms.sampling is not None:
            scores = jnp.zeros((*shape, self.config.vocab_size), jnp.float32)

        takeover = self._takeover(text, length, num_speculative_tokens, terms)
        put = jax.lax.dynamic_update_slice_in_dim

        def choose(
            at: int | Index, logits: Logits, draft: Growing, scores: Array | None
        ) -> tuple[Array, Growing, Array | None]:
            """The token of each row, and the draft and the scores with it."""
            token = terms.choose(logits, length[:, None] + at, self.layout)
            rate, is_copied = top_probability(logits), column(draft.left < at)
            if takeover is not None:
                token = jnp.where(is_copied, draft.tokens[:, at][:, None], token)
            draft = draft._replace(tokens=put(draft.tokens, token, at, 1))
            if draft.rates is not None:
                known = jnp.where(is_copied, draft.rates[:, at][:, None], rate)
                draft = draft._replace(rates=put(draft.rates, known, at, 1))
            if takeover is not None:
                draft = takeover.at(at, draft, rate[:, 0])
            scores = None if scores is None else put(scores, logits, at, 1)
            return draft.tokens[:, at][:, None], draft, scores

        def draft_one(index: Index, carry: _Carry) -> _Carry:
            (token, draft, scores), fed, cache = carry
            cache = cache.with_length(length - 2 + index)
            hidden, fed, new = head.run(token, fed, cache)
            chosen = choose(index, head.logits(hidden), draft, scores)
            return chosen, fed, cache.written(new, self.layout)

        def goes_on(given: tuple[Array, _Carry]) -> Array:
            """Tells whether a row lacks tokens that pay."""
            index, ((_, draft, _), *_) = given
            lacks = jnp.minimum(wanted, draft.left) > index
            if draft.rates is None or least is None:
                return jnp.any(lacks)
            reached = jnp.where(jnp.arange(num_speculative_tokens) < index, draft.rates, 1)
            reached = jnp.where(lacks, jnp.prod(reached, axis=1), 0)
            return jnp.any(lacks) & (jnp.sum(reached) >= least * jnp.sum(wanted > 0))

        most: int | Index = terms.most(num_speculative_tokens)
        rates = None if least is None else jnp.zeros(shape)
        empty = Growing(jnp.zeros(shape, jnp.int32), rates, jnp.full_like(length, shape[1]), wanted)
        carry: _Carry = (choose(0, logits, empty, scores), fed, cache)
        if takeover is None and least is None:
            carry = jax.lax.fori_loop(1, most, draft_one, carry)
        else:  # it ends where every row has its draft
            most, carry = jax.lax.while_loop(
                goes_on, lambda given: (given[0] + 1, draft_one(*given)), (jnp.int32(1), carry)
            )
        (_, made, scores), _, cache = carry
        num_passes = (num_passes + jnp.maximum(most, 1) * is_asked).astype(jnp.int32)
        count = wanted if least is None else jnp.minimum(wanted, most)
        draft = Draft(made.tokens, scores, count, num_passes[None], made.rates)
        draft = draft if takeover is None else takeover.ended(draft, made)
        known = length - 1
        held = jnp.where(asked, known, state.cache.length)
        return draft, HeadState(cache.with_length(held), state.features.with_length(known))

    def keep(self, state: HeadState, start: RowInts, hidden: Features | None) -> HeadState:
        """Keeps the features of a pass, which may begin with a changed token."""
        assert hidden is not None
        true = jnp.minimum(state.cache.length, jnp.maximum(start - 1, 0))
        return HeadState(state.cache.with_length(true), self._kept(state.features, start, hidden))

    def _kept(self, features: KVCache, start: RowInts, hidden: Features) -> KVCache:
        """The features with the fused ones of the positions from `start` on."""
        fused = self._head.fused(hidden)
        _, _, heads, _, size = features.keys.shape
        halves = fused.reshape(*fused.shape[:2], 2, heads, size).transpose(2, 0, 3, 1, 4)
        new = NewEntries(*(half[None].astype(features.keys.dtype) for half in halves))
        return features.with_length(start).written(new, self.layout)


def _read(features: KVCache, start: RowInts, width: int) -> Float[Array, "rows width embed"]:
    """The features of some positions of the first rows, those that are fed."""
    rows = jnp.arange(len(start))[:, None]
    at = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    halves = [one[0][rows, :, at] for one in (features.keys, features.values)]
    return jnp.stack(halves, axis=2).reshape(len(start), width, -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockDraft(HeadDrafter):
    """A head that drafts all tokens in one pass over the text's last one and masks behind it.

    Its state is the cache of the keys and values that are made of the target's features, one
    position less than the text. Those of the block are never written.

    Attributes:
      num_speculative_tokens: K; where it is chosen and a block is smaller, drafts are shorter.
      least_confidence: the draft ends before the first token that is less probable to be accepted,
        to a head that says so.
    """

    least_confidence: float = dataclasses.field(default=0.0, kw_only=True, metadata=STATIC)

    @property
    def may_fall_short(self) -> bool:  # type: ignore[override]
        """The confidence may end a draft, and a block may be smaller than a chosen K."""
        return self._confides or self.most_tokens < self.num_speculative_tokens

    @property
    def _own(self) -> Block:
        assert isinstance(self.config.head, Block)
        return self.config.head

    @property
    def most_tokens(self) -> int:  # type: ignore[override]
        """Tokens that a pass drafts."""
        return min(self.num_speculative_tokens, self._own.most_tokens)

    @property
    def _confides(self) -> bool:
        return self._own.has_confidence and self.least_confidence > 0

    @property
    def _head(self) -> BlockHead:
        return BlockHead(self.config, self.parameters, self.layout)

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> KVCache:
        """An empty cache."""
        return empty_cache(self.config, rows, capacity, dtype, self.layout)

    def prefill(
        self, state: KVCache, tokens: Tokens, start: Index, hidden: Features | None
    ) -> KVCache:
        """Keeps the keys and values of the piece's features."""
        return self.keep(state, jnp.broadcast_to(start, tokens.shape[:1]), hidden)

    def propose(
        self, state: KVCache, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, KVCache]:  # fmt: skip
        """Drafts in one pass, or in none where no token is wanted of any row."""
        cache, width = state.with_length(length - 1), self.most_tokens
        last, rows = slice_rows(text, length - 1, 1), len(length)

        def draft() -> Draft:
            own, head = self._own, self._head
            masks = jnp.full((rows, width - own.anchor_predicts), own.mask_token, jnp.int32)
            hidden = head.hidden(jnp.concatenate((last, masks), axis=1), cache)[0][:, -width:]
            logits = head.logits(hidden)
            positions = length[:, None] + jnp.arange(width, dtype=jnp.int32)

            def choose(before: Array, at: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
                """The next token of each row, by the bias of the one before it."""
                scores, position = at[0][:, None] + head.bias(before), at[1][:, None]
                token = terms.choose(scores, position, self.layout)
                return token, (token[:, 0], scores[:, 0])

            if own.markov_rank:
                steps = (logits.swapaxes(0, 1), positions.swapaxes(0, 1))
                _, found = jax.lax.scan(choose, last, steps)
                tokens, logits = (one.swapaxes(0, 1) for one in found)
            else:
                tokens = terms.choose(logits, positions, self.layout)
            count = jnp.full_like(length, width)
            if self._confides:
                before = jnp.concatenate((last, tokens[:, :-1]), axis=1)
                is_sure = head.probable(hidden, before) >= self.least_confidence
                count = jnp.sum(jnp.cumprod(is_sure, axis=1, dtype=jnp.int32), axis=1)
            rest = ((0, 0), (0, num_speculative_tokens - width))
            scores = None if terms.sampling is None else jnp.pad(logits, (*rest, (0, 0)))
            rates = None if self.in_front is None else jnp.pad(top_probability(logits), rest)
            return Draft(jnp.pad(tokens, rest), scores, count, jnp.ones(1, jnp.int32), rates)

        if terms.wanted is None:
            found = draft()
        else:
            nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(draft))
            found = jax.lax.cond(jnp.any(terms.wanted > 0), draft, lambda: nothing)
            count = jnp.minimum(found.num_drafted, terms.wanted)
            found = dataclasses.replace(found, num_drafted=count)
        takeover = self._takeover(text, length, num_speculative_tokens, terms)
        return found if takeover is None else takeover.over(found), cache

    def keep(self, state: KVCache, start: RowInts, hidden: Features | None) -> KVCache:
        """Keeps the keys and values of a pass's features, from each row's start on."""
        assert hidden is not None
        return state.with_length(start).written(self._head.injected(hidden, start), self.layout)
