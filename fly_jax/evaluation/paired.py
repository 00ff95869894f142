"""The share of one decoding's score that another keeps, on the same items."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Bool

Verdicts = Bool[np.ndarray, " items"]

_Z = 1.959964  # of a two-sided interval of 95%
_Z_POWER = 0.841621  # a test that decides in 80% of cases
_SAMPLES = 10_000


def retention(base: Verdicts, other: Verdicts) -> tuple[float, float, float] | None:
    """The other score over the base's, with a 95% bootstrap interval; None for a base of 0."""
    if not base.any():
        return None
    drawn = np.random.default_rng(0).integers(len(base), size=(_SAMPLES, len(base)))
    ours, theirs = base[drawn].sum(axis=1), other[drawn].sum(axis=1)
    low, high = np.quantile(theirs[ours > 0] / ours[ours > 0], (0.025, 0.975))
    return float(other.sum() / base.sum()), float(low), float(high)


def compare_paired(base: Verdicts, other: Verdicts, margin: float) -> dict[str, Any]:
    """Counts the items that another decoding gained and lost, and its retention.

    The verdict is Tango's score test (1998) of a difference of `margin` points, at 2.5%. Where no
    item differs it still needs a few hundred items for a point. Where it is undecided,
    `items_to_decide` are those that would decide: in 80% of cases if the decodings are equally good
    and differ as often as here, or, where there are as many already, with the difference seen.
    """
    number, kept = len(base), retention(base, other)
    gained, lost = int((other & ~base).sum()), int((base & ~other).sum())
    limit = margin / 100
    score = _tango(lost / number, gained / number, limit)
    verdict = "undecided"
    if abs(score) * math.sqrt(number) >= _Z:
        verdict = "not worse" if score > 0 else "worse"
    half = (gained + lost) / number / 2
    needed = math.ceil(((_Z + _Z_POWER) / _tango(half, half, limit)) ** 2)
    if needed <= number:  # a difference of just the margin decides nothing
        needed = math.ceil((_Z / score) ** 2) if score else 0
    return {
        "retention": kept and kept[0], "low": kept and kept[1], "high": kept and kept[2],
        "points": 100 * (gained - lost) / number, "gained": gained, "lost": lost,
        "mcnemar_p": mcnemar(gained, lost), "verdict": verdict,
        "items_to_decide": (needed or None) if verdict == "undecided" else None,
    }  # fmt: skip


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p of so many items gained and lost, were both equally likely."""
    number, least = gained + lost, min(gained, lost)
    tail = sum(math.comb(number, one) for one in range(least + 1))
    return min(1.0, 2 * tail / 2**number)


def _tango(lost: float, gained: float, limit: float) -> float:
    """The statistic of one item, given shares of items: above 0 where the loss is below the limit.

    That of n items is sqrt(n) times it. The variance is that of the most probable shares with a
    loss of just the limit.
    """
    b = -lost - gained + (2 - gained + lost) * -limit
    c = lost * limit * (1 + limit)
    share = (math.sqrt(max(b * b - 8 * c, 0.0)) - b) / 4
    return (gained - lost + limit) / math.sqrt(2 * share - limit * (1 + limit))
