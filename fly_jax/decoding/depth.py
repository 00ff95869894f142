"""The rates at which a row's draft is accepted, and the K of each round that follows from them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from fly_jax.shapes import DraftFlags, DraftFloats, Index, RowFlags, RowFloats, RowInts
from fly_jax.verification.data import Count, column
from fly_jax.verification.rules import Verdict, Why

# A round counts half after this many more: text changes as it goes on.
_HALF_LIFE = 16.0
# The prior: a row counts as having shown so many draft tokens, with these rates.
_PRIOR_TOKENS = 4.0
_PRIOR_STRICT_RATE = 0.9
_PRIOR_LOOSE_RATE = 0.95
# The prior of K = auto has lower rates and more tokens, so that one refusal does not end drafting.
# `_LASTING_TOKENS` of them never fade: after long without drafts these rates count again.
_HOPED_TOKENS, _LASTING_TOKENS = 8.0, 0.25
HOPED_STRICT_RATE, _HOPED_LOOSE_RATE = 0.75, 0.85
# Nobody knows where a text will end: so many more tokens of a row, at most, are worth a start.
FORESEEN_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcceptanceStats:
    """The counts of a row's draft, and the machine's seconds, from which the next K is chosen.

    Of a draft that has rates of its own those count, and the seconds.

    The counts fade from round to round, with a draft or without. The costs of each depth are: the
    seconds of the target's pass; the share of the expected draft tokens that the drafter gives; the
    seconds of a pass in which it takes in what it lacks, or where K is chosen behind its draft, of
    any of its passes; where K is chosen before, the seconds of its draft; and the share that a
    lookup in its place gives. They are empty where K is fixed.
    """

    matched: RowFloats  # draft tokens that the lossless rule took
    rescued: RowFloats  # mismatches that were kept
    refused: RowFloats  # mismatches that ended a block
    cut: RowFloats  # mismatches that ended one only because their window did not fit into it
    costs: Float32[Array, "5 depths"]


class Choice(NamedTuple):
    """A K, the draft tokens that are expected of it, and the tokens a second that it promises."""

    depth: Index
    expected: Float32[Array, ""]
    speed: Float32[Array, ""]


def initial_stats(rows: int, costs: Float32[Array, "5 depths"]) -> AcceptanceStats:
    """A guess that a few rounds overrule."""
    counts = _counts(_PRIOR_TOKENS, _PRIOR_STRICT_RATE, _PRIOR_LOOSE_RATE)
    matched, rescued, refused, cut = (jnp.full((rows,), one, jnp.float32) for one in counts)
    return AcceptanceStats(matched, rescued, refused, cut, costs)


def _counts(tokens: float, strict: float, loose: float) -> tuple[float, float, float, float]:
    """The draft tokens, of so many, that these rates match, rescue, refuse and cut."""
    return tokens * strict, tokens * (loose - strict), tokens * (1 - loose), 0.0


def rows_begun(stats: AcceptanceStats, rows: Int[Array, " few"]) -> AcceptanceStats:
    """Gives rows that begin a guess: half the prior of K = auto, half what all rows have seen."""
    total = jnp.sum(stats.matched + stats.rescued + stats.refused + stats.cut)
    scale = _HOPED_TOKENS / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    hoped = _counts(_HOPED_TOKENS, HOPED_STRICT_RATE, _HOPED_LOOSE_RATE)
    for name, hope in zip(("matched", "rescued", "refused", "cut"), hoped, strict=True):
        counts = getattr(stats, name)
        begun = (jnp.where(total > 0, jnp.sum(counts) * scale, hope) + hope) / 2
        stats = dataclasses.replace(stats, **{name: counts.at[rows].set(begun)})
    return stats


def observe(
    stats: AcceptanceStats,
    verdict: Verdict,
    live: RowFlags,
    is_asked: Bool[Array, ""] | None = None,
) -> AcceptanceStats:
    """Counts the fate of a round's draft in the live rows, if the drafter made it (`is_asked`)."""
    why = verdict.why if is_asked is None else jnp.where(is_asked, verdict.why, Why.DROPPED)

    def count(kept: DraftFlags, before: RowFloats) -> Array:
        faded = before * 0.5 ** (1 / _HALF_LIFE) + jnp.sum(kept, axis=1, dtype=jnp.float32)
        return jnp.where(live, faded, before)

    matched, rescued = why == Why.MATCHED, why == Why.RESCUED
    cut = why == Why.REFUSED_BOUNDARY
    refused = ~matched & ~rescued & ~cut & (why != Why.DROPPED)
    kinds = {"matched": matched, "rescued": rescued, "refused": refused, "cut": cut}
    counts = {name: count(kept, getattr(stats, name)) for name, kept in kinds.items()}
    return dataclasses.replace(stats, **counts)


