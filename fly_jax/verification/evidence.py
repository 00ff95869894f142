"""What the target's logits say about the draft: a few numbers per position.

Acceptance rules never see a vocabulary-sized array. On a mesh every device reduces its own shard of
the vocabulary, and only these numbers travel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.sharding.rules import Layout
from fly_jax.verification.reductions import (
    AxisNames,
    finite_or_zero,
    token_ids,
    vocab_argmax,
    vocab_max,
    vocab_pick,
    vocab_sum,
    vocab_top,
)
from fly_jax.verification.sampling import Sampling, gumbel_argmax, processed_log_probs

# The id of no token: what stands at the positions where nothing was drafted.
_ABSENT = -1

EntropyMeasure = Literal["top_k", "full", "normalized"]


@dataclasses.dataclass(frozen=True)
class Entropy:
    """Which entropy of the target's untempered softmax is measured; hashable, static under `jit`.

    Attributes:
      measure: "top_k": -sum p ln p over the `top_k` most probable tokens, with their probabilities
        in the full softmax (not renormalised), in nats: the gate of FLy's reference code and of
        vLLM. "full": over the whole vocabulary, in nats. "normalized": "full" divided by
        ln(vocabulary size), between 0 and 1: the paper's formula.
      top_k: tokens that "top_k" looks at.

    Raises:
      FlyJaxError: for an unknown measure or no tokens.
    """

    measure: EntropyMeasure = "top_k"
    top_k: int = 3

    def __post_init__(self) -> None:
        if self.measure not in ("top_k", "full", "normalized"):
            raise FlyJaxError(
                f"The entropy measure is {self.measure!r}; "
                "choose one of 'top_k', 'full' and 'normalized'."
            )
        if self.top_k < 1:
            raise FlyJaxError(
                f"The entropy's top_k is {self.top_k}; it must be at least 1: 3 is usual."
            )


@dataclasses.dataclass(frozen=True)
class Extra:
    """Numbers that only some rules ask for; what is not asked for is not computed.

    Attributes:
      full_entropy: the entropy over the whole vocabulary, in nats, besides any other.
      runner_up: the logit of the target's second choice.
      lenience: when sampling, accept in `lenient` with so much less of the draft's probability.

    Raises:
      FlyJaxError: a lenience that is no share.
    """

    full_entropy: bool = False
    runner_up: bool = False
    lenience: float | None = None

    def __post_init__(self) -> None:
        if self.lenience is not None and not 0 < self.lenience <= 1:
            raise FlyJaxError(
                f"The lenience is {self.lenience}; it must be above 0 and at most 1: give 1 for "
                "none, and less for more."
            )

    def __or__(self, other: Extra) -> Extra:
        """What either of two asks for.

        Raises:
          FlyJaxError: two leniences.
        """
        if None not in (self.lenience, other.lenience) and self.lenience != other.lenience:
            raise FlyJaxError(
                f"Two leniences are asked for at once, {self.lenience} and {other.lenience}; give "
                "one."
            )
        return Extra(
            self.full_entropy or other.full_entropy,
            self.runner_up or other.runner_up,
            self.lenience if other.lenience is None else other.lenience,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetEvidence:
    """One number per row and position; K draft tokens make K + 1 positions.

    The last position follows the last draft token. It, and every position at or after a row's
    `num_drafted`, has no draft token: `draft_logit` and `draft_log_prob` are -inf and `accepted` is
    False there.

    Attributes:
      argmax: the target's most probable token; of equal ones the lowest id.
      argmax_logit: its raw logit.
      draft_logit: the target's raw logit of the draft token.
      log_sum_exp: of the raw logits, over the whole vocabulary.
      entropy: by the measure asked for, of the raw logits; zeros if none was asked for.
      draft_log_prob: log-probability, in nats, of the draft token in the distribution that is
        decoded from: the processed one when sampling, otherwise the plain softmax.
      accepted: the lossless rule takes this draft token, considered on its own.
      replacement: the token that follows if the block ends here. Greedy: the argmax. Sampled: a
        draw from the residual, or from the target where there is no draft token (the bonus token).
      full_entropy: over the whole vocabulary, in nats; None unless asked for in `Extra`, as below.
      runner_up_logit: the second largest raw logit, equal to the first where two tokens tie.
      lenient: the draws accept this draft token with `Extra.lenience`; None also when greedy.
    """

    argmax: Int32[Array, "rows positions"]
    argmax_logit: Float32[Array, "rows positions"]
    draft_logit: Float32[Array, "rows positions"]
    log_sum_exp: Float32[Array, "rows positions"]
    entropy: Float32[Array, "rows positions"]
    draft_log_prob: Float32[Array, "rows positions"]
    accepted: Bool[Array, "rows positions"]
    replacement: Int32[Array, "rows positions"]
    full_entropy: Float32[Array, "rows positions"] | None = None
    runner_up_logit: Float32[Array, "rows positions"] | None = None
    lenient: Bool[Array, "rows positions"] | None = None


def evidence(
    logits: Float[Array, "rows positions vocab"],
    draft_tokens: Int[Array, "rows draft"],
    *,
    entropy: Entropy | None = None,
    sampling: Sampling | None = None,
    draft_logits: Float[Array, "rows draft vocab"] | None = None,
    key: jax.Array | None = None,
    num_drafted: Int[Array, " rows"] | None = None,
    layout: Layout | None = None,
    extra: Extra | None = None,
) -> TargetEvidence:
    """Reduces the target's logits to what acceptance needs. Pure; call it under `jit`.

    When sampling, a draft token x is accepted with probability min(1, p(x) / q(x)), and otherwise
    replaced by a draw from norm(max(0, p - q)), so that what is emitted has exactly the target's
    distribution p (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). p and q are
    processed by the same `sampling`. The entropy always comes from raw, untempered logits.

    Args:
      logits: the target's raw logits; positions = draft + 1.
      draft_tokens: what was drafted.
      entropy: the entropy to measure, if any.
      sampling: None to verify greedily.
      draft_logits: the raw logits from which the draft was sampled with this very `sampling`. None
        if it was not sampled (greedy or looked up): q is then 1 at the draft token.
      key: a PRNG key, needed with `sampling`.
      num_drafted: draft tokens of each row, at most `draft`; None if every row has all.
      layout: where the logits are sharded: its mesh, and its mapping of the logical axes "rows"
        and "vocab"; None on one device. Numbers are the same but for the rounding of
        sums in another order, and draws use the same noise.
      extra: numbers beyond those that every rule reads; None for none.

    Raises:
      FlyJaxError: if shapes do not fit together, or sampling lacks a key.
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

    draft = jnp.pad(draft_tokens.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=_ABSENT)
    if num_drafted is not None:
        draft = jnp.where(jnp.arange(num_draft + 1) < num_drafted[:, None], draft, _ABSENT)
    noise = None
    if sampling is None:
        draft_logits = None  # what the draft was drawn from does not matter to greedy verification
    elif key is None:
        raise FlyJaxError("Sampling was asked for without a PRNG key; pass key=jax.random.key(…).")
    else:
        accept_key, replace_key = jax.random.split(key)
        noise = _Noise(
            jax.random.uniform(accept_key, draft.shape),
            jax.random.gumbel(replace_key, logits.shape, jnp.float32),
        )
    if draft_logits is not None:
        draft_logits = jnp.pad(draft_logits, ((0, 0), (0, 1), (0, 0)))

    inputs = _Inputs(logits, draft, draft_logits, noise)
    reduce = functools.partial(
        _reduce,
        entropy=entropy,
        extra=Extra() if extra is None else extra,
        sampling=sampling,
        vocab_size=logits.shape[2],
    )
    return reduce(inputs, axis_names=()) if layout is None else _sharded(reduce, inputs, layout)


