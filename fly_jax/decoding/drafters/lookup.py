"""Prompt lookup on the device: a drafter without a model, alone, below one, or in front of one."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Drafter, Terms
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import MOST_TOKENS, check_parameters, parameter
from fly_jax.shapes import DraftTokens, Index, RowFloats, RowInts, Text
from fly_jax.verification.data import column, taken

Match = Literal["earliest", "latest"]
# The share of tokens behind 1, 2, … matching tokens that the target keeps; the last is for more.
# Seen with Qwen2.5-Coder-1.5B on prompts of Spec-Bench and HumanEval (docs/performance.md).
_RATES = (0.25, 0.45, 0.6, 0.65, 0.75, 0.8, 0.85, 0.95)
_RATES_OF_EARLIER = (0.18, 0.35, 0.35, 0.4, 0.48, 0.48, 0.55, 0.65)  # in earlier answers
# Each length is looked for by operations of its own.
_LONGEST_NGRAM = 64


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Lookup(Drafter):
    """A lookup of the next tokens in a row's own text, and in earlier answers if asked for.

    Alone it proposes to the target (prompt lookup decoding), up to K tokens after a match. Its
    parameters' help texts describe them; the reference code takes the earliest match. Earlier
    answers are what SuffixDecoding (arXiv 2411.04975) keeps in a tree.
    """

    max_ngram: int = parameter(
        8,
        "longest n-gram that the next tokens are looked up by in the text so far",
        name="prompt_lookup_max", low=1, high=_LONGEST_NGRAM,
    )  # fmt: skip
    min_ngram: int = parameter(
        1, "shortest such n-gram", name="prompt_lookup_min", low=1, high=_LONGEST_NGRAM
    )
    num_speculative_tokens: int = parameter(
        6,
        "tokens that the lookup proposes to a draft model at a time",
        name="prompt_lookup_tokens", low=1, high=MOST_TOKENS,
    )  # fmt: skip
    match: Match = parameter(
        "latest",
        "which earlier occurrence counts",
        name="prompt_lookup_match", choices=get_args(Match), flag=False,
    )  # fmt: skip
    num_earlier_tokens: int = parameter(
        0,
        "last tokens of earlier answers that are looked up in as well, such as 16384; a loosened "
        "or drawn text then depends on them",
        name="prompt_lookup_earlier", low=0, high=2**16,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_parameters(self)
        if self.min_ngram > self.max_ngram:
            raise FlyJaxError(
                f"The lookup was given n-grams of {self.min_ngram} to {self.max_ngram} tokens; it "
                "needs prompt_lookup_min <= prompt_lookup_max: correct the two."
            )

    may_fall_short = True
    rates_drafts = True
    resumes = True
    of_proposing = (
        "max_ngram", "min_ngram", "num_speculative_tokens", "match", "num_earlier_tokens"
    )  # fmt: skip

    def propose(
        self, state: tuple[()], text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, tuple[()]]:  # fmt: skip
        """Proposes the tokens behind an earlier place of the row's last ones; draws nothing."""
        if (earlier := terms.earlier) is not None:  # stands before each text, which goes on from it
            repeated = jnp.broadcast_to(earlier, (len(text), len(earlier)))
            text, length = jnp.concatenate([repeated, text], axis=1), length + len(earlier)
        tokens, found, matching, place = look_up(self, text, length, num_speculative_tokens)
        found = jnp.minimum(found, terms.of_each(found, num_speculative_tokens))
        at = jnp.clip(matching[:, None] + jnp.arange(num_speculative_tokens), 1, len(_RATES)) - 1
        rates = jnp.asarray(_RATES)[at]
        if earlier is not None:
            is_earlier = (place < len(earlier))[:, None]
            rates = jnp.where(is_earlier, jnp.asarray(_RATES_OF_EARLIER)[at], rates)
        return Draft(tokens, None, found, jnp.zeros(0, jnp.int32), rates), state


