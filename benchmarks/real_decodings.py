"""How a real model is decoded in benchmarks: what drafts, with which rule and K.

Each name says both. `DRAFTER` stands for a drafter that was trained for the target, which a
benchmark's flag names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DRAFTER = "drafter"
TARGET_ALONE = "autoregressive"
_BASED_ON: Mapping[str, tuple[str | None, dict[str, Any]]] = {
    "lookup": ("ngram", {}),
    "self:int4": ("self:int4", {}),
    "drafter": (DRAFTER, {}),
}
_RULES: Mapping[str, dict[str, Any]] = {
    "exact": {"rule": "exact"},
    "fly": {"rule": "fly"},
    "fly | margin 0.3": {"rule": "fly | margin", "margin_gap": 0.3},
    "margin 1": {"rule": "margin", "margin_gap": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """One way to decode.

    Attributes:
      draft: as `load_pair` takes it, or `DRAFTER`.
      values: what `Pair.config` is given.
    """

    draft: str | None
    values: Mapping[str, Any]


def decoding(name: str) -> Decoding:
    """The decoding that a name stands for, such as "self:int4, fly | margin 0.3, K = 15".

    Raises:
      SystemExit: no such decoding.
    """
    if name == TARGET_ALONE:
        return Decoding(None, {"rule": TARGET_ALONE})
    try:
        draft, rule, depth = name.split(", ")
        based, values = _BASED_ON[draft]
        values = values | _RULES[rule] | {"num_speculative_tokens": int(depth.removeprefix("K = "))}
    except (KeyError, ValueError) as error:
        raise SystemExit(
            f"'{name}' names no decoding; give {TARGET_ALONE}, or 'DRAFT, RULE, K = NUMBER' with a "
            f"draft of {', '.join(_BASED_ON)} and a rule of {', '.join(_RULES)}."
        ) from error
    return Decoding(based, values)


def drafts() -> tuple[str, ...]:
    """The names of all that can draft."""
    return tuple(_BASED_ON)


def is_exact(name: str) -> bool:
    """Whether a name's rule is exact decoding."""
    return ", exact, " in name


def of_batch(batch: int) -> str:
    """The key of a batch size in a result file."""
    return f"batch {batch}"


def draft_of(one: Decoding, drafter: str | None) -> str | None:
    """The draft, as `load_pair` takes it.

    Args:
      one: the decoding.
      drafter: what stands for `DRAFTER`.

    Raises:
      SystemExit: it is needed, and None.
    """
    if one.draft != DRAFTER:
        return one.draft
    if drafter is None:
        raise SystemExit("A decoding with the drafter was asked for; give --drafter its folder.")
    return drafter