class _Noise(NamedTuple):
    """What decides the draws: for acceptance, and for the token that follows."""

    uniform: Float32[Array, "rows positions"]
    gumbel: Float32[Array, "rows positions local"]


class _Inputs(NamedTuple):
    """What `_reduce` reads; on a mesh, one device's rows and its shard of the vocabulary."""

    logits: Float[Array, "rows positions local"]
    draft: Int32[Array, "rows positions"]  # _ABSENT where nothing was drafted
    draft_logits: Float[Array, "rows positions local"] | None
    noise: _Noise | None


def _sharded(
    reduce: Callable[..., TargetEvidence], inputs: _Inputs, layout: Layout
) -> TargetEvidence:
    """Runs `reduce` on every device's shard; the result is whole in the vocabulary's axes."""
    spec = layout.spec(("rows", None, "vocab"), inputs.logits.shape)
    rows_entry, _, vocab_entry = (*spec, None, None, None)[:3]
    if vocab_entry is None:
        axis_names: AxisNames = ()
    else:
        axis_names = (vocab_entry,) if isinstance(vocab_entry, str) else tuple(vocab_entry)
    whole, split = PartitionSpec(rows_entry), PartitionSpec(rows_entry, None, vocab_entry)
    noise_spec: PartitionSpec | _Noise = whole
    if inputs.noise is not None:
        # Each device generates its own shard of the noise, the same numbers on every mesh.
        sharding = NamedSharding(layout.mesh, split)
        gumbel = jax.lax.with_sharding_constraint(inputs.noise.gumbel, sharding)
        inputs = inputs._replace(noise=inputs.noise._replace(gumbel=gumbel))
        noise_spec = _Noise._make((whole, split))
    return jax.shard_map(
        functools.partial(reduce, axis_names=axis_names),
        mesh=layout.mesh,
        in_specs=(_Inputs._make((split, whole, split, noise_spec)),),
        out_specs=whole,
        check_vma=False,  # it cannot see that a merge of gathered numbers is the same everywhere
    )(inputs)


