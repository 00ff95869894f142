"""Drafting by levels: each proposes, and the level above verifies exactly what it is given.

The levels are any number of draft models, the largest first, and below them, if asked for, the
lookup. A model takes a proposal only where it is its own choice, so what comes out on top are the
tokens that the first draft model would have drafted alone: levels change how long it takes, and
nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from fly_jax.decoding.drafters.lookup import Lookup, look_up
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.models.cache import KVCache
from fly_jax.models.llama import Llama
from fly_jax.verification.sampling import Sampling, sample

# A pass that follows a fully accepted block must also feed the token before the last, whose keys
# the draft model has not computed yet; the width is static, so it always feeds two.
_CATCH_UP = 2
# A level below also lacks the tokens that the levels above it have added since they last asked: as
# a rule one of the target's and one of the draft model's. What is missing beyond that is fed first.
_CATCH_UP_BELOW = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """What a drafting step proposes.

    Attributes:
      tokens: [rows, K].
      logits: [rows, K, vocab], the first draft model's, where the rule samples; otherwise None.
      num_passes: passes of each draft model that it took.
      num_drafted: tokens of each row, the rest of the K being of no meaning.
    """

    tokens: Int[Array, "rows draft"]
    logits: Float[Array, "rows draft vocab"] | None
    num_passes: Int[Array, " models"]
    num_drafted: Int[Array, " rows"]


@dataclasses.dataclass(frozen=True)
class _Levels:
    """The models from one level down, and what is static about them.

    Attributes:
      models: at least one.
      sizes: tokens that each of them drafts at a time, at most.
      lookup: the last level; None for none.
      sampling: how all of them draw.
      key: random state.
      stop: ends a row's drafting early; None if nothing does.
      threshold: of the rows, for `stop`.
      is_first: there is no level above.
    """

    models: tuple[Llama, ...]
    sizes: tuple[int, ...]
    lookup: Lookup | None
    sampling: Sampling | None
    key: Key[Array, ""]
    stop: EntropyStop | None = None
    threshold: Float32[Array, " rows"] | None = None
    is_first: bool = True

    @property
    def below(self) -> _Levels | None:
        """The models from the next level down; None if there is none."""
        if len(self.models) == 1:
            return None
        return _Levels(
            self.models[1:], self.sizes[1:], self.lookup, self.sampling, self.key, is_first=False
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Progress:
    """What a level has drafted so far; caches and passes are also those of the levels below."""

    text: Int[Array, "rows capacity"]
    count: Int[Array, " rows"]
    wanted: Int[Array, " rows"]
    logits: Float[Array, "rows room vocab"] | None
    caches: tuple[KVCache, ...]
    num_passes: tuple[Int[Array, ""], ...]


Proposals = tuple[Int[Array, "rows proposed"], Int[Array, " rows"]]


def draft_room(
    num_speculative_tokens: int, level_speculative_tokens: tuple[int, ...], lookup: Lookup | None
) -> int:
    """Positions beyond a row's length that drafting and verifying may write to."""
    sizes = (num_speculative_tokens, *level_speculative_tokens)
    return sum(sizes) + len(sizes) + (lookup.num_tokens if lookup else 0)


