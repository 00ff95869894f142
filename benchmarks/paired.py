"""Decoders on the same texts: side by side, and how much of one's score another keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from texts import MAX_NEW_TOKENS

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair
from fly_jax.evaluation.compare import Comparison, compare
from fly_jax.evaluation.paired import redrawn, retention
from fly_jax.evaluation.problems import Problem, is_correct


def side_by_side(
    pair: Pair, texts: Sequence[Any], configs: Mapping[str, DecodingConfig], **given: Any
) -> Comparison:
    """Word problems, or prompts as text or token ids, in turns; prints the table.

    Args:
      pair: that decodes.
      texts: problems or prompts.
      configs: by name, the baseline first.
      **given: see `compare`.
    """
    worded = [one for one in texts if isinstance(one, Problem)]
    compared = compare(
        pair,
        [one.prompt for one in worded] or texts,
        configs,
        max_new_tokens=MAX_NEW_TOKENS,
        check=(lambda index, text: is_correct(worded[index], text)) if worded else None,
        **given,
    )
    print(compared.table(), flush=True)
    return compared


def paired_interval(
    worded: Sequence[Problem], base: Sequence[str], other: Sequence[str]
) -> dict[str, float]:
    """Retention with a 95% interval: problems are redrawn, both decoders' verdicts together."""
    verdicts = np.array(
        [[is_correct(p, a), is_correct(p, b)] for p, a, b in zip(worded, base, other, strict=True)]
    )
    kept = retention(verdicts[:, 0], verdicts[:, 1])
    assert kept is not None
    return {
        **dict(zip(("retention", "low", "high"), kept, strict=True)),
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
    sums = counts[redrawn(len(counts))].sum(axis=1)
    low, high = np.quantile(100 * (sums[:, 2] - sums[:, 1]) / sums[:, 0], (0.025, 0.975))
    asked, done, by_other = counts.sum(axis=0)
    return {
        "baseline": float(100 * done / asked),
        "this": float(100 * by_other / asked),
        "points": float(100 * (by_other - done) / asked),
        "low": float(low),
        "high": float(high),
    }
