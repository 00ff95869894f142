"""The records of rounds, drafts with the target's evidence, and their end under other rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import RequestState
from fly_jax.verification.evidence import TargetEvidence
from fly_jax.verification.rules import Rule, Why, accept


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of some prompts' continuations, on the host."""

    draft_tokens: Int[np.ndarray, "rounds draft"]
    evidence: TargetEvidence  # the target's, [rounds, K + 1]
    num_drafted: Int[np.ndarray, " rounds"]
    room: Int[np.ndarray, " rounds"]  # tokens that could settle before the limit, as `count` did
    prompt: Int[np.ndarray, " rounds"]  # its index, of `num_prompts` that were decoded
    why: Int[np.ndarray, "rounds block"]  # a `Why` for each token, the bonus token included
    count: Int[np.ndarray, " rounds"]
    num_prompts: int


@dataclasses.dataclass(frozen=True)
class Tally:
    """The settled tokens, target passes, rescues and their regret in nats, of each continuation."""

    tokens: Int[np.ndarray, " prompts"]
    rounds: Int[np.ndarray, " prompts"]
    rescues: Int[np.ndarray, " prompts"]
    regret: Float[np.ndarray, " prompts"]

    @property
    def mean_accepted_tokens(self) -> float:
        """The settled tokens per pass of the target."""
        return float(self.tokens.sum() / max(self.rounds.sum(), 1))


def record(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, bar: tqdm
) -> Rounds:
    """Decodes prompts by an engine with `reports_evidence`, and keeps every round."""
    parts: list[dict[str, Any]] = []
    numbers: dict[RequestState, int] = {}
    most = engine.max_length
    engine.listener = lambda output, who: parts.append(_of_dispatch(output, who, numbers, most))
    requests = engine.requests(prompts, max_new_tokens)
    if engine.costs is None:  # a chosen K would follow this machine's: then it is the largest
        engine.warm_up_for(requests)
    for index, request in enumerate(requests):
        numbers[engine.submit(request)] = index
    for _, settled in engine.run(()):
        bar.update(settled.finish_reason is not None)
    engine.listener = None
    engine.forget()  # another engine's caches may need the room
    rounds = jax.tree.map(lambda *some: np.concatenate(some), *parts)
    # In the order of prompts, whatever was decoded together.
    order = np.argsort(rounds["prompt"], kind="stable")
    rounds = jax.tree.map(lambda leaf: leaf[order], rounds)
    return Rounds(**rounds, num_prompts=len(prompts))


def _of_dispatch(
    output: RoundOutput, occupants: Sequence[RequestState | None],
    numbers: Mapping[RequestState, int], max_length: int,
) -> dict[str, Any]:  # fmt: skip
    """The fields of `Rounds` for one dispatch, by the prompts' numbers of its occupants."""
    fields = ("draft_tokens", "evidence", "num_drafted", "why", "count")
    found: dict[str, Any] = {name: getattr(output, name) for name in fields}
    awaited = [None if one is None or one.is_finished else one for one in occupants]
    left = np.array([
        min(len(one.request.prompt) + one.request.max_new_tokens, max_length)
        - one.generation.num_tokens if one else 0 for one in awaited
    ])  # fmt: skip
    prompt = np.array([-1 if one is None else numbers[one] for one in awaited])
    live = output.live & (prompt >= 0)
    found["room"] = left - (np.cumsum(found["count"], axis=0) - found["count"])
    found["prompt"] = np.broadcast_to(prompt, live.shape)
    return cast(dict[str, Any], jax.tree.map(lambda leaf: leaf[live], found))


def replay(
    rounds: Rounds, rule: Rule, protected: Bool[np.ndarray, " vocab"], eos_token_ids: Sequence[int]
) -> Rounds:
    """The rounds as another rule, without memory, budget and sampling, would have ended them.

    With the rule that they were decoded with they come out as they were. With another rule each
    round is true on its own, though decoding would have come to other places afterwards. They need
    the evidence that the rule needs.
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
    """Sums each prompt's rounds."""
    settled = np.arange(rounds.why.shape[1]) < rounds.count[:, None]
    rescued = settled & (rounds.why == Why.RESCUED)

    def by_prompt(values: np.ndarray) -> np.ndarray:
        return np.bincount(rounds.prompt, values, rounds.num_prompts).astype(values.dtype)

    return Tally(
        tokens=by_prompt(rounds.count), rounds=by_prompt(np.ones_like(rounds.count)),
        rescues=by_prompt(rescued.sum(axis=1)),
        regret=by_prompt(np.where(rescued, rounds.evidence.gap, 0).sum(axis=1)),
    )  # fmt: skip
