"""Retention with an interval, from two decoders' answers to the same problems."""

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
    draws = np.random.default_rng(0).integers(len(verdicts), size=(10_000, len(verdicts)))
    sums = verdicts[draws].sum(axis=1)
    low, high = np.quantile(sums[:, 1] / sums[:, 0], (0.025, 0.975))
    return {
        "retention": float(verdicts[:, 1].sum() / verdicts[:, 0].sum()),
        "low": float(low),
        "high": float(high),
        "only_baseline_correct": int((verdicts[:, 0] & ~verdicts[:, 1]).sum()),
        "only_this_correct": int((~verdicts[:, 0] & verdicts[:, 1]).sum()),
        "same_text": float(np.mean([a == b for a, b in zip(base, other, strict=True)])),
    }
