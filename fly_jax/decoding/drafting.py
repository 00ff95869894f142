"""Drafting: the draft model proposes K tokens, helped by the lookup that it verifies exactly."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fly_jax.decoding.lookup import Lookup, look_up
from fly_jax.decoding.sampling import Sampling, sample
from fly_jax.models.cache import KVCache
from fly_jax.models.llama import Llama

# A pass that follows a fully accepted block must also feed the token before the last, whose keys
# the draft model has not computed yet; the width is static, so it always feeds two.
_CATCH_UP = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """What a drafting step proposes.

    Attributes:
      tokens: [rows, K].
      logits: [rows, K, vocab], the draft model's, where the rule samples; otherwise None.
      num_passes: passes of the draft model that it took.
    """

    tokens: Int[Array, "rows draft"]
    logits: Float[Array, "rows draft vocab"] | None
    num_passes: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Progress:
    text: Int[Array, "rows capacity"]
    count: Int[Array, " rows"]
    logits: Float[Array, "rows room vocab"] | None
    cache: KVCache
    num_passes: Int[Array, ""]


def draft_room(num_speculative_tokens: int, lookup: Lookup | None) -> int:
    """Positions beyond a row's length that drafting and verifying may write to."""
    return num_speculative_tokens + 1 + (2 * lookup.num_tokens + 1 if lookup else 0)


def draft_step(
    model: Llama,
    cache: KVCache,
    text: Int[Array, "rows capacity"],
    length: Int[Array, " rows"],
    num_speculative_tokens: int,
    *,
    sampling: Sampling | None = None,
    lookup: Lookup | None = None,
    key: Key[Array, ""],
    depth: Int[Array, ""] | None = None,
) -> tuple[Draft, KVCache]:
    """Proposes K tokens after each row's text.

    With a lookup this is FLy's two-level drafting: the lookup proposes, the draft model verifies
    all of it in one pass and goes on where the first proposal differs from its own choice, so the
    tokens are those that it would draft alone. Where no row has a match the pass is one token
    wide, as without a lookup.

    Args:
      model: the draft model.
      cache: its cache, valid up to `length - 2` at least.
      text: the rows' tokens, with room for `draft_room` more.
      length: tokens of each row, at least 1.
      num_speculative_tokens: K, at least 1.
      sampling: how to draw from the draft model; None takes its most probable token.
      lookup: the level below; None for none.
      key: random state.
      depth: tokens that are drafted this time, at most K, the rest being of no meaning; None for K.
    """
    rows = text.shape[0]
    wanted = num_speculative_tokens if depth is None else depth
    # A row that has its K tokens while others go on writes its logits after those of the K.
    room = num_speculative_tokens + (lookup.num_tokens + 1 if lookup else 0)
    logits = None
    if sampling is not None:
        logits = jnp.zeros((rows, room, model.config.vocab_size), jnp.float32)
    start = jnp.maximum(length - _CATCH_UP, 0)
    hidden, cache = model.hidden(_slice(text, start, _CATCH_UP), cache.with_length(start))
    last = jnp.take_along_axis(hidden, (length - 1 - start)[:, None, None], axis=1)
    progress = _Progress(text, jnp.zeros_like(length), logits, cache, jnp.int32(0))
    progress = _extend(model, progress, last, None, length, sampling, key, room)

    def advance(progress: _Progress, proposals: tuple[Array, Array] | None) -> _Progress:
        end = length + progress.count
        tokens = _slice(progress.text, end - 1, 1)
        if proposals is not None:
            tokens = jnp.concatenate((tokens, proposals[0]), axis=1)
        hidden, cache = model.hidden(tokens, progress.cache.with_length(end - 1))
        progress = dataclasses.replace(progress, cache=cache)
        return _extend(model, progress, hidden, proposals, length, sampling, key, room)

    if lookup is None:
        progress = jax.lax.fori_loop(
            1, wanted, lambda _, progress: advance(progress, None), progress
        )
    else:

        def look_and_advance(progress: _Progress) -> _Progress:
            tokens, found = look_up(lookup, progress.text, length + progress.count)
            found = jnp.where(progress.count < wanted, found, 0)
            after = jax.lax.cond(
                jnp.any(found > 0),
                lambda progress: advance(progress, (tokens, found)),
                lambda progress: advance(progress, None),
                progress,
            )
            # A row that has its K tokens waits for the others, so that it needs no more room.
            waits = progress.count >= wanted
            return dataclasses.replace(after, count=jnp.where(waits, progress.count, after.count))

        progress = jax.lax.while_loop(
            lambda progress: jnp.any(progress.count < wanted),
            look_and_advance,
            progress,
        )
    drafted = _slice(progress.text, length, num_speculative_tokens)
    if progress.logits is not None:
        logits = progress.logits[:, :num_speculative_tokens]
    return Draft(drafted, logits, progress.num_passes), progress.cache


def _extend(
    model: Llama,
    progress: _Progress,
    hidden: Float[Array, "rows time embed"],
    proposals: tuple[Int[Array, "rows proposed"], Int[Array, " rows"]] | None,
    length: Int[Array, " rows"],
    sampling: Sampling | None,
    key: Key[Array, ""],
    room: int,
) -> _Progress:
    """Appends the draft model's own choices, as far as they confirm the proposals, and one more."""
    logits = model.logits(hidden)
    key = jax.random.fold_in(key, progress.num_passes) if sampling else key
    chosen = sample(logits, sampling, key)
    advance = jnp.ones_like(length)
    if proposals is not None:
        tokens, found = proposals
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        confirmed = (chosen[:, :-1] == tokens) & (steps < found[:, None])
        advance += jnp.sum(jnp.cumprod(confirmed, axis=1, dtype=jnp.int32), axis=1)
    kept = progress.logits
    if kept is not None:
        # Of a row that waits this is past its K tokens, where nothing is read.
        at = jnp.minimum(progress.count, room - logits.shape[1])
        kept = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at, 0)))(
            kept, logits, at
        )
    text = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        progress.text, chosen, length + progress.count
    )
    return _Progress(text, progress.count + advance, kept, progress.cache, progress.num_passes + 1)


def _slice(
    text: Int[Array, "rows capacity"], start: Int[Array, " rows"], width: int
) -> Int[Array, "rows width"]:
    at = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    return jnp.take_along_axis(text, at, axis=1)
