"""Evidence: what the target's logits say about the draft, in a few numbers per position.

Acceptance rules never see a vocabulary-sized array. On a mesh every device reduces its own shard of
the vocabulary, and only these numbers travel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from fly_jax.errors import FlyJaxError
from fly_jax.sharding.rules import Layout
from fly_jax.verification import reductions
from fly_jax.verification.reductions import AxisNames, Found, Local, finite_or_zero
from fly_jax.verification.sampling import (
    Sampling,
    block_noise,
    is_greedy,
    keys_of_rows,
    processed_log_probs,
    uniform_noise,
)

# Stands for a draft token at the positions where nothing was drafted.
ABSENT = -1

EntropyMeasure = Literal["top_k", "full", "normalized"]


@dataclasses.dataclass(frozen=True)
class Entropy:
    """The entropy of the target's untempered softmax to measure; hashable, static under `jit`.

    Attributes:
      measure: "top_k": -sum p ln p over the `top_k` most probable tokens, with their
        probabilities in the full softmax (not renormalised), in nats: the gate of FLy's
        reference code and of vLLM. "full": over the whole vocabulary, in nats. "normalized":
        "full" divided by ln(vocabulary size), between 0 and 1: the paper's formula.
      top_k: tokens that "top_k" looks at.
    """

    measure: EntropyMeasure = "top_k"
    top_k: int = 3

    def __post_init__(self) -> None:
        if self.measure not in get_args(EntropyMeasure):
            raise FlyJaxError(
                f"The entropy measure is {self.measure!r}; "
                "choose one of 'top_k', 'full' and 'normalized'."
            )
        if self.top_k < 1:
            raise FlyJaxError(
                f"The entropy's top_k is {self.top_k}; it must be at least 1: 3 is usual."
            )

    @property
    def name(self) -> str:
        """The measure in one word: "top_3", "full" or "normalized"."""
        return f"top_{self.top_k}" if self.measure == "top_k" else self.measure


@dataclasses.dataclass(frozen=True)
class Needs:
    """The numbers that evidence carries besides what every rule reads; static under `jit`.

    Others are not computed. `a | b` asks for what either asks for; FlyJaxError for two entropies.

    Attributes:
      full_entropy: the entropy over the whole vocabulary, in nats, besides any other.
      top: so many of the most probable tokens, with their log-probabilities.
    """

    entropy: Entropy | None = None
    full_entropy: bool = False
    top: int = 0

    def __or__(self, other: Needs) -> Needs:
        if None not in (self.entropy, other.entropy) and self.entropy != other.entropy:
            raise FlyJaxError(
                "Two rules with different entropies were combined; give both the same entropy and "
                "entropy_top_k."
            )
        entropy, full = self.entropy or other.entropy, self.full_entropy or other.full_entropy
        return Needs(entropy, full, max(self.top, other.top))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopTokens:
    """The target's most probable tokens at each position, in its plain or cut softmax, in nats."""

    ids: Int32[Array, "*rows positions count"]  # the most probable first; of equals the lowest
    log_probs: Float32[Array, "*rows positions count"]
    replacement_log_prob: Float32[Array, "*rows positions"]  # whether it is among them or not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetEvidence:
    """The evidence on the draft: one number per row and position; K draft tokens make K + 1.

    The last position follows the last draft token. It, and every position at or after a row's
    `num_drafted`, has no draft token: `draft_logit` and `draft_log_prob` are -inf and `accepted` is
    False there. What was not asked for in `Needs` is None.

    Attributes:
      argmax: the target's most probable token; of equal ones the lowest id.
      argmax_logit, draft_logit: the raw logits of that token and of the draft token.
      log_sum_exp: of the raw logits, over the whole vocabulary.
      draft_log_prob: log-probability, in nats, of the draft token in the distribution that is
        decoded from: the processed one when sampling, otherwise the plain softmax.
      accepted: the lossless rule takes this draft token, considered on its own.
      replacement: the token that follows if the block ends here. Greedy: the argmax. Sampled: a
        draw from the residual, or from the target where there is no draft token (the bonus token).
      entropy: by the measure asked for, of the raw logits.
      scaled_uniform: when sampling, u q(x): the lossless rule took the draft token iff its
        probability is above this; -1 in rows that are decoded greedily, None where all are.
    """

    argmax: Int32[Array, "rows positions"]
    argmax_logit: Float32[Array, "rows positions"]
    draft_logit: Float32[Array, "rows positions"]
    log_sum_exp: Float32[Array, "rows positions"]
    draft_log_prob: Float32[Array, "rows positions"]
    accepted: Bool[Array, "rows positions"]
    replacement: Int32[Array, "rows positions"]
    entropy: Float32[Array, "rows positions"] | None = None
    full_entropy: Float32[Array, "rows positions"] | None = None
    scaled_uniform: Float32[Array, "rows positions"] | None = None
    top: TopTokens | None = None

    @property
    def gap(self) -> Float32[Array, "rows positions"]:
        """The distance of the draft token's logit below the largest, in nats."""
        return self.argmax_logit - self.draft_logit

    @property
    def log_prob(self) -> Float32[Array, "rows positions"]:
        """The draft token's log-probability in the target's plain softmax, in nats."""
        return self.draft_logit - self.log_sum_exp


