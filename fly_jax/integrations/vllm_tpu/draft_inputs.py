"""The inputs of a draft model after a step of the target: flat, pure, and free of the engine.

With a lookup, a pass takes in each request's last token and what followed the same n-gram before.
It keeps as many of these as the model chooses itself, so the tokens are those of one pass each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from fly_jax.decoding.drafters.lookup import Lookup, look_up
from fly_jax.verification.verify import flat_places


class TargetStep(NamedTuple):
    """A step of the target, of all requests one after the other."""

    tokens: Int[Array, " tokens"]  # that it took in; the rest is padding
    positions: Int[Array, " tokens"]  # theirs, in their requests' texts
    starts: Int[Array, " requests+1"]  # where each request's tokens begin, and the last one's end
    lengths: Int[Array, " requests"]  # of each text, the tokens of this step included
    next_token: Int[Array, " requests"]  # what follows the tokens that were kept
    num_rejected: Int[Array, " requests"]  # tokens at the end of each that were not kept
    num_requests: Int[Array, " 1"]


class Context(NamedTuple):
    """The draft model's inputs after a pass of the target, in the same layout.

    The distribution is the attention kernel's: requests that take in one token, those that take in
    a part of a prompt, and all of them.
    """

    tokens: Int32[Array, " more"]  # those that the target kept, and then the request's next one
    positions: Int32[Array, " more"]
    starts: Int32[Array, " requests+1"]
    lengths: Int32[Array, " requests"]
    last: Int32[Array, " requests"]  # where each request's next token is
    distribution: Int32[Array, " 3"]


def context_of(step: TargetStep, *, max_length: int) -> Context:
    """The tokens that the target kept of each request, and what follows, up to `max_length`."""
    num_rows = step.lengths.shape[0]
    is_live = jnp.arange(num_rows) < step.num_requests
    kept = step.starts[1:] - step.starts[:-1] - step.num_rejected
    counts = jnp.where(is_live, kept + 1, 0)
    starts, row, place = flat_places(counts, step.tokens.shape[0] + num_rows)
    source = jnp.minimum(step.starts[row] + place, step.tokens.shape[0] - 1)
    tokens = jnp.where(place == kept[row], step.next_token[row], step.tokens[source])
    positions = step.positions[jnp.minimum(step.starts[row], step.tokens.shape[0] - 1)] + place
    lengths = step.lengths - jnp.where(is_live, step.num_rejected, 0) + is_live
    zero = jnp.zeros_like(step.num_requests)
    return Context(
        tokens=tokens.astype(jnp.int32), starts=starts, last=jnp.maximum(starts[1:] - 1, 0),
        positions=jnp.clip(positions, 0, max_length - 1).astype(jnp.int32),
        lengths=jnp.minimum(lengths, max_length).astype(jnp.int32),
        distribution=jnp.concatenate([zero, zero, step.num_requests]).astype(jnp.int32),
    )  # fmt: skip


def decoding_step(
    hidden: Float[Array, "more size"],
    positions: Int32[Array, " more"],
    last: Int32[Array, " requests"],
    distribution: Int32[Array, " 3"],
) -> tuple[
    Float[Array, "requests size"],
    Int32[Array, " requests"],
    Int32[Array, " requests+1"],
    Int32[Array, " 3"],
]:
    """The hidden states and positions of the last tokens of a `Context`, for a pass of them."""
    starts = jnp.arange(last.shape[0] + 1, dtype=jnp.int32)
    return hidden[last], positions[last], starts, jnp.repeat(distribution[2:], 3)


_NOWHERE = np.iinfo(np.int32).max


class Progress(NamedTuple):
    """The state of drafting with a lookup."""

    text: Int32[Array, "requests capacity"]  # of each request, and behind it what has been drafted
    length: Int32[Array, " requests"]  # tokens of it that are no drafts
    num_drafted: Int32[Array, " requests"]  # so many; K where it is padding


class Pass(NamedTuple):
    """The last tokens and what was looked up, for a pass, laid out as those of a `TargetStep`."""

    tokens: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    starts: Int32[Array, " requests+1"]
    lengths: Int32[Array, " requests"]


def begin(
    text: Int32[Array, "requests capacity"],
    length: Int32[Array, " requests"],
    first: Int32[Array, " requests"],
    distribution: Int32[Array, " 3"],
    *,
    num_speculative_tokens: int,
) -> Progress:
    """The progress after the first draft token of each request; rows beyond these are padding."""
    rows = jnp.arange(len(length))
    text = jnp.pad(text, ((0, 0), (0, num_speculative_tokens))).at[rows, length].set(first)
    return Progress(text, length, jnp.where(rows < distribution[2], 1, num_speculative_tokens))


def feed(
    progress: Progress, lookup: Lookup, *, num_speculative_tokens: int, max_length: int
) -> Pass:
    """The inputs of the next pass; no request reaches further than K passes of one token would."""
    text, length, num_drafted = progress
    num_rows, width = len(length), 1 + lookup.num_speculative_tokens
    end = length + num_drafted
    proposed, found, *_ = look_up(lookup, text, end, lookup.num_speculative_tokens)
    # One token comes from the pass itself, so of the last one there is no proposal.
    useful = jnp.minimum(num_speculative_tokens - 1 - num_drafted, max_length - end)
    counts = 1 + jnp.clip(found, 0, jnp.maximum(useful, 0))
    # A request that has its tokens waits for the others: it takes in again what it has taken in.
    first = length + jnp.minimum(num_drafted, num_speculative_tokens - 1) - 1
    last = jnp.take_along_axis(text, first[:, None], axis=1)
    tokens = jnp.concatenate([last, proposed], axis=1)
    starts, row, place = flat_places(counts, num_rows * width)
    place = jnp.minimum(place, width - 1)
    return Pass(
        tokens[row, place].astype(jnp.int32),
        jnp.minimum(first[row] + place, max_length - 1).astype(jnp.int32),
        starts,
        jnp.minimum(first + counts, max_length).astype(jnp.int32),
    )


def extended(
    progress: Progress, fed: Pass, chosen: Int[Array, " tokens"], *, num_speculative_tokens: int
) -> Progress:
    """The draft tokens that a pass adds, whose model chose these after what it was fed."""
    text, length, num_drafted = progress
    num_rows, width = len(length), len(chosen) // len(length)
    steps = jnp.arange(width, dtype=jnp.int32)
    source = fed.starts[:-1, None] + steps
    own = chosen[jnp.minimum(source, len(chosen) - 1)]
    proposed = fed.tokens[jnp.minimum(source + 1, len(chosen) - 1)]
    agrees = (own == proposed) & (source + 1 < fed.starts[1:, None])
    agreed = jnp.sum(jnp.cumprod(agrees, axis=1), axis=1)
    added = jnp.where(num_drafted < num_speculative_tokens, agreed + 1, 0)
    end = length + num_drafted
    place = jnp.where(steps < added[:, None], end[:, None] + steps, _NOWHERE)
    text = text.at[jnp.arange(num_rows)[:, None], place].set(own, mode="drop")
    return Progress(text, length, num_drafted + added)


def drafted(progress: Progress, *, num_speculative_tokens: int) -> Int32[Array, "requests K"]:
    """The K draft tokens of each request, when all have them."""
    place = progress.length[:, None] + jnp.arange(num_speculative_tokens, dtype=jnp.int32)
    return jnp.take_along_axis(progress.text, place, axis=1)


def slots_of_tokens(
    slots: Int32[Array, " requests"],
    starts: Int32[Array, " requests+1"],
    tokens: Int32[Array, " tokens"],
) -> Int32[Array, " tokens"]:
    """The slot of the text of each token's request; beyond all slots for padding."""
    row = jnp.searchsorted(starts[1:], jnp.arange(len(tokens)), side="right")
    return slots.at[row].get(mode="fill", fill_value=_NOWHERE)
