"""Reports on every settled token: from the device, and as one object per token."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int8, Int32

from fly_jax.shapes import DraftFlags, DraftTokens
from fly_jax.verification.evidence import TargetEvidence, TopTokens
from fly_jax.verification.rules import Why

_NO_DRAFT = -1
_T = TypeVar("_T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reports:
    """A few numbers of draft, target and rule at the position of each token, no logits.

    Probabilities are logarithms, in nats, of the target's plain or cut softmax; that of a draft
    token is -inf where nothing was drafted.
    """

    draft: Int32[Array, "*rows tokens"]  # what was drafted there; -1 at a bonus token
    choice: Int32[Array, "*rows tokens"]  # the target's most probable token
    draft_log_prob: Float32[Array, "*rows tokens"]
    choice_log_prob: Float32[Array, "*rows tokens"]
    entropy: Float32[Array, "*rows tokens"]
    verdict: Int8[Array, "*rows tokens"]  # the `Why` of the draft token, as the rule decided
    deferred: Bool[Array, "*rows tokens"] | None  # its window was left open at its block's end
    top: TopTokens | None = None  # if the round is asked for them


def report(
    draft_tokens: DraftTokens, seen: TargetEvidence, verdict: Int[Array, "rows draft"],
    why: Int[Array, "rows block"], deferred: DraftFlags | None = None,
) -> Reports:  # fmt: skip
    """The reports of a block; `why` is the `Why` of each of its tokens."""
    is_bonus, pad = why == Why.BONUS.value, ((0, 0), (0, 1))
    return Reports(
        draft=jnp.where(is_bonus, _NO_DRAFT, jnp.pad(draft_tokens, pad)).astype(jnp.int32),
        choice=seen.argmax, draft_log_prob=seen.log_prob,
        choice_log_prob=seen.argmax_logit - seen.log_sum_exp,
        entropy=jnp.zeros_like(seen.log_sum_exp) if seen.entropy is None else seen.entropy,
        verdict=jnp.where(is_bonus, Why.BONUS.value, jnp.pad(verdict, pad)).astype(jnp.int8),
        deferred=None if deferred is None else jnp.pad(deferred, pad), top=seen.top,
    )  # fmt: skip


def no_reports(rows: int, tokens: int, num_top: int) -> Reports:
    """Room for reports of provisional tokens, with none yet; `top` is None if `num_top` is 0."""
    ids = jnp.zeros((rows, tokens), jnp.int32)
    numbers = jnp.zeros((rows, tokens), jnp.float32)
    no = jnp.zeros((rows, tokens), bool)
    top = None
    if num_top:
        many = jnp.zeros((rows, tokens, num_top))
        top = TopTokens(many.astype(jnp.int32), many.astype(jnp.float32), numbers)
    return Reports(ids, ids, numbers, numbers, numbers, no.astype(jnp.int8), no, top)


@dataclasses.dataclass(frozen=True)
class TokenReport:
    """A settled token, and what draft, target and rule said at its position.

    Attributes:
      draft_id: what was drafted there; None at a bonus token, as all that is said of it.
      choice_id: the target's most probable token.
      draft_probability, choice_probability: in its plain softmax, whatever the temperature.
      entropy: of the target there, in the measure of `RoundSpec.needs`.
      regret: how much more probable the target finds its choice than the draft token, as a
        difference of logarithms, in nats.
      verdict: what the rule decided of the draft token; `Why.BONUS` where there is none. A token
        that was deferred has `Why.REFUSED_BOUNDARY`.
      deferred: its window was left open at the end of its block. It then held if the token is
        rescued, and failed if it is corrected.
    """

    token_id: int
    why: Why
    draft_id: int | None
    choice_id: int
    draft_probability: float | None
    choice_probability: float
    entropy: float
    regret: float | None
    verdict: Why
    deferred: bool

    @property
    def refused_by(self) -> Why | None:
        """The reason why a draft token was refused; None at a position without a correction."""
        if self.why != Why.CORRECTED:
            return None
        return Why.REFUSED_WINDOW if self.deferred else self.verdict


def token_reports(
    token_ids: tuple[int, ...], why: tuple[Why, ...], reports: Reports, at: tuple[int, int]
) -> list[TokenReport]:
    """The reports (on the host) of what one round settles in one row, `at` their indices."""
    column = functools.partial(_column, at=at, number=len(token_ids))
    has_draft = [draft != _NO_DRAFT for draft in column(reports.draft)]
    draft_log, choice_log = column(reports.draft_log_prob), column(reports.choice_log_prob)
    never = [False] * len(token_ids)
    columns = (
        token_ids, why,
        _known(has_draft, column(reports.draft)), column(reports.choice),
        _known(has_draft, map(math.exp, draft_log)), map(math.exp, choice_log),
        column(reports.entropy),
        _known(has_draft, map(operator.sub, choice_log, draft_log)),
        map(Why, column(reports.verdict)),
        never if reports.deferred is None else column(reports.deferred),
    )  # fmt: skip
    return [TokenReport(*row) for row in zip(*columns, strict=True)]


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """A token's log-probability in the target's plain softmax, in nats, and the top ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    token_ids: tuple[int, ...], reports: Reports, at: tuple[int, int], num_top: int
) -> list[TokenLogprobs]:
    """The log-probabilities of what one round settles in one row, of `reports` with `top`."""
    assert reports.top is not None
    column = functools.partial(_column, at=at, number=len(token_ids))
    found = []
    leaves = (
        reports.draft, reports.choice, reports.draft_log_prob, reports.choice_log_prob,
        reports.top.replacement_log_prob, reports.top.ids, reports.top.log_probs,
    )  # fmt: skip
    rows = zip(token_ids, *map(column, leaves), strict=True)
    for token_id, draft, choice, of_draft, of_choice, of_replacement, ids, values in rows:
        # A window that has failed puts the choice where the draft token was reported as kept.
        drawn = of_draft if token_id == draft else of_replacement
        own = of_choice if token_id == choice else drawn
        top = tuple(zip(ids, values, strict=True))
        own = dict(top).get(token_id, own)  # the same but for its last digit
        found.append(TokenLogprobs(token_id, own, top[:num_top]))
    return found


def _column(leaf: Array, at: tuple[int, int], number: int) -> list[Any]:
    """The first `number` values of a round and a row."""
    values: list[Any] = np.asarray(leaf[at])[:number].tolist()
    return values


def _known(where: Sequence[bool], values: Iterable[_T]) -> list[_T | None]:
    return [value if known else None for known, value in zip(where, values, strict=True)]
