"""The protocol between a round and its drafter."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from fly_jax.shapes import Hidden, Index, Logits, RowFlags, RowInts, RowKeys, Text, Tokens
from fly_jax.sharding.rules import Layout
from fly_jax.verification.rules import Verdict
from fly_jax.verification.sampling import Sampling, sample_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """The proposal of a drafter.

    Attributes:
      logits: [rows, K, vocab], which the tokens were drawn from; None where they were not drawn.
      num_drafted: [rows], tokens of each row, the rest of the K being of no meaning.
      num_passes: [models], passes of each draft model that it took, the first drafter's own first;
        [0] from a drafter without models.
      rates: [rows, K], the share of such tokens that is kept where all before them are, which may
        not depend on what was drawn; None from a drafter that cannot tell.
    """

    tokens: Int[Array, "rows draft"]
    logits: Float[Array, "rows draft vocab"] | None
    num_drafted: RowInts
    num_passes: Int[Array, " models"]
    rates: Float32[Array, "rows draft"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Terms:
    """The tokens wanted of a draft, and how they are drawn.

    Attributes:
      wanted: tokens wanted of each row, at most K; None for K of every row.
      sampling: how they are drawn; None where they are not.
      keys: of each row, for the draws: the token at position p of a row is drawn with the noise of
        `fold_in(key, p)`, so that drafters that agree draw the same token.
      earlier: tokens of earlier answers, the last ones at the end and -1 where there are none yet;
        None where none are kept.
      least_rate: where K is chosen behind the draft, which ends where no token would be reached
        that often; None elsewhere.
    """

    wanted: RowInts | None = None
    sampling: Sampling | None = None
    keys: RowKeys | None = None
    earlier: Int[Array, " earlier"] | None = None
    least_rate: Float32[Array, ""] | None = None

    def of_each(self, length: RowInts, num_speculative_tokens: int) -> RowInts:
        """Tokens wanted of each row, in a draft of K."""
        return jnp.full_like(length, num_speculative_tokens) if self.wanted is None else self.wanted

    def most(self, num_speculative_tokens: int) -> int | Index:
        """Tokens wanted of any row: K as a number that the compiler knows, where it is K of all."""
        return num_speculative_tokens if self.wanted is None else jnp.max(self.wanted)

    def choose(self, logits: Logits, positions: Tokens, layout: Layout | None) -> Tokens:
        """The tokens of these positions: the most probable ones, or drawn by `sample_at`."""
        return sample_at(logits, self.sampling, self.keys, positions, layout)


def top_probability(logits: Logits) -> Float32[Array, "rows positions"]:
    """The probability of each position's most probable token."""
    logits = logits.astype(jnp.float32)
    best = jnp.max(logits, axis=-1, keepdims=True)
    return 1 / jnp.sum(jnp.exp(logits - best), axis=-1)


PLAIN = Terms()  # K of every row, nothing drawn


class Drafter(abc.ABC):
    """The interface of drafters: they propose draft tokens to the target, or to a model above.

    A drafter is a pytree: its arrays, such as a model's parameters, are leaves, and all else is
    static. What it carries from round to round is its state, a pytree of arrays that `init` makes.
    Every method is pure and runs under `jit`; no state may be returned from a branch
    (`lax.cond`, `lax.switch`), since the compiler would copy its caches.

    Attributes:
      num_speculative_tokens: tokens that it proposes at a time where a draft model asks it.
      num_models: draft models that it runs, those below it included.
      num_earlier_tokens: of earlier answers in which it, or one below, looks (`Terms.earlier`).
      most_tokens: the longest draft that it can make; None for K.
      may_fall_short: it may propose fewer tokens than it was asked for.
      rests: its state may lack any part of the text's end, which `propose` then takes in, and, but
        for what `needs_hidden`, any part of a prompt.
      adapts: a row that wants fewer tokens may save a pass.
      rates_drafts: it gives `Draft.rates` where `Terms.least_rate` is given: K is chosen behind it,
        if it draws nothing.
      resumes: `prefill` may begin behind tokens that it took in or proposed, in the same state.
      unseen: tokens at the end of a text, as a round leaves it, that the state does not hold yet.
      needs_hidden: `prefill`, `observe` and `keep` are given hidden states of the model that it
        proposes to: the target, or a draft model above it.
      hidden_layers: layers of that model; the methods get their inputs, side by side, in place of
        the final hidden states.
      of_proposing: fields of a dataclass, with defaults, that neither `init` nor `prefill` reads.
    """

    num_speculative_tokens: int
    num_models: int = 0
    num_earlier_tokens: int = 0
    most_tokens: int | None = None
    may_fall_short: bool = False
    rests: bool = False
    adapts: bool = False
    rates_drafts: bool = False
    resumes: bool = False
    # A draft model has not seen the last one, nor the one before it where all its draft was kept.
    unseen: int = 2
    needs_hidden: bool = False
    hidden_layers: tuple[int, ...] = ()
    of_proposing: ClassVar[tuple[str, ...]] = ()

    def at_rest(self) -> Self:
        """A copy with defaults for `of_proposing`, to share the programs that do not propose."""
        if not self.of_proposing:
            return self
        fields = dataclasses.fields(cast(Any, self))
        usual = {one.name: one.default for one in fields if one.name in self.of_proposing}
        return cast(Self, dataclasses.replace(cast(Any, self), **usual))

    def init(self, rows: int, capacity: int, dtype: jnp.dtype) -> Any:
        """The state of rows of which nothing has been seen."""
        return ()

    def prefill(self, state: Any, tokens: Tokens, start: Index, hidden: Hidden | None) -> Any:
        """Takes in a piece of the prompts, which begins at position `start` of every row."""
        return state

    @abc.abstractmethod
    def propose(
        self, state: Any, text: Text, length: RowInts, num_speculative_tokens: int,
        terms: Terms = PLAIN,
    ) -> tuple[Draft, Any]:  # fmt: skip
        """Proposes tokens after each row's text.

        Args:
          state: from `init`, `prefill`, `propose` or `observe`; the rows' text may have changed
            since from `length - 1` on.
          text: the rows' tokens, with room for `room(num_speculative_tokens)` more.
          length: tokens of each row, at least 1.
        """

    def observe(
        self, state: Any, verdict: Verdict, hidden: Hidden | None, *, draft: Draft, live: RowFlags
    ) -> Any:
        """Learns the fate of the draft.

        Args:
          hidden: the target's hidden states of the block, each row's last token and its draft
            tokens; None unless `needs_hidden`.
          live: rows that were not finished before.
        """
        return state

    def passes_behind(self, state: Any, length: RowInts, live: RowFlags) -> Index:
        """Passes in which `propose` would first take in what the state lacks of the live rows."""
        return jnp.int32(0)

    def keep(self, state: Any, start: RowInts, hidden: Hidden | None) -> Any:
        """Takes in hidden states of a pass of the draft model above, from each row's start on."""
        return state

    def room(self, num_speculative_tokens: int) -> int:
        """Positions beyond a row's length that proposing and verifying K tokens may write to."""
        return num_speculative_tokens + 1