def evidence(
    logits: Float[Array, "rows positions vocab"],
    draft_tokens: Int[Array, "rows draft"],
    *,
    needs: Needs | None = None,
    sampling: Sampling | None = None,
    draft_logits: Float[Array, "rows draft vocab"] | None = None,
    key: Key[Array, "*#rows"] | None = None,
    num_drafted: Int[Array, " rows"] | None = None,
    layout: Layout | None = None,
) -> TargetEvidence:
    """Reduces the target's logits to what acceptance needs. Pure; call it under `jit`.

    When sampling, a draft token x is accepted with probability min(1, p(x) / q(x)), and otherwise
    replaced by a draw from norm(max(0, p - q)), so that what is emitted has exactly the target's
    distribution p (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). p and q are
    processed by the same `sampling`. The entropy always comes from raw, untempered logits.
    FlyJaxError for shapes that do not fit together, or a `sampling` without a key.

    Args:
      logits: the target's raw logits; positions = draft + 1.
      needs: `rule.needs`: what the evidence must carry; None for nothing but what is always there.
      sampling: None to verify greedily; a row of temperature 0 is verified greedily too.
      draft_logits: the raw logits from which the draft was sampled with this very `sampling`. None
        if it was not sampled (greedy or looked up): q is then 1 at the draft token.
      key: a PRNG key, needed with `sampling`: one for each row, or one of which each row makes its
        own by its index. A row's draws depend on its key and nothing else: each round needs a
        new one.
      num_drafted: draft tokens of each row, at most `draft`; None if every row has all.
      layout: where the logits are sharded: its mesh, and its mapping of the logical axes "rows"
        and "vocab"; None on one device. Numbers are the same but for the rounding of
        sums in another order, and draws use the same noise.
    """
    rows, num_draft = draft_tokens.shape
    if logits.shape[:2] != (rows, num_draft + 1):
        raise FlyJaxError(
            f"The target's logits have shape {logits.shape} for {num_draft} draft tokens in each "
            f"of {rows} rows; they need shape ({rows}, {num_draft + 1}, vocabulary): pass the "
            "logits after the last accepted token and after every draft token."
        )
    if draft_logits is not None and draft_logits.shape != (rows, num_draft, logits.shape[2]):
        raise FlyJaxError(
            f"The draft's logits have shape {draft_logits.shape}; they need shape "
            f"{(rows, num_draft, logits.shape[2])}: draft with the target's vocabulary."
        )
    draft = jnp.pad(draft_tokens.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=ABSENT)
    if num_drafted is not None:
        draft = jnp.where(jnp.arange(num_draft + 1) < num_drafted[:, None], draft, ABSENT)
    inputs = EvidenceInputs(logits, draft)
    if sampling is not None:
        if draft_logits is not None:
            draft_logits = jnp.pad(draft_logits, ((0, 0), (0, 1), (0, 0)))
        positions = jnp.broadcast_to(jnp.arange(num_draft + 1), draft.shape)
        keys = keys_of_rows(key, rows)
        noise = uniform_noise(keys, positions), block_noise(keys, logits.shape[2])
        inputs = EvidenceInputs(logits, draft, sampling.of_rows(rows), draft_logits, None, *noise)
    return reduced(inputs, needs, layout)


