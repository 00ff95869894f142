"""Truncation sampling of the target, with the support that a loosened rule gives its positions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fly_jax.sharding.rules import Layout
from fly_jax.verification.evidence import TargetEvidence, evidence
from fly_jax.verification.rules.conditions import Seen
from fly_jax.verification.rules.rule import Rule, barred_tokens


def truncated(
    rule: Rule,
    logits: Float[Array, "rows positions vocab"],
    *,
    protected: Bool[Array, "*rows vocab"] | None = None,
    layout: Layout | None = None,
) -> Float[Array, "rows positions vocab"]:
    """The logits, with -inf for every token outside the rule's support, so that any draw obeys it.

    The support is the target's most probable token and every token that `accept` would rescue if it
    were drafted there: it meets all conditions of one of the rule's clauses and is not barred.
    Deferred windows judge what follows, and are left out.

    Args:
      rule: greedy, without memory and budget, its numbers scalars.
      protected: see `accept`.
      layout: see `evidence`.
    """
    rows, positions, vocab = logits.shape
    nothing = jnp.zeros((rows, positions - 1), jnp.int32)
    needs, none = rule.needs, jnp.zeros(rows, jnp.int32)
    found = evidence(logits, nothing, needs=needs, num_drafted=none, layout=layout)
    # Each position becomes a row, in which every token of the vocabulary is drafted.
    flat, shape = logits.reshape(-1, vocab), (rows * positions, vocab)
    seen: TargetEvidence = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf.reshape(-1, 1), shape), found
    )
    raw = flat.astype(jnp.float32)
    seen = dataclasses.replace(seen, draft_logit=raw, draft_log_prob=raw - seen.log_sum_exp)
    tokens = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), shape)
    if protected is not None and protected.ndim == 2:
        protected = jnp.repeat(protected, positions, axis=0)
    barred, kept = barred_tokens(seen, tokens, protected), tokens == seen.argmax
    for clause in rule.clauses():
        alone = dataclasses.replace(clause, windows=())
        ends = jnp.full(len(flat), vocab, jnp.int32)
        kept |= alone.judge(Seen(seen, tokens, None), ~kept, barred, None, ends)[0]
    return jnp.where(kept, flat, -jnp.inf).reshape(logits.shape)
