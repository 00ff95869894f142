"""Decoders on the same texts: side by side, and how much of one's score another keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from texts import MAX_NEW_TOKENS

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair
from fly_jax.evaluation.answers import compare_paired
from fly_jax.evaluation.compare import Comparison, compare
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
) -> dict[str, Any]:
    """Retention with a 95% interval, and what became of the problems; see `compare_paired`."""
    ours, theirs = (
        np.array([is_correct(*one) for one in zip(worded, texts, strict=True)])
        for texts in (base, other)
    )
    same = float(np.mean([a == b for a, b in zip(base, other, strict=True)]))
    return compare_paired(ours, theirs, margin=1.0) | {"same_text": same}
