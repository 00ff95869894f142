"""Prompt lookup on the device: a drafter without a model, alone, below one, or in front of one."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Drafter, Terms
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import MOST_TOKENS, check_parameters, parameter
from fly_jax.shapes import DraftFloats, DraftTokens, Index, RowFloats, RowInts, Text
from fly_jax.verification.data import column, taken

Match = Literal["earliest", "latest"]
# The share of tokens behind 1, 2, … matching tokens that the target keeps; the last is for more.
# Seen with Qwen2.5-Coder-1.5B on prompts of Spec-Bench and HumanEval (docs/performance.md).
_RATES = (0.25, 0.45, 0.6, 0.65, 0.75, 0.8, 0.85, 0.95)
_RATES_OF_EARLIER = (0.18, 0.35, 0.35, 0.4, 0.48, 0.48, 0.55, 0.65)  # in earlier answers
# A copy that is no shorter may take a draft over where K is chosen behind it.
_ENOUGH = 3
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


class Growing(NamedTuple):
    """A draft that is being made.

    `left` is the place from which a row's is copied, K where none is; `end` the tokens that it will
    have. The rates are those of `Draft`, or None.
    """

    tokens: DraftTokens
    rates: DraftFloats | None
    left: RowInts
    end: RowInts


@dataclasses.dataclass(frozen=True)
class Takeover:
    """A lookup in front of a drafter: it goes on with a row's draft where it promises more.

    At each place it looks for what stands before the place, the tokens drafted so far included.
    From the first place on where tokens behind such a match are kept more often than the drafter's
    own token is probable, the draft is what follows the match. SuffixDecoding's hybrid chooses
    once a draft. Nothing here depends on the token that is drawn for the place itself, so a
    lossless rule stays lossless.

    Attributes:
      wanted: tokens wanted of each row. The match must be followed by as many as are left of them,
        or by a few where K is chosen behind the draft.
    """

    lookup: Lookup
    text: Text
    length: RowInts
    wanted: RowInts
    terms: Terms

    def at(self, place: int | Index, draft: Growing, rate: RowFloats) -> Growing:
        """The draft, copied from this place on where that promises more.

        Args:
          draft: the tokens up to this place count.
          rate: the probability of each row's token at this place, to its drafter.
        """
        tokens, rates, left, end = draft
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
            self.text, tokens, self.length
        )
        wanted = self.wanted - place
        rest = dataclasses.replace(self.terms, wanted=wanted)
        found, _ = self.lookup.propose((), text, self.length + place, len(places), rest)
        assert found.rates is not None
        enough, least = wanted, self.terms.least_rate
        if least is not None:
            enough = jnp.where(least > 0, jnp.minimum(wanted, _ENOUGH), wanted)
        takes = (found.num_drafted >= enough) & (place < jnp.minimum(self.wanted, left))
        takes &= found.rates[:, 0] > rate
        is_copied = column(takes) & (places >= place)
        tokens = jnp.where(is_copied, jnp.roll(found.tokens, place, axis=1), tokens)
        if rates is not None:
            rates = jnp.where(is_copied, jnp.roll(found.rates, place, axis=1), rates)
        end = jnp.where(takes, place + found.num_drafted, end)
        return Growing(tokens, rates, jnp.where(takes, place, left), end)

    def over(self, draft: Draft) -> Draft:
        """A whole draft, taken over from where its tokens are less probable, or where it ends."""
        assert draft.rates is not None
        places = jnp.arange(draft.tokens.shape[1])
        rates = jnp.where(places < column(draft.num_drafted), draft.rates, 0)
        own = Growing(draft.tokens, None, jnp.full_like(self.length, len(places)), self.wanted)
        made = jax.lax.fori_loop(
            0, len(places), lambda at, given: self.at(at, given, rates[:, at]), own
        )
        return self.ended(draft, made)

    def ended(self, draft: Draft, made: Growing) -> Draft:
        """The draft with its copied tokens, their scores and their number."""
        count = jnp.where(made.left < self.wanted, made.end, draft.num_drafted)
        logits = draft.logits
        if logits is not None:  # as if drawn from what is certain
            is_copied = jnp.arange(made.tokens.shape[1]) >= column(made.left)
            is_it = made.tokens[..., None] == jnp.arange(logits.shape[-1])
            certain = jnp.where(is_it, 0, -jnp.inf)
            logits = jnp.where(is_copied[..., None], certain, logits)
        return Draft(made.tokens, logits, count, draft.num_passes, made.rates)
