"""Arguments and results of a round: everything on the device that changes between rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from fly_jax.decoding.deferral import OpenWindow
from fly_jax.decoding.depth import AcceptanceStats
from fly_jax.decoding.reports import Reports
from fly_jax.models.cache import KVCache
from fly_jax.shapes import RowFlags, RowInts, RowKeys, Text
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules import Rule, RuleState, Why
from fly_jax.verification.sampling import Sampling


def map_caches(
    function: Callable[..., Any], *trees: Any, rest: Callable[..., Any] = lambda one: one
) -> Any:
    """Maps each cache as a whole, and the other leaves by `rest`: by default they stay."""

    def mapped(*ones: Any) -> Any:
        return function(*ones) if isinstance(ones[0], KVCache) else rest(*ones)

    return jax.tree.map(mapped, *trees, is_leaf=lambda one: isinstance(one, KVCache))


def map_lengths(function: Callable[[RowInts], RowInts], tree: Any, **rest: Any) -> Any:
    """Maps the lengths of all caches; the other leaves as `map_caches`."""
    return map_caches(lambda one: one.with_length(function(one.length)), tree, **rest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The rows being decoded. All of it is donated to the next round."""

    tokens: Text  # prompt and settled tokens; what lies beyond `length` is stale
    length: RowInts  # provisional tokens included; the caches are valid up to `length - 1`
    limit: RowInts  # length at which a row is done
    finished: RowFlags  # the row has reached its limit or an end of text
    target: KVCache
    drafter: Any
    keys: RowKeys  # random state of each row, so that no row's draws depend on another
    rule: RuleState
    stats: AcceptanceStats | None = None  # None where neither K nor deferral depends on it
    window: OpenWindow | None = None  # what is provisional at the end of each row, if it ever is

    def attending(self, positions: int | None) -> DecodeState:
        """A copy in which attention reads so many positions of the caches; None for all."""
        return cast(DecodeState, map_caches(lambda one: one.attending(positions), self))

    def choosing(self, costs: Float32[Array, "5 depths"]) -> DecodeState:
        """A copy with the costs of a round, from which the next ones choose K."""
        assert self.stats is not None
        return dataclasses.replace(self, stats=dataclasses.replace(self.stats, costs=costs))

    def without_stats(self) -> DecodeState:
        """A copy with nothing known of what is accepted."""
        return dataclasses.replace(self, stats=jax.tree.map(jnp.zeros_like, self.stats))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuleInputs:
    """Numbers that the host may exchange between two rounds without compiling anew.

    Rows with a request are `seated`. A dispatch of several rounds ends with the first of them that
    is done, and one that begins after that runs no round, so that another request soon has its row;
    None where no row makes room for another.
    """

    rule: Rule  # its numbers are scalars or one per row
    sampling: Sampling | None  # likewise; None for greedy decoding
    protected: Bool[Array, "*rows vocab"]  # tokens that are never rescued, of all rows or of each
    memory: Int32[Array, "pairs 2"] | None = None  # `CorrectionMemory.keys`
    earlier: Int32[Array, " earlier"] | None = None  # `EarlierAnswers.tokens`
    ends: RowFlags | None = None  # rows that are done at an end of text; None for all
    seated: RowFlags | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundOutput:
    """The output of a dispatch: a few numbers per row and round leave the device.

    A round that did not run, since every row had finished, is all zeros; where a dispatch is a
    single one it always runs, and settles nothing in a finished row. A block has K + 1 tokens, and
    more with deferred windows, which settle what earlier rounds have left open. What a round is not
    asked for, or does not do, is None.
    """

    tokens: Int[Array, "rounds rows block"]  # settled ones, the first `count` of each row
    why: Int[Array, "rounds rows block"]  # int8 `Why` of each of them
    count: Int[Array, "rounds rows"]
    live: Bool[Array, "rounds rows"]  # rows that the round has decoded, settled or not
    num_drafted: Int[Array, "rounds rows"]  # draft tokens verified; 0 for a finished row
    num_accepted: Int[Array, "rounds rows"]  # draft tokens kept, rescued ones included
    num_rescued: Int[Array, "rounds rows"]
    num_draft_passes: Int[Array, " rounds"]  # of the first draft model
    finished: Bool[Array, "rounds rows"]
    reports: Reports | None = None  # of each token
    budget: Float32[Array, "rounds rows"] | None = None  # risk budget left after the round
    rolled_back: Bool[Array, "rounds rows"] | None = None  # a deferred window failed
    depth: Int[Array, " rounds"] | None = None  # draft tokens that were asked for, if K is chosen
    expected: Float32[Array, " rounds"] | None = None  # of them, of all live rows, by their rates
    draft_tokens: Int[Array, "rounds rows draft"] | None = None
    evidence: TargetEvidence | None = None  # what the rule decided on


def corrections(output: RoundOutput, which: Sequence[bool]) -> list[tuple[int, int]]:
    """The corrections of exact verification in some (greedy) rows, as draft and target tokens."""
    assert output.reports is not None
    count = np.where(which, output.count, 0)
    emitted = np.arange(output.why.shape[2]) < count[..., None]
    differs = emitted & np.isin(output.why, (Why.RESCUED, Why.CORRECTED))
    drafted, chosen = output.reports.draft[differs], output.reports.choice[differs]
    return list(zip(drafted.tolist(), chosen.tolist(), strict=True))
