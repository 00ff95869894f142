"""Evidence and acceptance in plain NumPy loops, written from the definitions.

Independent of the package: float64, one row and one position at a time, no array tricks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats


class Evidence(NamedTuple):
    """The oracle's numbers for one row and position."""

    argmax: int
    argmax_logit: float
    draft_logit: float
    log_sum_exp: float
    entropy: float
    accepted: bool


def random_logits(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Positions that are peaked, flat, full of ties or partly ruled out."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape) * rng.choice([0.0, 0.1, 1.0, 4.0, 25.0], (*shape[:-1], 1))
    logits = np.where(rng.random((*shape[:-1], 1)) < 0.5, np.round(logits), logits)
    ruled_out = (rng.random(shape) < 0.1) & (np.arange(shape[-1]) > 0)
    return np.where(ruled_out, -np.inf, logits).astype(np.float32)


def greedy_evidence(logits: np.ndarray, draft: int | None, measure: str, top_k: int) -> Evidence:
    """Evidence at one position; `draft` is None where nothing was drafted."""
    logits = logits.astype(np.float64)
    argmax = max(range(len(logits)), key=logits.__getitem__)  # the first of several
    total = sum(math.exp(value - logits[argmax]) for value in logits)
    log_sum_exp = float(logits[argmax]) + math.log(total)
    probs = sorted((math.exp(value - log_sum_exp) for value in logits), reverse=True)
    if measure == "top_k":
        probs = probs[:top_k]
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    if measure == "normalized":
        entropy /= math.log(len(logits))
    given = -math.inf if draft is None else float(logits[draft])
    return Evidence(argmax, float(logits[argmax]), given, log_sum_exp, entropy, draft == argmax)


def processed_probs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then top-p on the renormalised rest; ties at the end are kept.

    Temperature 0 is greedy: all on the lowest id of the largest logit.
    """
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = [float(value) / temperature for value in logits]
    largest = max(scaled)
    mass = [math.exp(value - largest) for value in scaled]
    if top_k:
        for token, value in enumerate(scaled):
            if sum(other > value for other in scaled) >= top_k:
                mass[token] = 0.0
    if top_p < 1:
        before = [value / sum(mass) for value in mass]
        for token, prob in enumerate(before):
            if sum(other for other in before if other > prob) >= top_p:
                mass[token] = 0.0
    return np.array([value / sum(mass) for value in mass])


def goodness_of_fit(tokens: Sequence[int], probs: np.ndarray) -> float:
    """The p-value of a chi-square test; tokens that are expected too seldom share a bin.

    One of probability 0 must not occur at all.
    """
    counts = np.bincount(tokens, minlength=len(probs))
    assert not np.any(counts[probs == 0])
    both = np.stack([counts, probs * len(tokens)])
    rare = both[1] < 5
    both = np.column_stack([both[:, ~rare], both[:, rare].sum(axis=1)])
    both = both[:, both[1] > 0]
    # One bin alone fits: nothing else could be drawn.
    return float(scipy.stats.chisquare(*both).pvalue) if both.shape[1] > 1 else 1.0


class Row(NamedTuple):
    """What a rule decides about one row."""

    num_accepted: int
    next_why: str
    why: list[str]
    num_rescued: int


class Alternative(NamedTuple):
    """Conditions that each name their refusal, and windows as (size, kind)."""

    conditions: list[tuple[str, list[bool]]]
    windows: Sequence[tuple[int, str]] = ()


# From the one that is checked first to the one that is checked last.
CHECKS = ["REFUSED_GATE", "REFUSED_MEMORY", "REFUSED_BUDGET", "REFUSED_WINDOW", "REFUSED_BOUNDARY"]


def loosened_row(
    accepted: list[bool], never: list[bool], num_drafted: int, alternatives: list[Alternative],
    regret: list[float], budget: float = math.inf,
) -> tuple[Row, float]:  # fmt: skip
    """A loosened rule that spends as it walks over the draft; the row, and what it spent."""
    spent, num_rescued = 0.0, 0

    def refusal(alternative: Alternative, at: int) -> str | None:
        for name, holds in alternative.conditions:
            if not holds[at]:
                return name
        if budget <= 0 or spent + regret[at] > budget:
            return "REFUSED_BUDGET"
        for size, kind in alternative.windows:
            last = size - 1 if kind == "reference" else size
            if not all(accepted[at + 1 : min(at + last + 1, num_drafted)]):
                return "REFUSED_WINDOW"
        fits = all(at + 1 + size <= num_drafted for size, _ in alternative.windows)
        return None if fits else "REFUSED_BOUNDARY"

    why = ["DROPPED"] * len(accepted)
    for at in range(num_drafted):
        if accepted[at]:
            why[at] = "MATCHED"
            continue
        refusals = [refusal(alternative, at) for alternative in alternatives]
        if never[at] or None not in refusals:
            latest = max((name for name in refusals if name), key=CHECKS.index, default="REFUSED")
            why[at] = "REFUSED" if never[at] else latest
            return Row(at, "CORRECTED", why, num_rescued), spent
        why[at] = "RESCUED"
        spent += regret[at]
        num_rescued += 1
    return Row(num_drafted, "BONUS", why, num_rescued), spent


def fly_row(
    accepted: list[bool], entropy: list[float], never: list[bool], num_drafted: int,
    threshold: float, window_size: int, reference: bool = False,
) -> Row:  # fmt: skip
    """`Fly`; `never` bars a position from rescue."""
    gate = [threshold <= 0.01 or one >= threshold for one in entropy]
    window = (window_size, "reference" if reference else "paper")
    alternatives = [Alternative([("REFUSED_GATE", gate)], [window])]
    return loosened_row(accepted, never, num_drafted, alternatives, [0.0] * len(accepted))[0]