class EvidenceInputs(NamedTuple):
    """The inputs of `reduced`; on a mesh, one device's rows and its shard of the vocabulary."""

    logits: Float[Array, "rows positions local"]
    draft: Int32[Array, "rows positions"]  # the tokens, `ABSENT` where nothing was drafted
    sampling: Sampling | None = None  # with numbers for each row; None for greedy rows alone
    # What the draft was sampled from; or the same as probabilities, already processed.
    draft_logits: Float[Array, "rows positions local"] | None = None
    draft_probs: Float[Array, "rows positions local"] | None = None
    # Noise that decides whether a draft token is accepted, and which token follows.
    uniform: Float32[Array, "rows positions"] | None = None
    gumbel: Float32[Array, "rows 1 local"] | None = None


def reduced(inputs: EvidenceInputs, needs: Needs | None, layout: Layout | None) -> TargetEvidence:
    """The evidence; on a mesh every device reduces its own shard, and the result is whole."""
    needs, vocab_size = Needs() if needs is None else needs, inputs.logits.shape[2]
    reduce = functools.partial(_reduce, needs=needs, vocab_size=vocab_size)
    if layout is None:
        return reduce(inputs, axis_names=())
    split, axis_names = reductions.vocab_split(layout, inputs.logits.shape)
    whole = PartitionSpec(split[0])
    if inputs.gumbel is not None:
        # Each device generates its own shard of the noise, the same numbers on every mesh.
        sharding = NamedSharding(layout.mesh, split)
        gumbel = jax.lax.with_sharding_constraint(inputs.gumbel, sharding)
        inputs = inputs._replace(gumbel=gumbel)
    specs: tuple[object, ...] = (split, whole, whole, split, split, whole, split)
    return jax.shard_map(
        functools.partial(reduce, axis_names=axis_names),
        mesh=layout.mesh,
        in_specs=(EvidenceInputs._make(specs),),
        out_specs=whole,
        check_vma=False,  # it cannot see that a merge of gathered numbers is the same everywhere
    )(inputs)


def _reduce(
    inputs: EvidenceInputs, *, needs: Needs, vocab_size: int, axis_names: AxisNames
) -> TargetEvidence:
    """The evidence from this device's shard of the vocabulary and a few numbers of the others'."""
    # Comparing and picking read the raw logits: to widen them first would copy them.
    raw, logits = inputs.logits, inputs.logits.astype(jnp.float32)
    argmax = reductions.vocab_argmax(raw, axis_names)
    argmax_logit = reductions.vocab_max(raw, axis_names).astype(jnp.float32)
    # Log-probabilities are differences from the largest logit, which keeps their low digits.
    largest = finite_or_zero(argmax_logit)
    centred = logits - largest[..., None]
    log_mass = jnp.log(reductions.vocab_sum(jnp.exp(centred), axis_names))
    draft_logit = reductions.vocab_pick(raw, inputs.draft, -jnp.inf, axis_names).astype(jnp.float32)
    entropy = full_entropy = top = None
    if needs.entropy is not None:
        entropy = _entropy(centred, log_mass, needs.entropy, vocab_size, axis_names)
    if needs.full_entropy:
        full_entropy = _entropy(centred, log_mass, Entropy("full"), vocab_size, axis_names)
    if needs.top:
        best, tokens = reductions.vocab_top(centred, needs.top, axis_names)
        choice = argmax_logit - largest - log_mass
        top = TopTokens(tokens, best - log_mass[..., None], choice)
    greedy = TargetEvidence(
        argmax, argmax_logit, draft_logit, log_sum_exp=largest + log_mass,
        draft_log_prob=draft_logit - largest - log_mass, accepted=inputs.draft == argmax,
        replacement=argmax, entropy=entropy, full_entropy=full_entropy, top=top,
    )  # fmt: skip
    return greedy if inputs.sampling is None else _rejection_sample(inputs, greedy, axis_names)


