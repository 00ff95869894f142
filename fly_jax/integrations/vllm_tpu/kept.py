"""From the engine's flat drafts and logits to its output tokens: pure, and free of the engine."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from fly_jax.verification.rules import Rule, RuleState
from fly_jax.verification.sampling import Sampling
from fly_jax.verification.verify import verify_flat


class Requests(NamedTuple):
    """The engine's numbers of each request; None where every request is greedy.

    Attributes:
      temperature: 0 or less for a greedy request: the engine writes -1.
      top_k: 0 for all tokens.
      top_p: 1 for all tokens.
    """

    temperature: Float[Array, " requests"]
    top_k: Int[Array, " requests"]
    top_p: Float[Array, " requests"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What `keep` decides.

    Attributes:
      tokens: at the draft positions of all requests, one after the other, what is emitted there, -1
        for nothing; then, one for each request, the token that follows a draft kept whole, else -1.
      num_rescued: draft tokens of each request that the rule kept though the target refused them.
      budget: the risk budget that is left to each request; None for a rule without one.
    """

    tokens: Int32[Array, " emitted"]
    num_rescued: Int32[Array, " requests"]
    budget: Float32[Array, " requests"] | None


def keep(
    rule: Rule,
    draft_tokens: Int[Array, " tokens"],
    num_drafted: Int[Array, " requests"],
    target_logits: Float[Array, "tokens vocab"],
    bonus_tokens: Int[Array, " requests"],
    *,
    max_drafted: int,
    requests: Requests | None = None,
    draft_probs: Float[Array, "tokens vocab"] | None = None,
    key: Key[Array, ""] | None = None,
    protected: Bool[Array, " vocab"] | None = None,
    memory: Int32[Array, "pairs 2"] | None = None,
    budget: Float32[Array, " requests"] | None = None,
) -> Kept:
    """What a rule keeps of the drafts of a step.

    Args:
      rule: its numbers are scalars or one for each request.
      draft_tokens: of all requests, one after the other; the rest is padding.
      num_drafted: draft tokens of each request.
      target_logits: that predict the draft tokens, raw.
      bonus_tokens: what the engine has drawn to follow a draft that is kept whole.
      max_drafted: at least the largest of `num_drafted`; static.
      requests: how each is sampled; None if all are greedy.
      draft_probs: what the drafts were drawn with; None if they were not drawn.
      key: for the draws, with `requests`.
      protected: see `accept`.
      memory: see `accept`.
      budget: left to each request, for a rule with one.
    """
    sampling = None
    if requests is not None:
        sampling = Sampling(
            jnp.maximum(requests.temperature, 0), jnp.maximum(requests.top_k, 0), requests.top_p
        )
    state = RuleState(budget)
    found = verify_flat(
        rule,
        target_logits,
        draft_tokens,
        num_drafted,
        bonus_tokens,
        max_drafted=max_drafted,
        draft_probs=draft_probs,
        sampling=sampling,
        key=key if sampling is not None else None,
        protected=protected,
        memory=memory,
        state=state,
    )
    left = state.after(found.verdict, found.verdict.num_accepted)
    return Kept(found.tokens, found.verdict.num_rescued, left.budget)
