"""Prompt lookup on the device: a drafter without a model, alone, below one, or in front of one."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Drafter, Terms
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import MOST_TOKENS, check_parameters, parameter
from fly_jax.shapes import Hidden, Index, RowFlags, RowFloats, RowInts, Text, Tokens
from fly_jax.sharding.rules import Layout
from fly_jax.verification.data import STATIC, column, taken
from fly_jax.verification.rules import Verdict

Match = Literal["earliest", "latest"]
# The share of tokens behind 1, 2, … matching tokens that the target keeps; the last is for more.
# Seen with Qwen2.5-Coder-1.5B on prompts of Spec-Bench and HumanEval (docs/performance.md).
_RATES = (0.25, 0.45, 0.6, 0.65, 0.75, 0.8, 0.85, 0.95)
_RATES_OF_EARLIER = (0.18, 0.35, 0.35, 0.4, 0.48, 0.48, 0.55, 0.65)  # in earlier answers
# Each length is looked for by operations of its own.
_LONGEST_NGRAM = 64
# What a drafter behind has shown counts half after so many more drafts; it begins as if half of a
# few tokens had been kept, which one matching token promises less than, and two promise more.
_HALF_LIFE, _PRIOR_TOKENS, _PRIOR_RATE = 16.0, 4.0, 0.5


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridState:
    """The other drafter's state, and how it has fared in each row."""

    own: Any
    kept: RowFloats  # its draft tokens that were kept
    ended: RowFloats  # its drafts that ended before as many were kept as it had been asked for
    asked: RowInts  # what it was asked for last: 0 where the lookup was, negative if not just now


def _unrecorded(own: Any, asked: RowInts) -> HybridState:
    tokens = jnp.full(asked.shape, _PRIOR_TOKENS, jnp.float32)
    return HybridState(own, tokens * _PRIOR_RATE, tokens * (1 - _PRIOR_RATE), asked)


def _of(path: str) -> Any:
    return property(operator.attrgetter(path))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridDraft(Drafter):
    """A lookup's draft in the rows where it promises more than `own`'s, which is not asked there.

    SuffixDecoding's hybrid weighs the two likewise. No draft depends on anything but settled text
    and what was kept of drafts before, so a lossless rule stays lossless.
    """

    own: Drafter
    lookup: Lookup = dataclasses.field(metadata=STATIC)
    layout: Layout | None = dataclasses.field(metadata=STATIC)  # of the other's model

    adapts = True
    num_speculative_tokens = _of("own.num_speculative_tokens")
    num_models = _of("own.num_models")
    most_tokens = _of("own.most_tokens")
    may_fall_short = _of("own.may_fall_short")
    rests = _of("own.rests")
    resumes = _of("own.resumes")
    unseen = _of("own.unseen")
    needs_hidden = _of("own.needs_hidden")
    hidden_layers = _of("own.hidden_layers")
    room = _of("own.room")
    num_earlier_tokens = _of("lookup.num_earlier_tokens")

    def at_rest(self) -> Self:
        """A copy of which neither drafter proposes."""
        return dataclasses.replace(self, own=self.own.at_rest(), lookup=Lookup())

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> HybridState:
        """A state of rows in which nothing was drafted."""
        return _unrecorded(self.own.init(rows, capacity, dtype), jnp.ones(rows, jnp.int32))

    def prefill(
        self, state: HybridState, tokens: Tokens, start: Index, hidden: Hidden | None
    ) -> HybridState:
        """Takes in a piece of the prompts; what rows began like has nothing to say of theirs."""
        own = self.own.prefill(state.own, tokens, start, hidden)
        return _unrecorded(own, jnp.ones_like(state.asked))

    def propose(
        self, state: HybridState, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, HybridState]:  # fmt: skip
        """Proposes what follows the match, or asks the other drafter, row by row."""
        k, wanted = num_speculative_tokens, terms.of_each(length, num_speculative_tokens)
        found, _ = self.lookup.propose((), text, length, k, terms)
        assert found.rates is not None
        rate = column(state.kept / (state.kept + state.ended))
        most = self.own.most_tokens or k
        rate = jnp.where(jnp.arange(k) < most, rate, 0)
        rates = jnp.stack((found.rates, rate))
        promised = jnp.cumprod(jnp.where(jnp.arange(k) < column(wanted), rates, 0), axis=-1)
        better = jnp.sum(promised[0], axis=-1) > jnp.sum(promised[1], axis=-1)
        looked = better & (found.num_drafted == wanted) & (wanted > 0)
        asked = jnp.where(looked, 0, wanted)
        others = dataclasses.replace(terms, wanted=asked)
        draft, own = self.own.propose(state.own, text, length, k, others)
        is_found, logits = column(looked), draft.logits
        if logits is not None:  # as if drawn from what is certain
            is_it = found.tokens[..., None] == jnp.arange(logits.shape[-1])
            logits = jnp.where(is_found[..., None], jnp.where(is_it, 0, -jnp.inf), logits)
        draft = dataclasses.replace(
            draft, tokens=jnp.where(is_found, found.tokens, draft.tokens), logits=logits,
            num_drafted=jnp.where(looked, wanted, draft.num_drafted),
        )  # fmt: skip
        asked = jnp.where(wanted > 0, jnp.minimum(asked, most), -jnp.abs(state.asked))
        return draft, dataclasses.replace(state, own=own, asked=self._whole(asked))

    def observe(
        self, state: HybridState, verdict: Verdict, hidden: Hidden | None, *,
        draft: Draft, live: RowFlags,
    ) -> HybridState:  # fmt: skip
        """Counts the fate of the other drafter's tokens, and lets it learn."""
        own = self.own.observe(state.own, verdict, hidden, draft=draft, live=live)
        counts = live & (state.asked > 0)
        faded = 0.5 ** (1 / _HALF_LIFE)

        def counted(before: RowFloats, more: RowInts | RowFlags) -> RowFloats:
            return self._whole(jnp.where(counts, before * faded + more, before))

        kept = counted(state.kept, verdict.num_accepted)
        ended = counted(state.ended, verdict.num_accepted < state.asked)
        return dataclasses.replace(state, own=own, kept=kept, ended=ended)

    def _whole(self, rows: Any) -> Any:
        """The numbers whole on every device: another placement would be another program."""
        return rows if self.layout is None else self.layout.constrain(rows, (None,))

    def passes_behind(self, state: HybridState, length: RowInts, live: RowFlags) -> Index:
        """Counts the other drafter's passes, for rows in which it is asked."""
        return self.own.passes_behind(state.own, length, live & (state.asked != 0))

    def keep(self, state: HybridState, start: RowInts, hidden: Hidden | None) -> HybridState:
        """Hands on what a draft model above has computed."""
        return dataclasses.replace(state, own=self.own.keep(state.own, start, hidden))
