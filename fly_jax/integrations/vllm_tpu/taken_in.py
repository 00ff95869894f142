"""What a draft model takes in after a step of the target; flat, pure, and free of the engine."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


class Step(NamedTuple):
    """A step of the target, of all requests one after the other.

    Attributes:
      tokens: that it took in; the rest is padding.
      positions: theirs, in their requests' texts.
      starts: where each request's tokens begin, and where the last one's end.
      lengths: tokens of each request, those of this step included.
      next_token: what follows the tokens that were kept of each request.
      num_rejected: tokens at the end of each request's that were not kept.
      num_requests: those that are no padding.
    """

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    starts: Int[Array, " requests+1"]
    lengths: Int[Array, " requests"]
    next_token: Int[Array, " requests"]
    num_rejected: Int[Array, " requests"]
    num_requests: Int[Array, " 1"]


class TakenIn(NamedTuple):
    """What the draft model takes in, in the same layout.

    Attributes:
      tokens: those that the target kept, and then the request's next one.
      positions: theirs.
      starts: see `Step`.
      lengths: see `Step`.
      last: where each request's next token is.
      distribution: the attention kernel's: requests that take in one token, those that take in a
        part of a prompt, and all of them.
    """

    tokens: Int32[Array, " more"]
    positions: Int32[Array, " more"]
    starts: Int32[Array, " requests+1"]
    lengths: Int32[Array, " requests"]
    last: Int32[Array, " requests"]
    distribution: Int32[Array, " 3"]


def take_in(step: Step, *, max_length: int) -> TakenIn:
    """The tokens that the target kept of each request, and the one that follows them.

    Args:
      step: of the target.
      max_length: of a request's text; what would stand beyond stands at its end.
    """
    num_rows = step.lengths.shape[0]
    is_live = jnp.arange(num_rows) < step.num_requests
    kept = step.starts[1:] - step.starts[:-1] - step.num_rejected
    counts = jnp.where(is_live, kept + 1, 0)
    starts = jnp.pad(jnp.cumsum(counts), (1, 0)).astype(jnp.int32)
    flat = jnp.arange(step.tokens.shape[0] + num_rows)
    row = jnp.minimum(jnp.searchsorted(starts[1:], flat, side="right"), num_rows - 1)
    place = flat - starts[row]
    source = jnp.minimum(step.starts[row] + place, step.tokens.shape[0] - 1)
    tokens = jnp.where(place == kept[row], step.next_token[row], step.tokens[source])
    positions = step.positions[jnp.minimum(step.starts[row], step.tokens.shape[0] - 1)] + place
    lengths = step.lengths - jnp.where(is_live, step.num_rejected, 0) + is_live
    zero = jnp.zeros_like(step.num_requests)
    return TakenIn(
        tokens=tokens.astype(jnp.int32),
        positions=jnp.clip(positions, 0, max_length - 1).astype(jnp.int32),
        starts=starts,
        lengths=jnp.minimum(lengths, max_length).astype(jnp.int32),
        last=jnp.maximum(starts[1:] - 1, 0),
        distribution=jnp.concatenate([zero, zero, step.num_requests]).astype(jnp.int32),
    )


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
    """The last token of each request: its hidden state and position; and one token of each.

    Args:
      hidden: of the tokens taken in.
      positions: see `TakenIn`.
      last: see `TakenIn`.
      distribution: see `TakenIn`.

    Returns:
      Hidden states and positions of the last tokens, and `starts` and `distribution` of a pass that
      takes in one token of each request.
    """
    starts = jnp.arange(last.shape[0] + 1, dtype=jnp.int32)
    return hidden[last], positions[last], starts, jnp.repeat(distribution[2:], 3)
