"""The call that engines make: the verdict on draft tokens, given the target's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from fly_jax.errors import FlyJaxError
from fly_jax.sharding.rules import Layout
from fly_jax.verification.data import taken
from fly_jax.verification.evidence import ABSENT, EvidenceInputs, TargetEvidence, evidence, reduced
from fly_jax.verification.rules.conditions import RuleState, Seen, Verdict
from fly_jax.verification.rules.rule import Loose, Rule, accept, barred_tokens
from fly_jax.verification.sampling import Sampling, block_noise, keys_of_rows, uniform_noise


def verify(
    rule: Rule,
    logits: Float[Array, "rows positions vocab"],
    draft_tokens: Int[Array, "rows draft"],
    *,
    num_drafted: Int[Array, " rows"] | None = None,
    draft_logits: Float[Array, "rows draft vocab"] | None = None,
    sampling: Sampling | None = None,
    key: Key[Array, "*#rows"] | None = None,
    protected: Bool[Array, "... vocab"] | None = None,
    memory: Int32[Array, "pairs 2"] | None = None,
    state: RuleState | None = None,
    layout: Layout | None = None,
) -> Verdict:
    """Decides which draft tokens of each row are kept, and what follows them. Pure; jit it.

    Under `jit` the rule and the sampling are ordinary arguments: their numbers are data, each a
    scalar or one for each row, and other numbers are no other program. Only `layout` is static.
    `Exact()` is lossless, and `per_row` unites several rules. It is `evidence` and then `accept`;
    see these for the other arguments, and for what is a FlyJaxError.
    """
    logits = truncated(rule.support, logits, protected=protected, layout=layout)
    seen = evidence(
        logits, draft_tokens, needs=rule.needs, sampling=sampling, draft_logits=draft_logits,
        key=key, num_drafted=num_drafted, layout=layout,
    )  # fmt: skip
    return accept(
        rule, seen, draft_tokens,
        protected=protected, num_drafted=num_drafted, memory=memory, state=state,
    )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatVerdict:
    """The decision of `verify_flat`.

    Attributes:
      tokens: what is emitted, -1 elsewhere. The positions of draft tokens, one request after
        another, have the tokens kept, and the target's in place of the first that is not. The bonus
        token of a block that was kept whole stands at the request's bonus position: with
        `bonus_tokens` these come last, one for each request; without, after its draft.
      verdict: the same, one row for each request.
    """

    tokens: Int32[Array, " emitted"]
    verdict: Verdict


def verify_flat(
    rule: Rule,
    logits: Float[Array, "tokens vocab"],
    draft_tokens: Int[Array, " tokens"],
    num_drafted: Int[Array, " requests"],
    bonus_tokens: Int[Array, " requests"] | None = None,
    *,
    max_drafted: int,
    draft_logits: Float[Array, "tokens vocab"] | None = None,
    draft_probs: Float[Array, "tokens vocab"] | None = None,
    sampling: Sampling | None = None,
    key: Key[Array, "*#requests"] | None = None,
    protected: Bool[Array, " vocab"] | None = None,
    memory: Int32[Array, "pairs 2"] | None = None,
    state: RuleState | None = None,
    layout: Layout | None = None,
) -> FlatVerdict:
    """Verifies in the flat layout of vLLM: the tokens of all requests, one request after another.

    With the same keys it decides and draws as `verify` does. The logits are reduced where they are;
    only the few numbers of each position are then put into rows. Positions beyond the requests'
    tokens are padding. The other arguments are those of `verify`, with one number or key for each
    request where that has one for each row; "rows" of the layout are flat positions.

    Args:
      logits: the target's raw logits, at the draft positions (those that predict draft tokens), of
        which there must be one at least; pad where there is none.
        Without `bonus_tokens` each request has one more, after its last draft token.
      draft_tokens: at the same positions; the one after a request's last is not read.
      bonus_tokens: what follows a block that was kept whole, as the engine has drawn it; None if
        the logits have its positions.
      max_drafted: at least the largest of `num_drafted`; static.
      draft_logits: those that the draft was drawn from, at the same positions.
      draft_probs: instead of `draft_logits`, the probabilities that the draft was drawn with.
    """
    num_tokens, vocab_size = logits.shape
    num_requests = num_drafted.shape[0]
    if draft_tokens.shape != (num_tokens,):
        raise FlyJaxError(
            f"The target's logits have shape {logits.shape} for draft tokens of shape "
            f"{draft_tokens.shape}; pass one row of logits for each of them."
        )
    # 1) The request of each flat position, and its place there.
    starts, request, place = flat_places(num_drafted + (bonus_tokens is None), num_tokens)
    is_draft = place < num_drafted[request]
    # 2) The evidence, as of rows of one position each.
    draft = jnp.where(is_draft, draft_tokens.astype(jnp.int32), ABSENT)
    cut = truncated(rule.support, logits[:, None], protected=protected, layout=layout)
    inputs = EvidenceInputs(cut, draft[:, None])
    if sampling is not None:
        keys = keys_of_rows(key, num_requests)
        inputs = inputs._replace(
            sampling=jax.tree.map(lambda leaf: leaf[request], sampling.of_rows(num_requests)),
            draft_logits=None if draft_logits is None else draft_logits[:, None],
            draft_probs=None if draft_probs is None else draft_probs[:, None],
            uniform=uniform_noise(keys[request], place[:, None]),
            gumbel=block_noise(keys, vocab_size)[request],
        )
    seen = reduced(inputs, rule.needs, layout)
    # 3) The few numbers of each position, in rows.
    steps = jnp.arange(max_drafted + 1)
    index = jnp.minimum(starts[:-1, None] + steps, num_tokens - 1)
    rows: TargetEvidence = jax.tree.map(lambda leaf: leaf[index, 0], seen)
    is_absent = steps >= num_drafted[:, None]
    rows = dataclasses.replace(rows, accepted=rows.accepted & ~is_absent)
    if bonus_tokens is not None:
        replacement = jnp.where(is_absent, bonus_tokens[:, None], rows.replacement)
        rows = dataclasses.replace(rows, replacement=replacement.astype(jnp.int32))
    drafted = jnp.where(is_absent, ABSENT, draft[index])[:, :max_drafted]
    verdict = accept(
        rule, rows, drafted,
        protected=protected, num_drafted=num_drafted, memory=memory, state=state,
    )  # fmt: skip
    # 4) The emitted tokens, where the engine looks for them.
    kept, following = verdict.num_accepted[request], verdict.next_token[request]
    tokens = jnp.select([place < kept, place == kept], [draft, following], -1)
    tokens = jnp.where(jnp.arange(num_tokens) < starts[-1], tokens, -1)
    if bonus_tokens is not None:
        tokens = jnp.where(is_draft, tokens, -1)
        is_whole = verdict.num_accepted == num_drafted
        tokens = jnp.concatenate([tokens, jnp.where(is_whole, verdict.next_token, -1)])
    return FlatVerdict(tokens.astype(jnp.int32), verdict)


def flat_places(
    counts: Int[Array, " requests"], size: int
) -> tuple[Int32[Array, " requests+1"], Int[Array, " size"], Int[Array, " size"]]:
    """The begins of `counts` tokens of each request, and the request and place of each token."""
    starts = jnp.pad(jnp.cumsum(counts), (1, 0)).astype(jnp.int32)
    flat = jnp.arange(size, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(starts[1:], flat, side="right"), len(counts) - 1)
    return starts, request, flat - starts[request]


def truncated(
    support: Loose | None, logits: Float[Array, "rows positions vocab"], *,
    protected: Bool[Array, "*rows vocab"] | None = None, layout: Layout | None = None,
) -> Float[Array, "rows positions vocab"]:  # fmt: skip
    """The logits, with -inf for every token outside a rule's support: drawing obeys the rule.

    The support is the target's most probable token, and each that `accept` would rescue if it were
    drafted there and nothing else were looked at: it meets all conditions of one of the rule's
    clauses and is not barred. Deferred windows judge what follows, and are left out.

    Args:
      support: a rule without memory and budget, its numbers scalars; None returns the logits.
      protected: tokens that are never rescued, as in `accept`.
      layout: over which the logits are split; None on one device.
    """
    if support is None:
        return logits
    rows, positions, vocab = logits.shape
    nothing = jnp.zeros((rows, positions - 1), jnp.int32)
    needs, none = support.needs, jnp.zeros(rows, jnp.int32)
    found = evidence(logits, nothing, needs=needs, num_drafted=none, layout=layout)
    # Each position becomes a row, in which every token of the vocabulary is drafted.
    flat, shape = logits.reshape(-1, vocab), (rows * positions, vocab)
    seen: TargetEvidence = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf.reshape(-1, 1), shape), found
    )
    raw = flat.astype(jnp.float32)
    seen = dataclasses.replace(seen, draft_logit=raw, draft_log_prob=raw - seen.log_sum_exp)
    tokens = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), shape)
    barred, kept = barred_tokens(seen, tokens, None), tokens == seen.argmax
    if protected is not None:  # each token, and all where the most probable one is
        own = jnp.repeat(jnp.broadcast_to(protected, (rows, vocab)), positions, axis=0)
        barred |= own | taken(own, found.argmax.reshape(-1, 1))
    for clause in support.clauses():
        alone = dataclasses.replace(clause, windows=())
        ends = jnp.full(len(flat), vocab, jnp.int32)
        kept |= alone.judge(Seen(seen, tokens, None), ~kept, barred, None, ends)[0]
    return jnp.where(kept, flat, -jnp.inf).reshape(logits.shape)
