"""What was drafted and what the target said to it, round by round, and what rules make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.state import RoundOutput
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules import Rule, Why, accept


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of some prompts' continuations, on the host.

    Attributes:
      draft_tokens: what was drafted.
      evidence: of [rounds, K + 1], what the target said.
      num_drafted: draft tokens that the target saw.
      room: tokens that could settle before the prompt's limit.
      prompt: index of the prompt.
      why: a `Why` for each token of the block, the bonus token included.
      count: tokens that settled.
      num_prompts: that were decoded.
    """

    draft_tokens: Int[np.ndarray, "rounds draft"]
    evidence: TargetEvidence
    num_drafted: Int[np.ndarray, " rounds"]
    room: Int[np.ndarray, " rounds"]
    prompt: Int[np.ndarray, " rounds"]
    why: Int[np.ndarray, "rounds block"]
    count: Int[np.ndarray, " rounds"]
    num_prompts: int

    @property
    def gap(self) -> Float[np.ndarray, "rounds block"]:
        """By how much the target finds its own choice more probable than the draft's, in nats."""
        return np.asarray(self.evidence.argmax_logit - self.evidence.draft_logit)

    @property
    def is_mismatch(self) -> Bool[np.ndarray, "rounds block"]:
        """Draft tokens that the lossless rule refuses."""
        drafted = np.arange(self.why.shape[1]) < self.num_drafted[:, None]
        return drafted & ~np.asarray(self.evidence.accepted)


@dataclasses.dataclass(frozen=True)
class Tally:
    """What each prompt's continuation took and risked.

    Attributes:
      tokens: that settled.
      rounds: passes of the target.
      rescues: mismatches that were kept.
      regret: of all rescues together, in nats.
    """

    tokens: Int[np.ndarray, " prompts"]
    rounds: Int[np.ndarray, " prompts"]
    rescues: Int[np.ndarray, " prompts"]
    regret: Float[np.ndarray, " prompts"]

    @property
    def mean_accepted_tokens(self) -> float:
        """Settled tokens per pass of the target."""
        return float(self.tokens.sum() / max(self.rounds.sum(), 1))


def record(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, bar: tqdm
) -> Rounds:
    """Decodes prompts and keeps every round.

    Args:
      decoder: of a spec with `reports_evidence`.
      prompts: token ids.
      max_new_tokens: limit of each continuation.
      bar: is moved on by one for each prompt.
    """
    parts: list[dict[str, Any]] = []
    for batch in decoder.batches(prompts):
        some = [prompts[index] for index in batch]
        heard: list[RoundOutput] = []
        decoder.listener = heard.append
        decoder.decode(some, max_new_tokens, seed=0)
        left = [min(max_new_tokens, decoder.max_context - len(prompt)) for prompt in some]
        parts.append(_of_batch(heard, np.array(batch), np.array(left)))
        bar.update(len(batch))
    decoder.listener = None
    return Rounds(**_joined(parts), num_prompts=len(prompts))


def _of_batch(
    heard: Sequence[RoundOutput],
    batch: Int[np.ndarray, " rows"],
    left: Int[np.ndarray, " rows"],
) -> dict[str, Any]:
    """The fields of `Rounds` for one batch.

    Args:
      heard: its dispatches.
      batch: index of each row's prompt.
      left: tokens that each prompt may become longer by.
    """
    rows = len(left)
    fields = ("draft_tokens", "evidence", "num_drafted", "why", "count")
    found = _joined([{name: getattr(output, name) for name in fields} for output in heard])
    settled = found["count"][:, :rows]
    live = (found["num_drafted"][:, :rows] > 0) | (settled > 0)
    found["room"] = left - (np.cumsum(settled, axis=0) - settled)
    found["prompt"] = np.broadcast_to(batch, live.shape)
    return cast(dict[str, Any], jax.tree.map(lambda leaf: leaf[:, :rows][live], found))


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return cast(dict[str, Any], jax.tree.map(lambda *some: np.concatenate(some), *parts))


def replay(
    rounds: Rounds,
    rule: Rule,
    *,
    protected: Bool[np.ndarray, " vocab"],
    eos_token_ids: Sequence[int],
) -> Rounds:
    """The same rounds as another rule would have ended them.

    With the rule that they were decoded with they come out as they were. With another one each is
    what would have happened there, though decoding would have come to other places afterwards.

    Args:
      rounds: with the evidence that the rule needs.
      rule: without memory, budget and sampling.
      protected: see `accept`.
      eos_token_ids: tokens that end a text.
    """
    given = rounds.evidence, rounds.draft_tokens, protected, rounds.num_drafted
    evidence, draft_tokens, barred, num_drafted = jax.tree.map(jnp.asarray, given)
    found = accept(rule, evidence, draft_tokens, protected=barred, num_drafted=num_drafted)
    kept = np.asarray(found.num_accepted)
    why = np.column_stack((found.why, np.zeros(len(kept), np.int8)))
    tokens = np.column_stack((rounds.draft_tokens, np.zeros(len(kept), np.int32)))
    at = np.arange(len(kept)), kept
    why[at], tokens[at] = found.next_why, found.next_token
    ends = np.isin(tokens, eos_token_ids) & (np.arange(tokens.shape[1]) <= kept[:, None])
    until_end = np.where(ends.any(axis=1), ends.argmax(axis=1), tokens.shape[1]) + 1
    count = np.minimum(np.minimum(kept + 1, until_end), rounds.room)
    return dataclasses.replace(rounds, why=why, count=count)


def tally(rounds: Rounds) -> Tally:
    """Sums over each prompt's rounds."""
    settled = np.arange(rounds.why.shape[1]) < rounds.count[:, None]
    rescued = settled & (rounds.why == Why.RESCUED)

    def by_prompt(values: np.ndarray) -> np.ndarray:
        sums = np.bincount(rounds.prompt, values, rounds.num_prompts)
        return sums.astype(values.dtype)

    return Tally(
        tokens=by_prompt(rounds.count),
        rounds=by_prompt(np.ones_like(rounds.count)),
        rescues=by_prompt(rescued.sum(axis=1)),
        regret=by_prompt(np.where(rescued, rounds.gap, 0).sum(axis=1)),
    )
