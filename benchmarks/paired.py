"""Two decoders on the same problems: how much of one's score the other keeps, with an interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fly_jax.training.problems import Problem, is_correct


def paired_interval(
    worded: Sequence[Problem], base: Sequence[str], other: Sequence[str]
) -> dict[str, float]:
    """Retention with a 95% interval: problems are redrawn, both decoders' verdicts together."""
    verdicts = np.array(
        [[is_correct(p, a), is_correct(p, b)] for p, a, b in zip(worded, base, other, strict=True)]
    )
    sums = verdicts[_redrawn(len(verdicts))].sum(axis=1)
    low, high = np.quantile(sums[:, 1] / sums[:, 0], (0.025, 0.975))
    return {
        "retention": float(verdicts[:, 1].sum() / verdicts[:, 0].sum()),
        "low": float(low),
        "high": float(high),
        "only_baseline_correct": int((verdicts[:, 0] & ~verdicts[:, 1]).sum()),
        "only_this_correct": int((~verdicts[:, 0] & verdicts[:, 1]).sum()),
        "same_text": float(np.mean([a == b for a, b in zip(base, other, strict=True)])),
    }


def paired_difference(
    base: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]
) -> dict[str, float]:
    """Both decoders' scores in per cent, and their difference in points with a 95% interval.

    Prompts are redrawn, each with all that was asked in it and with both decoders' verdicts.

    Args:
      base: for each prompt, which of the things that it asks for were done.
      other: the same of the other decoder.
    """
    counts = np.array([(len(a), sum(a), sum(b)) for a, b in zip(base, other, strict=True)])
    sums = counts[_redrawn(len(counts))].sum(axis=1)
    low, high = np.quantile(100 * (sums[:, 2] - sums[:, 1]) / sums[:, 0], (0.025, 0.975))
    asked, done, by_other = counts.sum(axis=0)
    return {
        "baseline": float(100 * done / asked),
        "this": float(100 * by_other / asked),
        "points": float(100 * (by_other - done) / asked),
        "low": float(low),
        "high": float(high),
    }


def _redrawn(number: int) -> np.ndarray:
    """Indices of 10,000 samples of as many problems as there are."""
    return np.random.default_rng(0).integers(number, size=(10_000, number))
