"""Processed distributions against loops, draws against their distributions, over shards too."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from refusals import assert_refused

from fly_jax.planning.hlo import exchanges
from fly_jax.sharding.rules import Layout, ShardingRules
from fly_jax.verification.evidence import evidence
from fly_jax.verification.rules import Exact, Fly, Why, accept
from fly_jax.verification.sampling import Sampling, processed_log_probs, sample, sample_at

SETTINGS = [
    Sampling(),
    Sampling(0.5, 0, 1.0),
    Sampling(2.0, top_k=3),
    Sampling(1.0, top_p=0.83),
    Sampling(0.7, top_k=4, top_p=0.61),
]
ROWS = 6
TRIALS = 20_000

processed = jax.jit(processed_log_probs)
decided = jax.jit(accept)
verified = jax.jit(evidence, static_argnames="needs")


@jax.jit
def drawn(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """A draw at every position, each with a key of its own."""
    keys = jax.random.split(key, logits.shape[0])
    if logits.ndim == 3:
        return sample_at(logits, sampling, keys, jnp.zeros(logits.shape[:2], jnp.int32))
    return sample(logits, sampling, keys)


def numbers_of(sampling: Sampling, row: int = 0) -> tuple[float, int, float]:
    """Temperature, top-k and top-p of a row."""
    given = (sampling.temperature, 1.0), (sampling.top_k, 0), (sampling.top_p, 1.0)
    numbers = [off if one is None else one for one, off in given]
    return tuple(np.broadcast_to(one, ROWS)[row].item() for one in numbers)


def assert_oracles(probs: np.ndarray, logits: np.ndarray, sampling: Sampling) -> None:
    for row in range(ROWS):
        expected = oracle.processed_probs(logits[row], *numbers_of(sampling, row))
        np.testing.assert_array_equal(probs[row] > 1e-30, expected > 1e-30)
        np.testing.assert_allclose(probs[row], expected, rtol=2e-5, atol=1e-30)


# What is left of logits, where it can be worked out by hand.
BY_HAND = {
    "top-p keeps the token that reaches it": (
        np.log([0.1, 0.5, 0.3, 0.1]), Sampling(top_p=0.6), [0, 0.625, 0.375, 0]
    ),
    "top-p counts what top-k left": (  # of which the first token has half
        np.log([0.4, 0.2, 0.2, 0.1, 0.1]), Sampling(top_k=3, top_p=0.45), [1, 0, 0, 0, 0]
    ),
    "a small temperature is greedy and finite": ([3e4, 3.1e4, -3e4], Sampling(1e-6), [0, 1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_what_is_left(case: str) -> None:
    logits, sampling, expected = BY_HAND[case]
    left = np.exp(processed(jnp.asarray(logits, jnp.float32), sampling))
    np.testing.assert_allclose(left, expected, rtol=1e-6)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = jnp.array([[0.0, 2.0, 2.0], [-jnp.inf, -jnp.inf, 1.0]], jnp.bfloat16)
    assert sample(logits).tolist() == [1, 2]


def test_a_key_is_needed() -> None:
    assert_refused("key", sample, jnp.zeros(3), Sampling())


TARGET = np.array([1.5, 0.3, -0.4, 1.1, -2.0, 0.9], np.float32)
DRAFT = np.array([-1.0, 1.8, 1.2, -0.3, 0.5, 0.2], np.float32)
LOGITS = TARGET, DRAFT, jax.random.split(jax.random.key(7))


def assert_fits(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square test; a token of probability 0 must not occur at all."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(tokens) > 100
    assert counts[probs == 0].sum() == 0
    expected = probs / probs.sum() * len(tokens)
    # The test needs some expected draws in every cell: rare tokens share one.
    is_rare = expected < 10
    counts, expected = (
        np.append(of[~is_rare], [of[is_rare].sum()] * bool(expected[is_rare].any()))
        for of in (counts, expected)
    )
    if len(counts) > 1:
        assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


def probs_of(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    return oracle.processed_probs(logits, *numbers_of(sampling))


# What is drawn from is an argument: of constants the compiler would work out the draws itself.
@functools.partial(jax.jit, static_argnums=1)
def draft_and_verify(
    sampling: Sampling, is_sampled: bool, num_drafted: int, *given: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first emitted token, the one that the target adds, and why, of every trial."""
    wanted, proposed, keys = given
    target = jnp.broadcast_to(jnp.stack([wanted, proposed]), (TRIALS, 2, len(TARGET)))
    draft = jnp.broadcast_to(proposed, (TRIALS, 1, len(DRAFT)))
    tokens = drawn(draft, sampling, keys[0]) if is_sampled else sample(draft)
    drafted = {"num_drafted": jnp.full((TRIALS,), num_drafted)}
    sampled = {"sampling": sampling, "draft_logits": draft if is_sampled else None, "key": keys[1]}
    result = accept(Exact(), evidence(target, tokens, **sampled, **drafted), tokens, **drafted)
    first = jnp.where(result.num_accepted > 0, tokens[:, 0], result.next_token)
    return first, result.next_token, result.next_why


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_have_their_distribution(sampling: Sampling) -> None:
    logits = jnp.broadcast_to(TARGET, (TRIALS, 6))
    tokens = drawn(logits, sampling, jax.random.key(3))
    assert_fits(np.asarray(tokens), probs_of(TARGET, sampling))


