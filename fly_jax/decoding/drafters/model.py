"""Draft models: token by token, perhaps with a drafter below that proposes to it, or in one pass.

A model takes a proposal from below only where it is its own choice, so it drafts the same tokens
as alone: the level below changes only the time. With a lookup below this is FLy's two-level
drafting; with a model below, any chain of them. With a margin it also takes what is nearly its
own choice: a greedy draft then takes fewer passes and is a little worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fly_jax.decoding.drafters.drafter import PLAIN, Draft, Drafter, Terms, top_probability
from fly_jax.decoding.drafters.lookup import Lookup, Takeover
from fly_jax.decoding.state import map_lengths
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import KVCache, NewEntries, empty_cache
from fly_jax.models.llama import Llama, Parameters
from fly_jax.shapes import Hidden, Index, Inputs, Logits, RowFlags, RowInts, Text, Tokens
from fly_jax.sharding.rules import Layout
from fly_jax.verification.data import STATIC, taken

# After a fully accepted block the draft model has not computed the keys of the token before the
# last, so a pass must feed both. The width is static, so it always feeds two.
_CATCH_UP = 2
# A model below another also lacks the tokens that those above it have added since they last asked,
# mostly one of the target and one of the draft model. If more are missing they are fed first.
_CATCH_UP_BELOW = 4
# A model that is left out of whole rounds lacks all tokens of these.
CATCH_UP_AFTER = 16

_Carry = TypeVar("_Carry")
_Drafted = tuple[KVCache, Tokens, Logits | None, Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelState:
    """The state of a draft model; its cache is valid up to where the text has changed since."""

    cache: KVCache
    below: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Progress:
    """The draft so far; passes are also those of the models below."""

    text: Text
    count: RowInts
    logits: Float[Array, "rows room vocab"] | None
    cache: KVCache
    below: Any
    num_passes: Index
    num_passes_below: Int[Array, " models"]


class _Passed(NamedTuple):
    """The results of one pass, padded to the widest one."""

    chosen: Tokens
    logits: Logits | None
    new: NewEntries
    read: Inputs | None


@dataclasses.dataclass(frozen=True)
class LlamaDrafter(Drafter):
    """A drafter that is a Llama, made of the result of `Llama.parameters`.

    One that `lags` lies below a draft model, and so is asked only now and then. A head and a
    drafter of one pass may have a lookup `in_front` of them.
    """

    parameters: Parameters
    config: LlamaConfig = dataclasses.field(kw_only=True, metadata=STATIC)
    layout: Layout | None = dataclasses.field(default=None, kw_only=True, metadata=STATIC)
    num_speculative_tokens: int = dataclasses.field(default=1, kw_only=True, metadata=STATIC)
    lags: bool = dataclasses.field(default=False, kw_only=True, metadata=STATIC)
    in_front: Lookup | None = dataclasses.field(default=None, kw_only=True, metadata=STATIC)

    num_models = 1

    @property
    def num_earlier_tokens(self) -> int:  # type: ignore[override]
        """The tokens of earlier answers in which a lookup in front looks."""
        return 0 if self.in_front is None else self.in_front.num_earlier_tokens

    @property
    def adapts(self) -> bool:  # type: ignore[override]
        """The passes of a head end once the lookup goes on with the drafts of all rows."""
        return self.in_front is not None

    def _takeover(self, text: Text, length: RowInts, k: int, terms: Terms) -> Takeover | None:
        if self.in_front is None:
            return None
        return Takeover(self.in_front, text, length, terms.of_each(length, k), terms)


@dataclasses.dataclass(frozen=True)
class ModelDrafter(LlamaDrafter):
    """A draft model that reads the text, and nothing of the target.

    If it `rests`, there may be rounds in which it is not asked at all, and prompts that it is not
    given: then more tokens than a round of K settles may have come since it was asked last.
    """

    rests: bool = dataclasses.field(default=False, kw_only=True, metadata=STATIC)

    of_proposing = ("num_speculative_tokens", "margin", "lags", "rests", "in_front")

    @property
    def _model(self) -> Llama:
        return Llama(self.config, self.parameters, self.layout)

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> ModelState:
        """An empty cache."""
        return ModelState(empty_cache(self.config, rows, capacity, dtype, self.layout), None)

    def prefill(
        self, state: ModelState, tokens: Tokens, start: Index, hidden: Hidden | None
    ) -> ModelState:
        """Runs the piece, which begins at `start` of every row, through the model."""
        return self._prefilled(state, tokens, start)[0]

    def _prefilled(
        self, state: ModelState, tokens: Tokens, start: Index, layers: tuple[int, ...] = ()
    ) -> tuple[ModelState, Inputs]:
        """The state after a piece, and the inputs of these layers."""
        at = jnp.broadcast_to(start, tokens.shape[:1])
        cache = state.cache.with_length(at)
        _, new, read = self._model.hidden_and_inputs(tokens, cache, layers)
        # A row of which the model has rested may lack tokens before these: then it still does.
        held = state.cache.length
        length = jnp.where(held >= at, at + tokens.shape[1], held)
        cache = cache.written(new, self.layout).with_length(length)
        return dataclasses.replace(state, cache=cache), read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """A Llama that proposes token by token.

    Attributes:
      margin: nats that a proposal from below may be less probable than the model's own choice.
    """

    below: Drafter | None = None
    margin: float = dataclasses.field(default=0.0, kw_only=True, metadata=STATIC)

    @property
    def adapts(self) -> bool:  # type: ignore[override]
        """Tells whether there is a level below, whose proposal may serve all that is wanted."""
        return self.below is not None

    @property
    def resumes(self) -> bool:  # type: ignore[override]
        """Tells whether nothing lags, itself or below: its cache would have less than the text."""
        return not self.lags and (self.below is None or self.below.resumes)

    @property
    def unseen(self) -> int:  # type: ignore[override]
        """The tokens that a pass may feed again, or that the level below may lack."""
        own = CATCH_UP_AFTER if self.rests else _CATCH_UP
        return own if self.below is None else max(own, self.below.unseen)

    @property
    def num_models(self) -> int:  # type: ignore[override]
        """The number of draft models, with those below."""
        return 1 + (0 if self.below is None else self.below.num_models)

    @property
    def num_earlier_tokens(self) -> int:  # type: ignore[override]
        """The tokens of earlier answers that a lookup below searches."""
        return 0 if self.below is None else int(self.below.num_earlier_tokens)

    def passes_behind(self, state: ModelState, length: RowInts, live: RowFlags) -> Index:
        """Counts passes as wide as those of `_Run.first_token`."""
        lacking = jnp.where(live, length - _CATCH_UP - state.cache.length, 0)
        return -(-jnp.max(lacking, initial=0) // CATCH_UP_AFTER)

    def at_rest(self) -> DraftModel:
        """A copy with defaults for `of_proposing`, also in the levels below."""
        below = None if self.below is None else self.below.at_rest()
        return dataclasses.replace(super().at_rest(), below=below)

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> ModelState:
        """A state with empty caches, also of the levels below."""
        below = None if self.below is None else self.below.init(rows, capacity, dtype)
        return dataclasses.replace(super().init(rows, capacity, dtype), below=below)

    def prefill(
        self, state: ModelState, tokens: Tokens, start: Index, hidden: Hidden | None
    ) -> ModelState:
        """Runs the piece through all models."""
        if (below := self.below) is None:
            return super().prefill(state, tokens, start, hidden)
        state, read = self._prefilled(state, tokens, start, below.hidden_layers)
        seen = read if below.needs_hidden else None
        return ModelState(state.cache, below.prefill(state.below, tokens, start, seen))

    def room(self, num_speculative_tokens: int) -> int:
        """Adds room for the level below: it writes and proposes beyond this model's draft."""
        below = self.below
        # A row that has its K tokens may be fed a proposal while it waits for the others.
        k = 0 if below is None else below.num_speculative_tokens
        return num_speculative_tokens + (1 if below is None else max(1 + k, below.room(k)))

    def propose(
        self, state: ModelState, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, ModelState]:  # fmt: skip
        """Drafts token by token, or by what lies below as far as this model agrees."""
        wanted = terms.of_each(length, num_speculative_tokens)
        run = _Run(self, self._model, length, wanted, terms)
        logits = None
        if terms.sampling is not None:
            # A row that has its tokens while others go on writes its logits after those of the K.
            below = 0 if self.below is None else self.below.num_speculative_tokens
            room = num_speculative_tokens + 1 + below
            logits = jnp.zeros((text.shape[0], room, self.config.vocab_size), jnp.float32)
        progress = _Progress(
            text=text, count=jnp.zeros_like(length), logits=logits, num_passes=jnp.int32(0),
            cache=state.cache.with_length(jnp.minimum(state.cache.length, length - 1)),
            # What it has read beyond is padding or refused drafts.
            below=map_lengths(lambda known: jnp.minimum(known, length - 1), state.below),
            num_passes_below=jnp.zeros(self.num_models - 1, jnp.int32),
        )  # fmt: skip
        progress = run.first_token(progress)
        known = progress.cache.length
        if self.adapts:
            progress = jax.lax.while_loop(
                lambda progress: jnp.any(progress.count < wanted), run.advance, progress
            )
        else:
            # The compiler knows the number of steps where every row wants K.
            progress = jax.lax.fori_loop(
                1, terms.most(num_speculative_tokens), lambda _, one: run.advance(one), progress
            )
        # The last draft token has not been fed; a row that was not asked for has been fed nothing.
        held = jnp.where(run.is_asked, length + progress.count - 1, known)
        draft = Draft(
            tokens=slice_rows(progress.text, length, num_speculative_tokens),
            logits=None if progress.logits is None else progress.logits[:, :num_speculative_tokens],
            num_drafted=wanted,
            num_passes=jnp.concatenate((progress.num_passes[None], progress.num_passes_below)),
        )
        return draft, ModelState(progress.cache.with_length(held), progress.below)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A call of `DraftModel.propose`: the part that does not change while it goes on."""

    drafter: DraftModel
    model: Llama
    length: RowInts
    wanted: RowInts
    terms: Terms

    @property
    def is_asked(self) -> RowFlags:
        """The rows that are drafted for; of a model that lags all or none, since a pass is wide."""
        each = self.wanted > 0
        return each if self.drafter.rests else jnp.broadcast_to(jnp.any(each), each.shape)

    def first_token(self, progress: _Progress) -> _Progress:
        """Feeds what the model has not seen yet, and drafts one token."""
        lags, rests = self.drafter.lags, self.drafter.rests
        if not (lags or rests):
            return self._catch_up(progress, _CATCH_UP)
        width, most = (_CATCH_UP_BELOW,) * 2 if lags else (_CATCH_UP, CATCH_UP_AFTER)
        start = jnp.maximum(self.length - width, 0)
        latest = jnp.maximum(self.length - most, 0)
        needed = jnp.where(self.is_asked, start, 0)
        known = progress.cache.length
        progress, held, fed = caught_up(
            lambda one, at: self._extend(one, at, most)[0], progress, known, needed, most, latest
        )
        # A finished row is fed beside the others, and may attend to a part of its text.
        held = jnp.where(self.is_asked, held, known)
        progress = dataclasses.replace(progress, num_passes=progress.num_passes + fed)
        progress = once(jnp.any(self.is_asked), lambda one: self._catch_up(one, width), progress)
        return dataclasses.replace(progress, cache=progress.cache.with_length(held))

    def advance(self, progress: _Progress) -> _Progress:
        """Drafts one token, and those from below that the model agrees with."""
        end = self.length + progress.count
        tokens = slice_rows(progress.text, end - 1, 1)
        cache = progress.cache.with_length(end - 1)
        if (below := self.drafter.below) is None:
            return self._extended(progress, self._pass(tokens, cache, 1), None)
        # The pass itself gives one token, so the last one needs no proposal.
        useful = jnp.maximum(self.wanted - progress.count - 1, 0)
        k = below.num_speculative_tokens
        terms = dataclasses.replace(self.terms, wanted=jnp.minimum(useful, k))
        proposal, state = below.propose(progress.below, progress.text, end, k, terms)
        tokens = jnp.concatenate((tokens, proposal.tokens), axis=1)
        width = tokens.shape[1]
        # Where no row has a proposal the pass is one token wide.
        passed = jax.lax.cond(
            jnp.any(proposal.num_drafted > 0),
            lambda: self._pass(tokens, cache, width, proposal),
            lambda: self._pass(tokens[:, :1], cache, width),
        )
        progress = dataclasses.replace(
            progress, below=state, num_passes_below=progress.num_passes_below + proposal.num_passes
        )
        return self._extended(progress, passed, proposal)

    def _catch_up(self, progress: _Progress, width: int) -> _Progress:
        start = jnp.maximum(self.length - width, 0)
        progress, hidden = self._extend(progress, start, width)
        last = taken(hidden, (self.length - 1 - start)[:, None])
        passed = self._chosen(self.model.logits(last), self.length, 1)
        return self._appended(progress, *passed, None)

    def _extend(self, progress: _Progress, start: RowInts, width: int) -> tuple[_Progress, Hidden]:
        """The progress after a pass over `width` tokens of the text, and their hidden states."""
        cache, tokens = progress.cache.with_length(start), slice_rows(progress.text, start, width)
        hidden, new, read = self.model.hidden_and_inputs(tokens, cache, self._layers)
        return self._kept(progress, start, new, read), hidden

    @property
    def _reader(self) -> Drafter | None:
        """The level below, if it reads hidden states."""
        below = self.drafter.below
        return below if below is not None and below.needs_hidden else None

    @property
    def _layers(self) -> tuple[int, ...]:
        return () if self._reader is None else self._reader.hidden_layers

    def _kept(
        self, progress: _Progress, start: RowInts, new: NewEntries, read: Inputs | None
    ) -> _Progress:
        """The progress, with a pass's entries in the cache and its states in the level below."""
        cache = progress.cache.with_length(start).written(new, self.model.layout)
        progress = dataclasses.replace(progress, cache=cache)
        if self._reader is None:
            return progress
        return dataclasses.replace(progress, below=self._reader.keep(progress.below, start, read))

    def _pass(
        self, tokens: Tokens, cache: KVCache, width: int, proposal: Draft | None = None
    ) -> _Passed:
        hidden, new, read = self.model.hidden_and_inputs(tokens, cache, self._layers)
        logits = self.model.logits(hidden)
        chosen, kept = self._chosen(logits, cache.length + 1, width)
        if proposal is not None and self.drafter.margin:
            near = self._takes(logits[:, :-1], proposal)
            chosen = chosen.at[:, :-1].set(jnp.where(near, proposal.tokens, chosen[:, :-1]))
        if self._reader is None:
            return _Passed(chosen, kept, new.padded(width), None)
        read = jnp.pad(read, ((0, 0), (0, width - read.shape[1]), (0, 0)))
        return _Passed(chosen, kept, new.padded(width), read)

    def _takes(self, logits: Logits, proposal: Draft) -> Bool[Array, "rows time"]:
        """Tells which proposed tokens are nearly the model's choice; none in a sampled row."""
        is_it = jnp.arange(logits.shape[-1]) == proposal.tokens[..., None]
        own = jnp.max(logits, axis=-1, where=is_it, initial=-jnp.inf)
        near = own >= jnp.max(logits, axis=-1) - self.drafter.margin
        near &= jnp.arange(near.shape[1]) < proposal.num_drafted[:, None]
        if self.terms.sampling is None:
            return near
        is_greedy = jnp.broadcast_to(self.terms.sampling.temperature, self.length.shape) == 0
        return near & is_greedy[:, None]

    def _chosen(
        self, logits: Float[Array, "rows fed vocab"], start: RowInts, width: int
    ) -> tuple[Array, Array | None]:
        """The model's own tokens from `start` on, and the logits that they were drawn from."""
        steps = jnp.arange(logits.shape[1], dtype=jnp.int32)
        chosen = self.terms.choose(logits, start[:, None] + steps, self.model.layout)
        pad = ((0, 0), (0, width - logits.shape[1]))
        scores = None if self.terms.sampling is None else jnp.pad(logits, (*pad, (0, 0)))
        return jnp.pad(chosen, pad), scores

    def _extended(self, progress: _Progress, passed: _Passed, proposal: Draft | None) -> _Progress:
        """The progress after a pass over the last token and a proposal behind it."""
        end = self.length + progress.count
        progress = self._kept(progress, end - 1, passed.new, passed.read)
        after = self._appended(progress, passed.chosen, passed.logits, proposal)
        # A row that has its tokens waits for the others, so that it needs no more room.
        waits = progress.count >= self.wanted
        return dataclasses.replace(after, count=jnp.where(waits, progress.count, after.count))

    def _appended(
        self, progress: _Progress, chosen: Tokens, logits: Logits | None, proposal: Draft | None
    ) -> _Progress:
        """Appends the model's own choices, as far as they confirm the proposal, and one more."""
        end = self.length + progress.count
        advance = jnp.ones_like(end)
        if proposal is not None:
            steps = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)
            confirmed = chosen[:, :-1] == proposal.tokens
            confirmed &= steps < proposal.num_drafted[:, None]
            advance += jnp.sum(jnp.cumprod(confirmed, axis=1, dtype=jnp.int32), axis=1)
        if (kept := progress.logits) is not None and logits is not None:
            kept = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0)))(
                kept, logits, progress.count
            )
        text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
            progress.text, chosen, end
        )
        count, num_passes = progress.count + advance, progress.num_passes + 1
        return dataclasses.replace(
            progress, text=text, count=count, logits=kept, num_passes=num_passes
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParallelDraft(ModelDrafter):
    """A Llama that is trained to answer K - 1 copies of a token behind the text with tokens.

    PARD (arXiv 2504.18583) needs nothing of the target, so one drafts for a whole family. The keys
    and values of the copies are dropped: the next pass writes over them.
    """

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
            cache, _, logits, rates = given
            at = start[:, None] + jnp.arange(width + num_speculative_tokens - 1, dtype=jnp.int32)
            tokens = slice_rows(text, start, at.shape[1])
            tokens = jnp.where(at < length[:, None], tokens, jnp.int32(self.config.pard_token))
            hidden, cache = model.extend(tokens, cache.with_length(start))
            found = model.logits(taken(hidden, (length - 1 - start)[:, None] + ahead))
            tokens = terms.choose(found, length[:, None] + ahead, self.layout)
            rates = None if rates is None else top_probability(found)
            return cache, tokens, None if logits is None else found, rates

        shape = len(length), num_speculative_tokens
        logits = None if terms.sampling is None else jnp.zeros((*shape, self.config.vocab_size))
        takeover = self._takeover(text, length, num_speculative_tokens, terms)
        rates = None if takeover is None else jnp.zeros(shape)
        given = cache, jnp.zeros(shape, jnp.int32), logits, rates
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
        cache, tokens, logits, rates = given
        made = Draft(tokens, logits, wanted, num_passes[None], rates)
        made = made if takeover is None else takeover.over(made)
        return made, ModelState(cache.with_length(held), None)


def caught_up(
    feed: Callable[[_Carry, RowInts], _Carry], carry: _Carry, length: RowInts, needed: RowInts,
    width: int, latest: RowInts | None = None,
) -> tuple[_Carry, RowInts, Index]:  # fmt: skip
    """Feeds rows the text that a cache lacks, `width` tokens a pass.

    `feed` makes a pass over `width` tokens of each row from where it is told. Each row's cache has
    `length` tokens, and is to have `needed` at least. No pass begins behind `latest`; None is
    `needed`, behind which the text must have `width` more. Returns the carry, the tokens that each
    row's cache has now, and the passes that it took.
    """
    latest = needed if latest is None else latest

    def again(given: tuple[_Carry, Array, Array]) -> tuple[_Carry, Array, Array]:
        carry, length, num_passes = given
        at = jnp.minimum(length, latest)
        return feed(carry, at), at + width, num_passes + 1

    return jax.lax.while_loop(
        lambda given: jnp.any(given[1] < needed), again, (carry, length, jnp.int32(0))
    )


def slice_rows(text: Text, start: RowInts, width: int) -> Int[Array, "rows width"]:
    """The tokens of each row, from its own start on."""
    return taken(text, start[:, None] + jnp.arange(width, dtype=jnp.int32))


def once(do: Bool[Array, ""], step: Callable[[_Carry], _Carry], carry: _Carry) -> _Carry:
    """Runs the step if `do` holds, as a loop: it works in place, and `lax.cond` copies."""
    return jax.lax.while_loop(
        lambda one: one[0], lambda one: (jnp.bool_(False), step(one[1])), (do, carry)
    )[1]
