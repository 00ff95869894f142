"""The deferred windows that stay open across rounds: `boundary="defer"` (docs/decoding.md).

A mismatch whose window does not fit into its block may be kept provisionally, on the device
alone. The next rounds complete its window; if one of its tokens fails, the row is rolled back.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int8, Int32

from fly_jax.decoding.depth import AcceptanceStats, expected_tokens, strict_rate
from fly_jax.decoding.reports import Reports, no_reports
from fly_jax.errors import FlyJaxError
from fly_jax.shapes import DraftFlags, RowFlags, RowFloats, RowInts, Text
from fly_jax.verification.data import taken
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules import Rule, Verdict, Why
from fly_jax.verification.sampling import Sampling

# Mismatches come in clusters, so a window that lacks few tokens is completed less often than the
# rate of single tokens promises. Chosen on the embedded pair; docs/decoding.md has the gain.
MOST_COMPLETED = 0.65


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenWindow:
    """The provisional end of each row: a mismatch and all that follows it."""

    start: Int32[Array, " rows"]  # position of the mismatch in the row's text
    replacement: Int32[Array, " rows"]  # the target's token there
    remaining: Int32[Array, " rows"]  # draft tokens that must still be accepted; 0 without a window
    why: Int8[Array, "rows provisional"]  # why each provisional token stands there, if it stays
    reports: Reports | None
    regret: RowFloats  # what the mismatch has taken from the risk budget

    @property
    def is_open(self) -> RowFlags:
        """Tells which rows have a provisional end."""
        return self.remaining > 0


def check_deferral(rule: Rule, sampling: Sampling | None) -> None:
    """Raises FlyJaxError for a rule whose windows cannot stay open."""
    if rule.longest_window == 0 or sampling is not None:
        given = "a temperature above 0" if sampling else "a rule without a window"
        raise FlyJaxError(
            f"boundary is 'defer' with {given}; windows are deferred in greedy decoding, "
            "with a rule that has one, such as fly: change the rule or the temperature, or "
            "leave boundary at 'reject'."
        )


def most_provisional(window_size: int) -> int:
    """Tokens that may be provisional at once: the mismatch, its window, a bonus for each block."""
    return 2 * window_size + 1


def no_windows(rows: int, window_size: int, reports: bool, num_top: int = 0) -> OpenWindow:
    """The windows of rows that are settled as a whole; see `no_reports`."""
    zeros = jnp.zeros((rows,), jnp.int32)
    provisional = most_provisional(window_size)
    return OpenWindow(
        start=zeros, replacement=zeros, remaining=zeros,
        why=jnp.zeros((rows, provisional), jnp.int8),
        reports=no_reports(rows, provisional, num_top) if reports else None,
        regret=jnp.zeros((rows,), jnp.float32),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Deferral:
    """Windows that a round opens at `index` of the block, and what they need of later blocks."""

    is_new: RowFlags
    index: Int32[Array, " rows"]
    remaining: Int32[Array, " rows"]
    regret: RowFloats


def defer(
    verdict: Verdict, seen: TargetEvidence, stats: AcceptanceStats, room: RowInts,
    num_drafted: RowInts, window_size: int,
) -> tuple[Verdict, Deferral]:  # fmt: skip
    """Keeps blocks whole whose first refused mismatch is worth a provisional rescue: see `pays`.

    `verdict` is the rule's alone, and `room` the tokens that each row may still emit.
    """
    index = verdict.num_accepted
    num_draft = verdict.why.shape[1]
    at = jnp.minimum(index, num_draft - 1)
    why = taken(verdict.why, at)
    remaining = index + 1 + window_size - num_drafted
    is_new = (why == Why.REFUSED_BOUNDARY) & (index < num_drafted)
    is_new &= pays(stats, num_draft, num_drafted - index, remaining)
    # A window that the row's limit would cut off could never be completed.
    is_new &= room >= num_drafted + 1 + 2 * remaining

    steps = jnp.arange(num_draft)
    here = (steps == index[:, None]) & is_new[:, None]
    after = (steps > index[:, None]) & (steps < num_drafted[:, None]) & is_new[:, None]
    kept = jnp.where(after, Why.MATCHED.value, verdict.why)
    kept = jnp.where(here, Why.RESCUED.value, kept).astype(jnp.int8)
    gap = seen.gap[:, :num_draft]
    bonus = taken(seen.replacement, num_drafted)
    whole = dataclasses.replace(
        verdict, num_accepted=jnp.where(is_new, num_drafted, index),
        next_token=jnp.where(is_new, bonus, verdict.next_token),
        next_why=jnp.where(is_new, Why.BONUS.value, verdict.next_why).astype(jnp.int8), why=kept,
        regret=None if verdict.regret is None else jnp.where(here, gap, verdict.regret),
    )  # fmt: skip
    regret = jnp.where(is_new, taken(gap, at), 0)
    return whole, Deferral(is_new, index, jnp.where(is_new, remaining, 0), regret)


def pays(
    stats: AcceptanceStats, num_speculative_tokens: int, saved: RowInts, remaining: RowInts
) -> RowFlags:
    """Tells whether deferring each row's mismatch promises more tokens than refusing it.

    Refusing it settles j tokens, its position in the block counted from 1, and the next round E
    more. Deferring it settles K + 1 and E more if the window is completed, which has probability
    p, and j after two rounds if it is not. So it pays iff p (K + 1 - j + E) > E, with
    p = min(m^r, `MOST_COMPLETED`) for the r tokens that are missing, the row's own rate m of
    accepted draft tokens, and E expected from the row's rates. `saved` is K + 1 - j and
    `remaining` r.
    """
    next_round = expected_tokens(stats, num_speculative_tokens, 0)
    completed = jnp.minimum(strict_rate(stats) ** remaining, MOST_COMPLETED)
    return completed * (saved + next_round) > next_round


@dataclasses.dataclass(frozen=True)
class Emitted:
    """Tokens that a round settles, as `RoundOutput` has them."""

    tokens: Int[Array, "rows width"]
    why: Int[Array, "rows width"]
    count: RowInts
    reports: Reports | None
    rolled_back: RowFlags | None = None


@dataclasses.dataclass(frozen=True)
class Settlement:
    """The rows as a round with deferral leaves them."""

    text: Text  # the target's own token is in place of a mismatch that was dropped
    length: Int32[Array, " rows"]
    emitted: Emitted  # rows whose provisional end was dropped are rolled back
    window: OpenWindow
    charged: Int32[Array, " rows"]  # tokens of the block whose rescues count against the budget
    refund: RowFloats  # what goes back to it


def close(
    window: OpenWindow, new: Deferral, replacement: RowInts, text: Text, length: RowInts,
    block: Emitted, num_drafted: RowInts, accepted: DraftFlags, ended: RowFlags,
) -> Settlement:  # fmt: skip
    """Settles what is certain, keeps the rest open, and rolls back what has failed.

    Args:
      replacement: the target's token at the new mismatch.
      window, length: as they were before the round.
      text: the rows' tokens with the block's appended.
      block: what was appended of the block; nothing in a row that had finished.
      accepted: draft tokens that the lossless rule takes.
    """
    count = block.count
    # A block fails an open window by a mismatch in it, or by ending before it does.
    needed = jnp.minimum(window.remaining, num_drafted)
    is_needed = jnp.arange(accepted.shape[1]) < needed[:, None]
    mismatch = jnp.any(is_needed & ~accepted, axis=1)
    broken = window.is_open & (mismatch | (count < needed))
    live = count > 0
    # Tokens that the block loses to an older window or an end of text open no window.
    is_new = new.is_new & ~broken & (new.index < count)
    begin = jnp.where(window.is_open, window.start, length)
    start = jnp.where(is_new, length + new.index, window.start)
    left = jnp.where(is_new, new.remaining, jnp.maximum(window.remaining - num_drafted, 0))
    # A text must not end on a window that can never be completed. Nor may one stay open while
    # nothing is drafted, as a lookup alone may do for many rounds: each adds a provisional token.
    is_full = length + count - start > window.why.shape[1]
    failed = live & (broken | ((left > 0) & (ended | is_full)))
    is_open = live & (left > 0) & ~failed
    replacement = jnp.where(is_new, replacement, window.replacement)
    end = jnp.where(failed, start + 1, length + count)
    settled = jnp.where(is_open, start, end) - begin

    rows = jnp.arange(text.shape[0])
    text = text.at[rows, start].set(jnp.where(failed, replacement, text[rows, start]))
    pending, added = (window.why, window.reports), (block.why, block.reports)
    whys, reports = jax.tree.map(lambda old, new: _joined(old, new, length - begin), pending, added)
    steps = jnp.arange(whys.shape[1])
    is_replaced = (steps == (start - begin)[:, None]) & failed[:, None]
    whys = jnp.where(is_replaced, Why.CORRECTED.value, whys).astype(jnp.int8)
    keep = settled[:, None] + jnp.arange(window.why.shape[1])
    left_whys, left_reports = jax.tree.map(lambda leaf: taken(leaf, keep), (whys, reports))
    tokens = taken(text, begin[:, None] + steps)
    return Settlement(
        text=text, length=end.astype(jnp.int32),
        emitted=Emitted(tokens, whys, settled.astype(jnp.int32), reports, failed),
        window=OpenWindow(
            start=start, replacement=replacement, remaining=jnp.where(is_open, left, 0),
            why=left_whys, reports=left_reports,
            regret=jnp.where(is_new, new.regret, window.regret),
        ),
        charged=jnp.where(failed, jnp.maximum(start - length, 0), count),
        refund=jnp.where(failed & ~is_new, window.regret, 0),
    )  # fmt: skip


def _joined(pending: Array, block: Array, before: RowInts) -> Array:
    """The first `before` pending values of each row, and then the block's."""
    steps = jnp.arange(pending.shape[1] + block.shape[1])
    from_block = taken(block, jnp.maximum(steps - before[:, None], 0))
    more = ((0, 0),) * (block.ndim - 2)
    padded = jnp.pad(pending, ((0, 0), (0, block.shape[1]), *more))
    is_pending = jnp.expand_dims(steps < before[:, None], range(2, block.ndim))
    return jnp.where(is_pending, padded, from_block)