def draft_step(
    models: tuple[Llama, ...],
    caches: tuple[KVCache, ...],
    text: Int[Array, "rows capacity"],
    length: Int[Array, " rows"],
    num_speculative_tokens: int,
    *,
    level_speculative_tokens: tuple[int, ...] = (),
    sampling: Sampling | None = None,
    lookup: Lookup | None = None,
    key: Key[Array, ""],
    depth: Int[Array, ""] | None = None,
    stop: EntropyStop | None = None,
    threshold: Float32[Array, " rows"] | None = None,
    live: Bool[Array, " rows"] | None = None,
) -> tuple[Draft, tuple[KVCache, ...]]:
    """Proposes K tokens after each row's text.

    With one model and a lookup this is FLy's two-level drafting: the lookup proposes, the draft
    model verifies all of it in one pass and goes on where the first proposal differs from its own
    choice. Where no row has a match the pass is one token wide, as without a lookup. Further models
    do what the lookup does, each for the one before it.

    Args:
      models: the draft models; the first one's tokens are proposed.
      caches: theirs. The first is valid up to `length - 2` at least, and each of the others up to
        its own length, as far as the text has not changed since.
      text: the rows' tokens, with room for `draft_room` more.
      length: tokens of each row, at least 1.
      num_speculative_tokens: K, at least 1.
      level_speculative_tokens: tokens that each model but the first proposes at a time, at most.
      sampling: how to draw from the draft models; None takes the most probable token. Draws at one
        position of the text share their noise, so that levels that agree draw the same token.
      lookup: the last level; None for none.
      key: random state.
      depth: tokens that are drafted this time, at most K; None for K.
      stop: ends a row's drafting early, the token in doubt being its last one; None for never.
      threshold: of the rows, for `stop`.
      live: rows whose drafts are wanted; None for all.
    """
    sizes = (num_speculative_tokens, *level_speculative_tokens)
    levels = _Levels(models, sizes, lookup, sampling, key, stop, threshold)
    logits = None
    if sampling is not None:
        # A row that has its K tokens while others go on writes its logits after those of the K.
        room = draft_room(num_speculative_tokens, level_speculative_tokens[:1], lookup)
        logits = jnp.zeros((text.shape[0], room, models[0].config.vocab_size), jnp.float32)
    none = (jnp.int32(0),) * len(models)
    all_wanted = jnp.full_like(length, num_speculative_tokens if depth is None else depth)
    wanted = all_wanted
    if live is not None and (levels.below or lookup or stop):
        wanted = jnp.where(live, wanted, 1)  # for a finished row nobody is to wait
    caches = _rolled_back(caches, length)
    progress = _Progress(text, jnp.zeros_like(length), wanted, logits, caches, none)
    progress = _draft(levels, progress, length)
    drafted = _slice(progress.text, length, num_speculative_tokens)
    if progress.logits is not None:
        logits = progress.logits[:, :num_speculative_tokens]
    num_passes = jnp.stack(progress.num_passes)
    # The same as counted where nothing stops early, and known to the compiler where K is fixed.
    num_drafted = all_wanted if stop is None else progress.count
    return Draft(drafted, logits, num_passes, num_drafted), progress.caches


def _draft(levels: _Levels, progress: _Progress, length: Int[Array, " rows"]) -> _Progress:
    """Lets the first of these levels draft what is wanted after each row's `length`."""
    model = levels.models[0]
    progress = _catch_up(levels, progress, length)

    def advance(progress: _Progress, proposals: Proposals | None) -> _Progress:
        end = length + progress.count
        tokens = _slice(progress.text, end - 1, 1)
        if proposals is not None:
            tokens = jnp.concatenate((tokens, proposals[0]), axis=1)
        own, *below = progress.caches
        hidden, own = model.hidden(tokens, own.with_length(end - 1))
        progress = dataclasses.replace(progress, caches=(own, *below))
        return _extend(levels, progress, hidden, proposals, length)

    asks = levels.below is not None or levels.lookup is not None

    def ask_and_advance(progress: _Progress) -> _Progress:
        if asks:
            is_useful, propose = _asked(levels, progress, length)
            after = jax.lax.cond(
                is_useful,
                lambda progress: advance(*propose(progress)),
                lambda progress: advance(progress, None),
                progress,
            )
        else:
            after = advance(progress, None)
        # A row that has its tokens waits for the others, so that it needs no more room.
        waits = progress.count >= progress.wanted
        count = jnp.where(waits, progress.count, after.count)
        own, *below = after.caches
        caches = (own, *_rolled_back(tuple(below), length + count))
        return dataclasses.replace(after, count=count, caches=caches)

    if asks or levels.stop is not None:
        progress = jax.lax.while_loop(
            lambda progress: jnp.any(progress.count < progress.wanted), ask_and_advance, progress
        )
    else:
        progress = jax.lax.fori_loop(
            1, progress.wanted[0], lambda _, progress: advance(progress, None), progress
        )
    own, *below = progress.caches
    # The last token drafted has not been fed.
    own = own.with_length(length + progress.count - 1)
    return dataclasses.replace(progress, caches=(own, *below))


