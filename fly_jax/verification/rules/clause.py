"""Clauses: what a rule's alternatives are made of."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.verification.data import Count, Switch, column, data_tree
from fly_jax.verification.rules.conditions import Condition, Seen, Window
from fly_jax.verification.rules.verdict import Why

# The `Why` of an alternative that a row does not have: any other comes further.
_NO_REASON = 0


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows' blocks, as far as they are the same for all clauses.

    Attributes:
      mismatch: drafted tokens that the lossless rule refuses.
      barred: tokens that nothing can rescue.
      affordable: within the risk budget; None without one.
      end: draft tokens of each row.
    """

    mismatch: Bool[Array, "rows draft"]
    barred: Bool[Array, "rows draft"]
    affordable: Bool[Array, "rows draft"] | None
    end: Int32[Array, " rows"]


@data_tree
@dataclasses.dataclass(frozen=True)
class Clause:
    """Conditions and windows, all of which must hold for a mismatch to be rescued.

    Attributes:
      conditions: in the order in which a refusal is looked for.
      windows: deferred windows.
      enabled: the rows that have this clause; None if all have.
    """

    conditions: tuple[Condition, ...]
    windows: tuple[Window, ...] = ()
    enabled: Switch | None = None

    def __and__(self, other: Clause) -> Clause:
        """All that either of two demands, in the rows that have both."""
        both = [one.enabled for one in (self, other) if one.enabled is not None]
        return Clause(
            self.conditions + other.conditions,
            self.windows + other.windows,
            functools.reduce(operator.and_, both) if both else None,
        )

    @property
    def window_size(self) -> Count:
        """That of the largest window, 0 without one; a Python number unless under `jit`."""
        sizes: list[Any] = [window.size for window in self.windows]
        if any(isinstance(size, Tracer) for size in sizes):
            return functools.reduce(jnp.maximum, sizes)
        largest: Any = np.int32(0)
        for size in sizes:
            largest = np.maximum(largest, size)
        return _plain(largest)

    def judge(
        self, seen: Seen, block: Block
    ) -> tuple[Bool[Array, "rows draft"], Int[Array, "rows draft"]]:
        """Whether it allows a rescue at each position, and the `Why` of a refusal."""
        holds = [condition.holds(seen) for condition in self.conditions]
        refusals = [condition.why.value for condition in self.conditions]
        if block.affordable is not None:
            holds.append(block.affordable)
            refusals.append(Why.REFUSED_BUDGET.value)
        for window in self.windows:
            holds.append(window.is_clean(block.mismatch))
            refusals.append(Why.REFUSED_WINDOW.value)
        refusal = jnp.full(block.mismatch.shape, Why.REFUSED_BOUNDARY.value)
        if holds:
            refusal = jnp.select([~held for held in holds], refusals, refusal)
        fits = [window.fits(block.mismatch.shape[1], block.end) for window in self.windows]
        allowed = functools.reduce(operator.and_, holds + fits, ~block.barred)
        if self.enabled is None:
            return allowed, refusal
        enabled = jnp.asarray(column(self.enabled))
        return allowed & enabled, jnp.where(enabled, refusal, _NO_REASON)


def strict_tail(clauses: tuple[Clause, ...]) -> Count:
    """The smallest window of the alternatives that a row has; 0 for a row without any."""
    pairs = [(clause.window_size, clause.enabled) for clause in clauses]
    is_traced = any(isinstance(number, Tracer) for pair in pairs for number in pair)
    array: Any = jnp if is_traced else np
    none = np.iinfo(np.int32).max
    least: Any = np.int32(none)
    for size, enabled in pairs:
        least = array.minimum(least, size if enabled is None else array.where(enabled, size, none))
    least = array.where(least == none, 0, least)
    return least if is_traced else _plain(least)


def _plain(number: Any) -> Count:
    """A Python number, or an array of one for each row."""
    return int(number) if number.ndim == 0 else number