@pytest.mark.parametrize(
    ("sampling", "is_sampled"),
    [*((sampling, True) for sampling in SETTINGS), (SETTINGS[0], False), (SETTINGS[-1], False)],
    ids=str,
)
def test_emitted_tokens_have_the_targets_distribution(sampling: Sampling, is_sampled: bool) -> None:
    target, draft = probs_of(TARGET, sampling), probs_of(DRAFT, sampling)
    assert np.abs(target - draft).sum() > 0.5, "the draft must be a poor one"
    first, follower, why = map(np.asarray, draft_and_verify(sampling, is_sampled, 1, *LOGITS))
    assert_fits(first, target)
    if not is_sampled:
        draft = np.eye(len(draft))[draft.argmax()]
    overlap = np.minimum(target, draft).sum()  # the probability of acceptance
    is_bonus = why == Why.BONUS
    assert is_bonus.mean() == pytest.approx(overlap, abs=4 * (0.25 / TRIALS) ** 0.5)
    if overlap > 0.02:
        assert_fits(follower[is_bonus], probs_of(DRAFT, sampling))
    residual = np.maximum(target - draft, 0)
    assert_fits(follower[~is_bonus], residual / residual.sum())


def test_without_a_draft_the_target_is_sampled() -> None:
    first, _, why = map(np.asarray, draft_and_verify(Sampling(), True, 0, *LOGITS))
    assert set(why) == {Why.BONUS}
    assert_fits(first, probs_of(TARGET, Sampling()))


def test_an_equal_draft_is_always_accepted() -> None:
    logits = jnp.broadcast_to(TARGET, (TRIALS, 2, 6))
    given = {"sampling": Sampling(), "draft_logits": logits[:, :1]}
    tokens = drawn(logits[:, :1], Sampling(), jax.random.key(1))
    seen = verified(logits, tokens, **given, key=jax.random.key(2))
    assert bool(seen.accepted[:, 0].all())
    assert not bool(seen.accepted[:, 1].any())


def test_zero_probabilities_are_safe() -> None:
    target = jnp.array([[[0.0, -jnp.inf, 1.0], [0.0, 0.0, 0.0]]])
    draft = jnp.array([[[0.0, 1.0, -jnp.inf]]])
    for key in jax.random.split(jax.random.key(0), 20):
        given = {"sampling": Sampling(), "draft_logits": draft, "key": key}
        # A token that is impossible for the target, and one that is for the draft.
        impossible, surprising = (verified(target, jnp.array([[one]]), **given) for one in (1, 2))
        assert not bool(impossible.accepted[0, 0])
        assert impossible.draft_log_prob[0, 0] == -np.inf
        assert int(impossible.replacement[0, 0]) in (0, 2)
        assert bool(surprising.accepted[0, 0])


def test_fly_rescues_only_what_rejection_sampling_refused() -> None:
    rule, sampling = Fly(entropy_threshold=0.2, window_size=1), Sampling(0.8)
    target = np.random.default_rng(5).normal(size=(400, 5, 6)).astype(np.float32)
    draft = target[:, :-1] + np.float32([1, 0, 0, 0, 0, 0])
    tokens = drawn(draft, sampling, jax.random.key(1))
    given = {"sampling": sampling, "draft_logits": draft, "key": jax.random.key(2)}
    seen = verified(target, tokens, needs=rule.needs, **given)
    loose, strict = (decided(each, seen, tokens) for each in (rule, Exact()))
    assert loose.num_rescued.sum() > 0
    assert (loose.num_accepted >= strict.num_accepted).all()
    for name in ("num_accepted", "next_token", "next_why"):
        same = getattr(loose, name) == getattr(strict, name)
        assert same[loose.num_rescued == 0].all()
    assert not ((loose.why == Why.RESCUED) & seen.accepted[:, :-1]).any()
    np.testing.assert_allclose(seen.entropy, verified(target, tokens, needs=rule.needs).entropy)


WIDE, DEVICES = 96, 8  # a vocabulary over all devices
MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LAYOUT = Layout(MESH, ShardingRules(rows=(), vocab=("x", "y")))

placed_draws = jax.jit(sample_at, static_argnames="layout")


@jax.jit
def sharded(logits: jax.Array, sampling: Sampling) -> jax.Array:
    split = PartitionSpec(None, ("x", "y"))
    on_shard = functools.partial(processed_log_probs, axis_names=("x", "y"))
    specs = {"in_specs": (split, PartitionSpec()), "out_specs": split}
    return jax.shard_map(on_shard, mesh=MESH, **specs)(logits, sampling)