def _catch_up(levels: _Levels, progress: _Progress, length: Int[Array, " rows"]) -> _Progress:
    """Feeds the first of these levels what it has not seen yet, and lets it draft one token."""
    model, text = levels.models[0], progress.text
    (own, *below), (passes, *passes_below) = progress.caches, progress.num_passes
    width = _CATCH_UP if levels.is_first else _CATCH_UP_BELOW
    start = jnp.maximum(length - width, 0)

    def feed(carry: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
        cache, passes = carry
        at = jnp.minimum(cache.length, start)
        cache = model.hidden(_slice(text, at, width), cache.with_length(at))[1]
        return cache.with_length(at + width), passes + 1

    if not levels.is_first:  # which is asked in every round
        own, passes = jax.lax.while_loop(
            lambda carry: jnp.any(carry[0].length < start), feed, (own, passes)
        )
    hidden, own = model.hidden(_slice(text, start, width), own.with_length(start))
    last = jnp.take_along_axis(hidden, (length - 1 - start)[:, None, None], axis=1)
    progress = dataclasses.replace(
        progress, caches=(own, *below), num_passes=(passes, *passes_below)
    )
    return _extend(levels, progress, last, None, length)


def _asked(
    levels: _Levels, progress: _Progress, length: Int[Array, " rows"]
) -> tuple[Array, Callable[[_Progress], tuple[_Progress, Proposals]]]:
    """Whether the level below has something to propose, and how to get it."""
    end = length + progress.count
    # One token comes from the pass itself, so of the last one there is no proposal.
    useful = progress.wanted - progress.count - 1
    below = levels.below
    if below is None:
        assert levels.lookup is not None
        tokens, found = look_up(levels.lookup, progress.text, end)
        found = jnp.minimum(found, useful)
        return jnp.any(found > 0), lambda progress: (progress, (tokens, found))

    def propose(progress: _Progress) -> tuple[_Progress, Proposals]:
        size = below.sizes[0]
        num_proposed = jnp.minimum(jnp.max(useful), size)
        lower = _Progress(
            progress.text,
            jnp.zeros_like(end),
            jnp.full_like(end, num_proposed),
            None,
            progress.caches[1:],
            progress.num_passes[1:],
        )
        lower = _draft(below, lower, end)
        progress = dataclasses.replace(
            progress,
            caches=(progress.caches[0], *lower.caches),
            num_passes=(progress.num_passes[0], *lower.num_passes),
        )
        return progress, (_slice(lower.text, end, size), jnp.minimum(useful, num_proposed))

    return jnp.any(useful > 0), propose


def _extend(
    levels: _Levels,
    progress: _Progress,
    hidden: Float[Array, "rows time embed"],
    proposals: Proposals | None,
    length: Int[Array, " rows"],
) -> _Progress:
    """Appends the model's own choices, as far as they confirm the proposals, and one more."""
    logits = levels.models[0].logits(hidden)
    end = length + progress.count
    chosen = _chosen(levels, logits, end, progress.text.shape[1])
    advance = jnp.ones_like(length)
    if proposals is not None:
        tokens, found = proposals
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        confirmed = (chosen[:, :-1] == tokens) & (steps < found[:, None])
        advance += jnp.sum(jnp.cumprod(confirmed, axis=1, dtype=jnp.int32), axis=1)
    wanted = progress.wanted
    if levels.stop is not None:
        assert levels.threshold is not None
        stops = levels.stop.stops(logits, levels.threshold)
        last = jnp.argmax(stops, axis=1) + 1
        is_cut = jnp.any(stops, axis=1) & (last <= advance)
        wanted = jnp.where(is_cut, jnp.minimum(wanted, progress.count + last), wanted)
        advance = jnp.minimum(advance, wanted - progress.count)
    kept = progress.logits
    if kept is not None:
        kept = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0)))(
            kept, logits, progress.count
        )
    text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        progress.text, chosen, end
    )
    passes, *passes_below = progress.num_passes
    return _Progress(
        text,
        progress.count + advance,
        wanted,
        kept,
        progress.caches,
        (passes + 1, *passes_below),
    )


def _chosen(
    levels: _Levels,
    logits: Float[Array, "rows time vocab"],
    start: Int[Array, " rows"],
    capacity: int,
) -> Int[Array, "rows time"]:
    """The tokens of the positions from `start` on; each position has noise of its own."""
    if levels.sampling is None:
        return sample(logits, None)
    rows, time = logits.shape[:2]
    at = start[:, None] + jnp.arange(time, dtype=jnp.int32)
    at += capacity * jnp.arange(rows, dtype=jnp.int32)[:, None]

    def draw(logits: Array, at: Array) -> Array:
        return sample(logits, levels.sampling, jax.random.fold_in(levels.key, at))

    return jax.vmap(jax.vmap(draw))(logits, at)


def _rolled_back(caches: tuple[KVCache, ...], length: Int[Array, " rows"]) -> tuple[KVCache, ...]:
    """The caches without what they hold of a text that has ended in another last token."""
    return tuple(cache.with_length(jnp.minimum(cache.length, length - 1)) for cache in caches)


def _slice(
    text: Int[Array, "rows capacity"], start: Int[Array, " rows"], width: int
) -> Int[Array, "rows width"]:
    at = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    return jnp.take_along_axis(text, at, axis=1)
