"""A model that drafts K tokens in one pass (PARD, arXiv 2504.18583)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Terms
from fly_jax.decoding.drafters.model import ModelDrafter, ModelState, caught_up, once, slice_rows
from fly_jax.models.cache import KVCache
from fly_jax.shapes import Index, Logits, RowFlags, RowInts, Text, Tokens
from fly_jax.verification.data import STATIC, taken

_Drafted = tuple[KVCache, Tokens, Logits | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParallelDraft(ModelDrafter):
    """A Llama that is trained to answer K - 1 copies of a token behind the text with tokens.

    It needs nothing of the target, so one drafts for a whole family. The keys and values of the
    copies are dropped: the next pass writes over them. One that `lags` lies below a draft model. To
    one that `rests` more tokens than a round of K settles may have come since it was asked last.
    """

    lags: bool = dataclasses.field(default=False, kw_only=True, metadata=STATIC)
    rests: bool = dataclasses.field(default=False, kw_only=True, metadata=STATIC)

    @property
    def unseen(self) -> int:  # type: ignore[override]
        """The tokens that each pass feeds again, also of a finished row."""
        return self._width

    @property
    def resumes(self) -> bool:  # type: ignore[override]
        """Tells whether no draft model above has more of the text in its cache."""
        return not self.lags

    def passes_behind(self, state: ModelState, length: RowInts, live: RowFlags) -> Index:
        """Counts passes as wide as those in which it drafts."""
        lacking = jnp.where(live, length - self._width - state.cache.length, 0)
        return -(-jnp.max(lacking, initial=0) // self._width)

    def room(self, num_speculative_tokens: int) -> int:
        """The copies behind a text that is shorter than what a pass feeds of it."""
        return self._width + num_speculative_tokens

    @property
    def _width(self) -> int:
        """Tokens of the text that a pass feeds: as many as a round may have settled."""
        return self.num_speculative_tokens + 1

    def propose(
        self, state: ModelState, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, ModelState]:  # fmt: skip
        """Drafts all tokens in one pass, each drawn as if those before it were not known."""
        model, width = self._model, self._width
        cache = state.cache.with_length(jnp.minimum(state.cache.length, length - 1))
        num_passes, held = jnp.int32(1), length
        start = jnp.maximum(length - width, 0)
        ahead = jnp.arange(num_speculative_tokens, dtype=jnp.int32)

        def draft(given: _Drafted) -> _Drafted:
            cache, _, logits = given
            at = start[:, None] + jnp.arange(width + num_speculative_tokens - 1, dtype=jnp.int32)
            tokens = slice_rows(text, start, at.shape[1])
            tokens = jnp.where(at < length[:, None], tokens, jnp.int32(self.config.pard_token))
            hidden, cache = model.extend(tokens, cache.with_length(start))
            found = model.logits(taken(hidden, (length - 1 - start)[:, None] + ahead))
            tokens = terms.choose(found, length[:, None] + ahead, self.layout)
            return cache, tokens, None if logits is None else found

        shape = len(length), num_speculative_tokens
        logits = None if terms.sampling is None else jnp.zeros((*shape, self.config.vocab_size))
        given = cache, jnp.zeros(shape, jnp.int32), logits
        wanted = terms.of_each(length, num_speculative_tokens)
        if self.rests:
            is_asked, known = wanted > 0, cache.length
            cache, _, fed = caught_up(
                lambda one, at: model.extend(slice_rows(text, at, width), one.with_length(at))[1],
                cache, known, jnp.where(is_asked, start, 0), width, start,
            )  # fmt: skip
            given = once(jnp.any(is_asked), draft, (cache, *given[1:]))
            num_passes, held = fed + jnp.any(is_asked), jnp.where(is_asked, length, known)
        else:
            given = draft(given)
        cache, tokens, logits = given
        return Draft(tokens, logits, wanted, num_passes[None]), ModelState(
            cache.with_length(held), None
        )