def _entropy(
    logits: Local, log_mass: Found, entropy: Entropy, vocab_size: int, axis_names: AxisNames
) -> Found:
    """The entropy asked for, given the logits' log-sum-exp."""
    if entropy.measure == "top_k":
        best, _ = reductions.vocab_top(logits, entropy.top_k, axis_names)
        return jnp.sum(_surprise(best - log_mass[..., None]), axis=-1)
    nats = reductions.vocab_sum(_surprise(logits - log_mass[..., None]), axis_names)
    return nats / math.log(vocab_size) if entropy.measure == "normalized" else nats


def _surprise(log_probs: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The term -p ln p of an entropy, which is 0 where p is 0."""
    return -jnp.exp(log_probs) * finite_or_zero(log_probs)


def _rejection_sample(
    inputs: EvidenceInputs, greedy: TargetEvidence, axis_names: AxisNames
) -> TargetEvidence:
    """The evidence after the draws, in rows that are not decoded greedily.

    arXiv 2211.17192, Algorithm 1. Where there is no draft token q is zero everywhere, so that the
    residual is p itself: that is the bonus token.
    """
    sampling, uniform, gumbel = inputs.sampling, inputs.uniform, inputs.gumbel
    assert sampling is not None
    assert uniform is not None
    assert gumbel is not None
    positions = inputs.draft.shape[1]
    if inputs.draft_probs is None and inputs.draft_logits is not None:
        # Both at once: the exchanges over a sharded vocabulary are as many as for one.
        both = jnp.concatenate((inputs.logits, inputs.draft_logits), axis=1)
        both = processed_log_probs(both, sampling, axis_names)
        log_probs, draft_probs = both[:, :positions], jnp.exp(both[:, positions:])
    else:
        log_probs = processed_log_probs(inputs.logits, sampling, axis_names)
        is_draft = inputs.draft[..., None] == reductions.token_ids(log_probs.shape[-1], axis_names)
        given = is_draft if inputs.draft_probs is None else inputs.draft_probs
        draft_probs = given.astype(jnp.float32)
    draft_log_prob = reductions.vocab_pick(log_probs, inputs.draft, -jnp.inf, axis_names)
    draft_probs = jnp.where(inputs.draft[..., None] == ABSENT, 0, draft_probs)
    # u < min(1, p / q) without the division: a token with p = 0 is never accepted, and one
    # with q = 0 < p (which the draft cannot have drawn) always is.
    scaled_uniform = uniform * reductions.vocab_pick(draft_probs, inputs.draft, 0.0, axis_names)
    accepted = scaled_uniform < jnp.exp(draft_log_prob)

    log_residual = jnp.log(jnp.maximum(jnp.exp(log_probs) - draft_probs, 0))
    # Where rounding leaves p <= q everywhere the two are equal, and the token is accepted.
    has_residual = reductions.vocab_max(log_residual, axis_names) > -jnp.inf
    weights = jnp.where(has_residual[..., None], log_residual, log_probs)
    is_row_greedy = is_greedy(sampling, 2)
    # With Gumbel noise the best token is a draw of the weights; of greedy rows it is the argmax.
    raw = inputs.logits.astype(jnp.float32)
    scores = jnp.where(is_row_greedy[..., None], raw, weights + gumbel)
    replacement = reductions.vocab_argmax(scores, axis_names)
    top = greedy.top
    if top is not None:
        drawn = reductions.vocab_pick(inputs.logits, replacement, -jnp.inf, axis_names)
        choice = drawn.astype(jnp.float32) - greedy.log_sum_exp
        top = dataclasses.replace(top, replacement_log_prob=choice)
    return dataclasses.replace(
        greedy, draft_log_prob=jnp.where(is_row_greedy, greedy.draft_log_prob, draft_log_prob),
        accepted=jnp.where(is_row_greedy, greedy.accepted, accepted), replacement=replacement,
        scaled_uniform=jnp.where(is_row_greedy, -1, scaled_uniform), top=top,
    )  # fmt: skip
