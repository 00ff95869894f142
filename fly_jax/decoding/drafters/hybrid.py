"""A lookup in front of a drafter that nothing can stand below: of both, the one that promises more.

Heads and models of one pass are right wherever the text is usual, and a lookup where it repeats
itself or its prompt. As SuffixDecoding's hybrid (arXiv 2411.04975, section 4.3) weighs the score of
a match against the tokens that its other drafter has shown to be worth.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Self

import jax
import jax.numpy as jnp

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Drafter, Terms
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.model import LlamaDrafter
from fly_jax.shapes import Hidden, Index, RowFlags, RowFloats, RowInts, Text, Tokens
from fly_jax.verification.data import STATIC, column
from fly_jax.verification.rules import Verdict

# What the other drafter has shown counts half after so many more of its drafts. It begins as if
# half of a few tokens had been kept: one matching token then promises less than it, two more.
_HALF_LIFE, _PRIOR_TOKENS, _PRIOR_RATE = 16.0, 4.0, 0.5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridState:
    """The other drafter's state, and how it has fared in each row."""

    own: Any
    kept: RowFloats  # its draft tokens that were kept
    refused: RowFloats  # its drafts that ended with one that was not
    looked: RowFlags  # the last draft is the lookup's


def _of_own(name: str) -> Any:
    return property(operator.attrgetter(f"own.{name}"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridDraft(Drafter):
    """A lookup's draft in the rows where it promises more than `own`'s, which is not asked there.

    Both have to be as long as is wanted. No draft depends on anything but the settled text and on
    what was kept of drafts before, so a lossless rule stays lossless.
    """

    own: LlamaDrafter
    lookup: Lookup = dataclasses.field(metadata=STATIC)

    adapts = True
    num_speculative_tokens = _of_own("num_speculative_tokens")
    num_models = _of_own("num_models")
    most_tokens = _of_own("most_tokens")
    may_fall_short = _of_own("may_fall_short")
    rests = _of_own("rests")
    resumes = _of_own("resumes")
    unseen = _of_own("unseen")
    needs_hidden = _of_own("needs_hidden")
    hidden_layers = _of_own("hidden_layers")

    @property
    def num_earlier_tokens(self) -> int:  # type: ignore[override]
        """The tokens of earlier answers that the lookup searches."""
        return self.lookup.num_earlier_tokens

    def at_rest(self) -> Self:
        """A copy of which neither drafter proposes."""
        return dataclasses.replace(self, own=self.own.at_rest(), lookup=Lookup())

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> HybridState:
        """A state of rows in which nothing was drafted."""
        one = jnp.full((rows,), _PRIOR_TOKENS, jnp.float32)
        kept, refused = one * _PRIOR_RATE, one * (1 - _PRIOR_RATE)
        return HybridState(
            self.own.init(rows, capacity, dtype), kept, refused, jnp.zeros(rows, bool)
        )

    def prefill(
        self, state: HybridState, tokens: Tokens, start: Index, hidden: Hidden | None
    ) -> HybridState:
        """Takes in a piece of the prompts, of which the lookup reads the text itself."""
        return dataclasses.replace(state, own=self.own.prefill(state.own, tokens, start, hidden))

    def propose(
        self, state: HybridState, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, HybridState]:  # fmt: skip
        """Proposes what follows the match, or asks the other drafter, row by row."""
        k, wanted = num_speculative_tokens, terms.of_each(length, num_speculative_tokens)
        found, _ = self.lookup.propose((), text, length, k, terms)
        assert found.rates is not None
        rate = state.kept / (state.kept + state.refused)
        rates = jnp.stack((found.rates, jnp.broadcast_to(rate[:, None], found.rates.shape)))
        promised = jnp.cumprod(jnp.where(jnp.arange(k) < column(wanted), rates, 0), axis=-1)
        better = jnp.sum(promised[0], axis=-1) > jnp.sum(promised[1], axis=-1)
        looked = better & (found.num_drafted == wanted) & (wanted > 0)
        others = dataclasses.replace(terms, wanted=jnp.where(looked, 0, wanted))
        draft, own = self.own.propose(state.own, text, length, k, others)
        is_found, logits = column(looked), draft.logits
        if logits is not None:  # as if drawn from what is certain
            certain = jnp.where(
                found.tokens[..., None] == jnp.arange(logits.shape[-1]), 0, -jnp.inf
            )
            logits = jnp.where(is_found[..., None], certain, logits)
        draft = dataclasses.replace(
            draft,
            tokens=jnp.where(is_found, found.tokens, draft.tokens),
            logits=logits,
            num_drafted=jnp.where(looked, wanted, draft.num_drafted),
        )
        return draft, dataclasses.replace(state, own=own, looked=self._whole(looked))

    def observe(
        self, state: HybridState, verdict: Verdict, hidden: Hidden | None, *,
        draft: Draft, live: RowFlags,
    ) -> HybridState:  # fmt: skip
        """Counts the fate of the other drafter's tokens, and lets it learn."""
        own = self.own.observe(state.own, verdict, hidden, draft=draft, live=live)
        counts, faded = live & ~state.looked, 0.5 ** (1 / _HALF_LIFE)

        def counted(before: RowFloats, more: RowInts | RowFlags) -> RowFloats:
            return self._whole(jnp.where(counts, before * faded + more, before))

        kept = counted(state.kept, verdict.num_accepted)
        refused = counted(state.refused, verdict.num_accepted < draft.num_drafted)
        return dataclasses.replace(state, own=own, kept=kept, refused=refused)

    def _whole(self, rows: Any) -> Any:
        """The numbers whole on every device: another placement would be another program."""
        return rows if self.own.layout is None else self.own.layout.constrain(rows, (None,))

    def passes_behind(self, state: HybridState, length: RowInts, live: RowFlags) -> Index:
        """Counts the other drafter's passes."""
        return self.own.passes_behind(state.own, length, live)

    def keep(self, state: HybridState, start: RowInts, hidden: Hidden | None) -> HybridState:
        """Hands on what a draft model above has computed."""
        return dataclasses.replace(state, own=self.own.keep(state.own, start, hidden))

    def room(self, num_speculative_tokens: int) -> int:
        """The positions that the other drafter needs."""
        return self.own.room(num_speculative_tokens)
