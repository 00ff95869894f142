"""A head that drafts a block in one pass (DFlash, DSpark)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Terms
from fly_jax.decoding.drafters.head_draft import HeadDrafter
from fly_jax.decoding.drafters.model import slice_rows
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.head import BlockHead
from fly_jax.models.head_config import Block
from fly_jax.shapes import Features, Index, RowInts, Text, Tokens
from fly_jax.verification.data import STATIC


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockDraft(HeadDrafter):
    """A drafter of all tokens in one pass over the text's last token and masks behind it.

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
            return Draft(jnp.pad(tokens, rest), scores, count, jnp.ones(1, jnp.int32))

        if terms.wanted is None:
            return draft(), cache
        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(draft)
        )
        found = jax.lax.cond(jnp.any(terms.wanted > 0), draft, lambda: nothing)
        count = jnp.minimum(found.num_drafted, terms.wanted)
        return dataclasses.replace(found, num_drafted=count), cache

    def keep(self, state: KVCache, start: RowInts, hidden: Features | None) -> KVCache:
        """Keeps the keys and values of a pass's features, from each row's start on."""
        assert hidden is not None
        cache = state.with_length(start)
        return cache.written(self._head.injected(hidden, start), self.layout)