def look_up(
    lookup: Lookup, text: Text, length: RowInts, num_speculative_tokens: int
) -> tuple[Int[Array, "rows num_speculative_tokens"], RowInts, RowInts, RowInts]:
    """Finds each row's own suffix earlier in the row, and what followed it there.

    The longest n-gram that occurs wins, as in prompt lookup decoding (Saxena 2023) and FLy's
    multi-level acceleration. Returns the proposed tokens, how many of them are real (0 where
    nothing matches), the length of the match, longer n-grams than are looked for included, and the
    position of its last token.
    """
    capacity = text.shape[1]
    ends = jnp.arange(capacity, dtype=jnp.int32)  # position of a candidate's last token
    # matched[b, e] counts the tokens before and at `e` that equal the row's last ones, in order.
    run = jnp.ones(text.shape, bool)
    matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(max(lookup.max_ngram, len(_RATES))):
        last = taken(text, jnp.maximum(length - 1 - back, 0))[:, None]
        shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
        run &= (shifted == last) & (ends >= back)
        matched += run
    earlier = ends < length[:, None] - 1
    matched = jnp.where(earlier & (matched >= lookup.min_ngram), matched, 0)
    order = ends if lookup.match == "latest" else capacity - 1 - ends
    ngram = jnp.minimum(matched, lookup.max_ngram)
    best = jnp.argmax(ngram * capacity + jnp.where(ngram > 0, order, 0), axis=1)
    matching = taken(matched, best)
    follow = best[:, None] + 1 + jnp.arange(num_speculative_tokens, dtype=jnp.int32)
    tokens = taken(text, jnp.minimum(follow, capacity - 1))
    available = jnp.minimum(length - 1 - best, num_speculative_tokens)
    return tokens, jnp.where(matching > 0, available, 0).astype(jnp.int32), matching, best


@dataclasses.dataclass(frozen=True)
class Takeover:
    """A lookup in front of a drafter: it goes on with a row's draft where it promises more.

    At each place it looks for what stands before the place, the tokens drafted so far included.
    From the first place on where tokens behind such a match are kept more often than the drafter's
    own token is probable, the draft is what follows the match. SuffixDecoding's hybrid chooses
    once a draft. Nothing here depends on the token that is drawn for the place itself, so a
    lossless rule stays lossless.

    Attributes:
      wanted: tokens wanted of each row; the match must be followed by as many as are left of them.
    """

    lookup: Lookup
    text: Text
    length: RowInts
    wanted: RowInts
    terms: Terms

    def at(
        self, place: int | Index, tokens: DraftTokens, rate: RowFloats, left: RowInts
    ) -> tuple[DraftTokens, RowInts]:
        """The draft and `left`, the place from which each row's is copied (K where none is).

        Args:
          tokens: the draft, in which the tokens up to this place count.
          rate: the probability of each row's token at this place, to its drafter.
        """
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
            self.text, tokens, self.length
        )
        rest = dataclasses.replace(self.terms, wanted=self.wanted - place)
        found, _ = self.lookup.propose((), text, self.length + place, len(places), rest)
        assert found.rates is not None
        is_whole = (found.num_drafted == rest.wanted) & (place < jnp.minimum(self.wanted, left))
        takes = is_whole & (found.rates[:, 0] > rate)
        copied = jnp.roll(found.tokens, place, axis=1)
        tokens = jnp.where(column(takes) & (places >= place), copied, tokens)
        return tokens, jnp.where(takes, place, left)

    def over(self, draft: Draft) -> Draft:
        """A whole draft, taken over from where its tokens are less probable, or where it ends."""
        assert draft.rates is not None
        places = jnp.arange(draft.tokens.shape[1])
        rates = jnp.where(places < column(draft.num_drafted), draft.rates, 0)
        start = draft.tokens, jnp.full_like(self.length, len(places))
        tokens, left = jax.lax.fori_loop(
            0, len(places), lambda at, given: self.at(at, given[0], rates[:, at], given[1]), start
        )
        return self.ended(dataclasses.replace(draft, tokens=tokens, rates=None), left)

    def ended(self, draft: Draft, left: RowInts) -> Draft:
        """The draft with the scores and the number of tokens that the copied ones have."""
        count, logits = jnp.where(left < self.wanted, self.wanted, draft.num_drafted), draft.logits
        if logits is not None:  # as if drawn from what is certain
            is_copied = jnp.arange(draft.tokens.shape[1]) >= column(left)
            is_it = draft.tokens[..., None] == jnp.arange(logits.shape[-1])
            certain = jnp.where(is_it, 0, -jnp.inf)
            logits = jnp.where(is_copied[..., None], certain, logits)
        return dataclasses.replace(draft, num_drafted=count, logits=logits)