def strict_rate(stats: AcceptanceStats) -> RowFloats:
    """Share of the draft tokens that the lossless rule takes."""
    total = stats.matched + stats.rescued + stats.refused + stats.cut
    return (stats.matched + _LASTING_TOKENS * HOPED_STRICT_RATE) / (total + _LASTING_TOKENS)


def expected_tokens(
    stats: AcceptanceStats, depth: int, strict_tail: Count, rates: DraftFloats | None = None
) -> RowFloats:
    """The tokens that a round of K = `depth` is expected to settle, the target's own included.

    Draft tokens are taken to be accepted independently (Leviathan et al., arXiv 2211.17192,
    equation 1), with one rate where a mismatch may be rescued and a lower one in the block's last
    `strict_tail` positions, where no window fits. With both rates a it is (1 - a^(K+1)) / (1 - a).
    With `rates`, of each draft token, those count instead.
    """
    if rates is not None:
        return 1 + jnp.sum(jnp.cumprod(rates[:, :depth], axis=1), axis=1)
    kept = stats.matched + stats.rescued
    loose = kept + _LASTING_TOKENS * _HOPED_LOOSE_RATE
    loose /= kept + stats.refused + _LASTING_TOKENS
    position = jnp.arange(1, depth + 1)
    strict = strict_rate(stats)
    rate = jnp.where(position <= depth - column(strict_tail), loose[:, None], strict[:, None])
    return 1 + jnp.sum(jnp.cumprod(rate, axis=1), axis=1)


def choose_depth(
    stats: AcceptanceStats, live: RowFlags, depths: tuple[int, ...], strict_tail: Count,
    left: RowInts, num_behind: Index, rates: DraftFloats | None = None,
    num_passes: Array | None = None,
) -> Choice:  # fmt: skip
    """The depth that promises most tokens a second.

    Args:
      left: tokens that each row may still get, which a round never exceeds.
      num_behind: passes that a draft model needs before it drafts; they count for all these tokens.
      rates: of the tokens that are drafted already, 0 where there are none; else `stats` say them.
      num_passes: of a drafter whose K is chosen behind its draft, of any depth or of each; with
        rates and 0 the draft is a lookup's.
    """
    seconds, given, behind, drafting, copied = stats.costs
    if rates is None:
        seconds += drafting
    elif num_passes is not None:
        given = jnp.where(num_passes > 0, given, copied)
    if num_passes is not None:
        seconds += num_passes * behind
    promised = (expected_tokens(stats, k, strict_tail, rates) for k in depths)
    expected = [jnp.minimum(one, left) - 1 for one in promised]
    totals = jnp.stack([jnp.sum(jnp.where(live, one, 0)) for one in expected])
    more = jnp.sum(jnp.where(live, jnp.minimum(left, FORESEEN_TOKENS), 0))
    start = num_behind * behind / jnp.maximum(more, 1)
    speed = 1 / (seconds / (jnp.sum(live) + given * totals) + start)
    best = jnp.argmax(speed)
    return Choice(jnp.asarray(depths, jnp.int32)[best], totals[best], speed[best])


def worth_drafting(
    stats: AcceptanceStats, depths: tuple[int, ...]
) -> tuple[Index, Float32[Array, ""]]:
    """Finds how far a draft is to go behind which K is chosen: tokens at most, and the least rate.

    A further token takes a pass of the drafter and makes the target's wider. It pays if it is
    reached in so large a share of drafts as this is of the target's pass over one token, by the
    share of the expected tokens that drafts give. Where K is not free, the rate is 0, and the draft
    has as many tokens as the only depth that is known.
    """
    seconds, given, behind, *_ = stats.costs
    is_known = jnp.isfinite(seconds)
    most = jnp.max(jnp.where(is_known, jnp.asarray(depths, jnp.int32), 0))
    wider = (seconds[-1] - seconds[0]) / (depths[-1] - depths[0])
    least = (behind[-1] + wider) / (seconds[0] * given[-1])
    return most, jnp.where(jnp.all(is_known), least, 0)