def many_kinds_of_logits(seed: int) -> np.ndarray:
    """Rows that are peaked, flat, all equal, full of ties, or mostly ruled out."""
    rng, logits = np.random.default_rng(seed), oracle.random_logits(seed, (ROWS, WIDE))
    ruled_out = rng.random((ROWS, WIDE)) < rng.choice([0.0, 0.0, 0.9, 1.0], (ROWS, 1))
    logits[:, 1:][ruled_out[:, 1:]] = -np.inf
    return np.roll(logits, rng.integers(WIDE), axis=1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.sampled_from(["top-k", "top-p", "both"]),
    shared=st.sampled_from(SETTINGS),
)
def test_processed_distributions_are_the_oracles_and_those_of_shards_too(
    seed: int, steps: str, shared: Sampling
) -> None:
    rng, logits = np.random.default_rng(seed), many_kinds_of_logits(seed)
    temperature = rng.choice([0.3, 1.0, 2.5], ROWS).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 7, 40, WIDE, WIDE + 5, 10**6], ROWS).astype(np.int32)
    # No sum of equal masses is p itself, which rounding could count on either side.
    is_extreme, extreme = rng.random(ROWS) < 0.3, rng.choice([1.0, 1e-30, 1e-6], ROWS)
    top_p = np.where(is_extreme, extreme, rng.random(ROWS) * 0.99).astype(np.float32)
    cuts = None if steps == "top-p" else top_k, None if steps == "top-k" else top_p
    sampling = Sampling(temperature, *cuts)
    assert_oracles(np.exp(sharded(logits, sampling)), logits, sampling)
    for one in (sampling, shared):
        assert_oracles(np.exp(processed(logits, one)), logits, one)


def kept(logits: np.ndarray, **steps: np.ndarray) -> list[int]:
    """So many tokens of each row, over the shards as on one device."""
    sampling = Sampling(np.ones(ROWS, np.float32), **steps)
    here, there = (np.isfinite(found(logits, sampling)) for found in (processed, sharded))
    np.testing.assert_array_equal(here, there)
    return here.sum(axis=1).tolist()


def test_ties_over_all_shards_are_kept_together() -> None:
    logits = np.zeros((ROWS, WIDE), np.float32)
    logits[:, ::2] = -0.0
    logits[1:, ::13] = 2.0  # eight tokens, one on most shards
    logits[2:, 5] = 3.0
    top_k = np.array([1, 1, 1, 2, 9, 10], np.int32)
    assert kept(logits, top_k=top_k) == [WIDE, 8, 1, 9, 9, WIDE]
    # The most probable token is kept, however little is asked for.
    assert kept(logits, top_p=np.full(ROWS, 1e-38, np.float32)) == [WIDE, 8, 1, 1, 1, 1]


def test_neighbouring_floats_are_told_apart() -> None:
    logits = np.zeros((ROWS, WIDE), np.float32)
    logits[:, 0] = 1.0
    for token in range(1, 30):
        logits[:, token] = np.nextafter(logits[:, token - 1], np.float32(0))
    logits = logits[:, np.random.default_rng(0).permutation(WIDE)]
    top_k = np.array([1, 2, 3, 17, 29, 30], np.int32)
    assert kept(logits, top_k=top_k) == top_k.tolist()


STEPS = {
    "temperature": (Sampling(0.7), 1),
    "top-k": (Sampling(0.7, top_k=50), 3),
    "top-p": (Sampling(0.7, top_p=0.83), 3),
    "top-k and top-p": (Sampling(0.7, top_k=50, top_p=0.83), 4),
}


@pytest.mark.parametrize("steps", STEPS)
def test_a_draw_takes_few_exchanges_more_than_the_argmax(steps: str) -> None:
    rows, vocab = 4, 4096
    sampling, most = STEPS[steps]
    logits = np.random.default_rng(1).normal(size=(rows, 1, vocab)).astype(np.float32) * 3
    placed = jax.device_put(logits, LAYOUT.sharding(("rows", None, "vocab"), logits.shape))
    others = jax.random.split(jax.random.key(0), rows), jnp.full((rows, 1), 7)
    greedy, text = (
        placed_draws.lower(placed, one, *others, layout=LAYOUT).compile().as_text()
        for one in (None, sampling)
    )
    number, of_greedy = (sum(one.count for one in exchanges(of, DEVICES)) for of in (text, greedy))
    assert number <= of_greedy + most
    sizes = [math.prod(shape) for one in exchanges(text, DEVICES) for shape in one.shapes]
    assert max(sizes) < rows * vocab / 8
    # Nothing of the whole vocabulary's size is anywhere: each device draws its own noise.
    assert f"{rows},1,{vocab}]" not in text
    draws = placed_draws(placed, sampling, *others, layout=LAYOUT)
    np.testing.assert_array_equal(draws, placed_draws(logits, sampling, *others))