def _reduce(
    inputs: _Inputs,
    *,
    entropy: Entropy | None,
    extra: Extra,
    sampling: Sampling | None,
    vocab_size: int,
    axis_names: AxisNames,
) -> TargetEvidence:
    """The evidence from this device's shard of the vocabulary and a few numbers of the others'."""
    logits = inputs.logits.astype(jnp.float32)
    argmax = vocab_argmax(logits, axis_names)
    argmax_logit = vocab_max(logits, axis_names)
    # Log-probabilities are differences from the largest logit, which keeps their low digits.
    largest = finite_or_zero(argmax_logit)
    centred = logits - largest[..., None]
    log_mass = jnp.log(vocab_sum(jnp.exp(centred), axis_names))
    draft_logit = vocab_pick(logits, inputs.draft, -jnp.inf, axis_names)
    lenient = None
    if sampling is None or inputs.noise is None:
        draft_log_prob = draft_logit - largest - log_mass
        accepted, replacement = inputs.draft == argmax, argmax
    else:
        log_probs = processed_log_probs(logits, sampling, axis_names)
        draft_log_prob = vocab_pick(log_probs, inputs.draft, -jnp.inf, axis_names)
        accepted, lenient, replacement = _rejection_sample(
            inputs, inputs.noise, log_probs, draft_log_prob, sampling, extra.lenience, axis_names
        )
    full_entropy = runner_up_logit = None
    if extra.full_entropy:
        full_entropy = _entropy(centred, log_mass, Entropy("full"), vocab_size, axis_names)
    if extra.runner_up:
        # A second maximum is one pass; a top-2 would sort.
        is_best = token_ids(logits.shape[-1], axis_names) == argmax[..., None]
        runner_up_logit = vocab_max(jnp.where(is_best, -jnp.inf, logits), axis_names)
    return TargetEvidence(
        argmax=argmax,
        argmax_logit=argmax_logit,
        draft_logit=draft_logit,
        log_sum_exp=largest + log_mass,
        entropy=_entropy(centred, log_mass, entropy, vocab_size, axis_names),
        draft_log_prob=draft_log_prob,
        accepted=accepted,
        replacement=replacement,
        full_entropy=full_entropy,
        runner_up_logit=runner_up_logit,
        lenient=lenient,
    )


def _entropy(
    logits: Float32[Array, "rows positions local"],
    log_mass: Float32[Array, "rows positions"],
    entropy: Entropy | None,
    vocab_size: int,
    axis_names: AxisNames,
) -> Float32[Array, "rows positions"]:
    """The entropy asked for, given the logits' log-sum-exp; zeros if none."""
    if entropy is None:
        return jnp.zeros_like(log_mass)
    if entropy.measure == "top_k":
        best = vocab_top(logits, entropy.top_k, axis_names)
        return jnp.sum(_surprise(best - log_mass[..., None]), axis=-1)
    nats = vocab_sum(_surprise(logits - log_mass[..., None]), axis_names)
    return nats / math.log(vocab_size) if entropy.measure == "normalized" else nats


def _surprise(log_probs: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """-p ln p, which is 0 where p is 0."""
    return -jnp.exp(log_probs) * finite_or_zero(log_probs)


def _rejection_sample(
    inputs: _Inputs,
    noise: _Noise,
    log_probs: Float32[Array, "rows positions local"],
    draft_log_prob: Float32[Array, "rows positions"],
    sampling: Sampling,
    lenience: float | None,
    axis_names: AxisNames,
) -> tuple[
    Bool[Array, "rows positions"],
    Bool[Array, "rows positions"] | None,
    Int32[Array, "rows positions"],
]:
    """Whether each draft token is accepted, strictly and with lenience, and what replaces it.

    arXiv 2211.17192, Algorithm 1 and, for lenience, its appendix: q is multiplied by the lenience
    before it is compared with p, by the same draw, so that what is accepted strictly is accepted
    leniently too.

    Where there is no draft token q is zero everywhere, so that the residual is p itself: that is
    the bonus token.
    """
    is_draft = inputs.draft[..., None] == token_ids(log_probs.shape[-1], axis_names)
    if inputs.draft_logits is None:
        draft_probs = is_draft.astype(jnp.float32)
    else:
        draft_probs = jnp.exp(processed_log_probs(inputs.draft_logits, sampling, axis_names))
        draft_probs = jnp.where(inputs.draft[..., None] == _ABSENT, 0, draft_probs)
    # u < min(1, p / q) without the division: a token with p = 0 is never accepted, and one
    # with q = 0 < p (which the draft cannot have drawn) always is.
    draft_prob = vocab_pick(draft_probs, inputs.draft, 0.0, axis_names)
    asked, given = noise.uniform * draft_prob, jnp.exp(draft_log_prob)
    accepted = asked < given
    lenient = None if lenience is None else lenience * asked < given

    log_residual = jnp.log(jnp.maximum(jnp.exp(log_probs) - draft_probs, 0))
    # Where rounding leaves p <= q everywhere the two are equal, and the token is accepted.
    has_residual = vocab_max(log_residual, axis_names) > -jnp.inf
    weights = jnp.where(has_residual[..., None], log_residual, log_probs)
    return accepted, lenient, gumbel_argmax(weights, noise.gumbel, axis_names)
