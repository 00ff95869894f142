"""The strictness that the calibration of a gate varies, and the bound that it is to meet."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float, Real

from fly_jax.decoding.config import DecodingConfig, largest_depth
from fly_jax.errors import FlyJaxError
from fly_jax.verification.rules.loosened import rule_names

if TYPE_CHECKING:
    from fly_jax.evaluation.replay import Rounds, Tally

Levels = Float[np.ndarray, "rounds block"]
Risk = Literal["disagreement", "regret"]

WINDOWS = (4, 6, 8)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound on the distance from the target's greedy text; FlyJaxError for a wrong limit.

    Attributes:
      risk: "disagreement": rescues per settled token, the share that the target, given the same
        text before them, finds not most probable. "regret": nats per settled token, where a rescue
        of the draft token x costs max z - z(x).
    """

    risk: Risk
    limit: float

    def __post_init__(self) -> None:
        is_share = self.risk == "disagreement"
        if not 0 < self.limit <= (1.0 if is_share else sys.float_info.max):
            unit = "the share of tokens, such as 0.02" if is_share else "nats a token, such as 0.01"
            raise FlyJaxError(
                f"max_{self.risk} is {self.limit}; it is {unit}, and must be above 0"
                f"{' and at most 1' if is_share else ''}: correct it."
            )

    def of(self, tally: Tally) -> Real[np.ndarray, " prompts"]:
        """The risk of each prompt's rescues together."""
        return tally.rescues if self.risk == "disagreement" else tally.regret

    def rate(self, tally: Tally) -> float:
        """The risk of all prompts together, per settled token."""
        return float(self.of(tally).sum() / max(tally.tokens.sum(), 1))

    def in_words(self, rate: float) -> str:
        """A rate in words."""
        if self.risk == "disagreement":
            return f"{100 * rate:.2f} rescues in 100 tokens"
        return f"{rate:.4f} nats a token"


@dataclasses.dataclass(frozen=True)
class Strictness:
    """A rule's number, and its level at which the rule just rescues a mismatch, windows aside."""

    name: str
    levels: Callable[[Rounds], Levels]
    most: float = math.inf
    least: float = 0.0

    def values(self, rounds: Rounds, number: int) -> list[float]:
        """The numbers to try: quantiles of the levels that these rounds' mismatches need."""
        drafted = np.arange(rounds.why.shape[1]) < rounds.num_drafted[:, None]
        levels = self.levels(rounds)[drafted & ~np.asarray(rounds.evidence.accepted)]
        # Rules of probabilities refuse 0: it would rescue what float32 cannot tell from 0.
        levels = np.minimum(levels[np.isfinite(levels) & (levels >= self.least)], self.most)
        if not levels.size:
            return []
        found = np.quantile(levels, np.linspace(0, 1, number))
        return sorted({float(f"{value:.3g}") for value in found})


_TINY = float(np.finfo(np.float32).tiny)
_OF_RULE = {
    "fly": Strictness("entropy_threshold", lambda rounds: np.asarray(rounds.evidence.entropy)),
    "lossy": Strictness("lossy_threshold", lambda one: np.exp(one.evidence.log_prob), 0.5, _TINY),
    "lenience": Strictness("lenience", lambda rounds: np.exp(-rounds.evidence.gap), 1.0, _TINY),
    "typical": Strictness(
        "typical_delta",
        lambda rounds: np.exp(rounds.evidence.log_prob + np.asarray(rounds.evidence.full_entropy)),
        1.0,
        _TINY,
    ),
    "margin": Strictness("margin_gap", lambda rounds: np.asarray(rounds.evidence.gap)),
}
CALIBRATED = tuple(_OF_RULE)


def strictness_of(config: DecodingConfig) -> Strictness:
    """The first rule's number; raises FlyJaxError where single rounds cannot judge it."""
    names = rule_names(config.rule)
    if not config.is_loosened or "csd" in names:
        raise FlyJaxError(
            f"The rule is {config.rule}, and a gate is calibrated for "
            f"{', '.join(CALIBRATED)} or a combination of them: give one of these with --rule."
        )
    values = config.to_dict() | {"temperature": config.sampling.temperature}
    for name, value in (("boundary", "reject"), ("risk_budget", None), ("temperature", 0)):
        if values[name] != value:
            raise FlyJaxError(
                f"{name} is {values[name]!r}, and a gate is calibrated in greedy decoding "
                f"by what each round does by itself; leave {name} out."
            )
    return _OF_RULE[names[0]]


def windows_of(config: DecodingConfig, window_size: int | None) -> tuple[int, ...]:
    """The window sizes to try that leave room in a block; raises FlyJaxError where none does."""
    if "fly" not in rule_names(config.rule):
        if window_size is not None:
            raise FlyJaxError(
                f"window_size is {window_size} and the rule {config.rule} has no window; leave "
                "window_size out, or give a rule with fly."
            )
        return (int(config.fly.window_size),)
    given = WINDOWS if window_size is None else (window_size,)
    fitting = tuple(size for size in given if size < largest_depth(config.num_speculative_tokens))
    if not fitting:
        config.replace(window_size=given[0]).to_rule()  # says why
    return fitting or given[:1]


def check_new(path: Path) -> None:
    """Raises FlyJaxError unless a config can be written there and replaces none."""
    if path.suffix != ".toml":
        raise FlyJaxError(f"The config {path} is not .toml; give its file such a name.")
    if path.exists():
        raise FlyJaxError(f"{path} is there already; give another file, or delete this one.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise FlyJaxError(
            f"The config {path} cannot be written; give a folder that exists and is yours to write."
        )


def as_toml(config: DecodingConfig, varied: Sequence[str], comment: str) -> str:
    """The text of a config file: a comment, values other than the defaults, and those varied."""
    # TOML has no control characters in its comments, nor halves of surrogate pairs.
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in comment)
    lines = [f"# {line}".rstrip() for line in shown.splitlines()]
    default = DecodingConfig().to_dict()
    for name, value in config.to_dict().items():
        stated = name in ("rule", "num_speculative_tokens", *varied)
        if value is not None and (stated or value != default[name]):
            # TOML reads JSON's values, but for DEL and surrogate pairs.
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"
