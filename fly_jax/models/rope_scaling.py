"""Stretchings of rotary frequencies, as published configurations describe them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (`rope_type: "llama3"`).

    Wavelengths longer than `original_context / low_frequency_factor` are stretched by `factor`,
    shorter ones than `original_context / high_frequency_factor` are kept, those between are
    blended (Llama 3.1 model card and reference code).
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of the rotary frequencies (`rope_type: "yarn"`, arXiv 2309.00071).

    Pairs of features that turn fewer than `slow_turns` times within `original_context` are
    stretched by `factor`, those that turn more than `fast_turns` times are kept, those between are
    blended, from one pair to the next in equal steps.
    """

    factor: float
    original_context: int  # positions that the model was trained for before
    attention_factor: float  # that queries and keys are multiplied with
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True  # the band of blended pairs is widened to whole pairs
