"""Processed distributions against loops, draws against their distributions, over shards too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden import layout_on
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fly_jax import Exact, Fly, Sampling, Why, accept, evidence, sample, sample_at
from fly_jax.planning.hlo import Exchange, exchanges
from fly_jax.verification.sampling import processed_log_probs

SETTINGS = [Sampling(), Sampling(0.5, 0, 1.0), Sampling(2.0, top_k=3), Sampling(1.0, top_p=0.83)]
SETTINGS += [Sampling(0.7, top_k=4, top_p=0.61)]
ROWS = 6
TRIALS = 20_000

processed = jax.jit(processed_log_probs)
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


def test_a_small_temperature_is_greedy_and_finite() -> None:
    left = np.exp(processed(jnp.asarray([3e4, 3.1e4, -3e4]), Sampling(1e-6)))
    np.testing.assert_allclose(left, [0, 1, 0], rtol=1e-6)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    """Without a sampling, and in a row of temperature 0."""
    logits = jnp.array([[0.0, 2.0, 2.0], [-jnp.inf, -jnp.inf, 1.0]], jnp.bfloat16)
    mixed, keys = Sampling(np.float32([0, 1])), jax.random.split(jax.random.key(0))
    for found in (sample(logits), sample(logits, mixed, keys)):
        assert found.tolist() == [1, 2]


TARGET = np.array([1.5, 0.3, -0.4, 1.1, -2.0, 0.9], np.float32)
DRAFT = np.array([-1.0, 1.8, 1.2, -0.3, 0.5, 0.2], np.float32)
LOGITS = TARGET, DRAFT, jax.random.split(jax.random.key(7))


def assert_fits(tokens: np.ndarray, probs: np.ndarray) -> None:
    assert len(tokens) > 100
    assert oracle.goodness_of_fit(tokens, probs / probs.sum()) > 1e-3


def probs_of(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    return oracle.processed_probs(logits, *numbers_of(sampling))


# What is drawn from is an argument: of constants the compiler would work out the draws itself.
@functools.partial(jax.jit, static_argnums=1)
def draft_and_verify(
    sampling: Sampling, is_sampled: bool, num_drafted: int, *given: jax.Array
) -> tuple[jax.Array, ...]:
    """Of every trial the draft token, the first emitted one, the target's own, and why."""
    wanted, proposed, keys = given
    target = jnp.broadcast_to(jnp.stack([wanted, proposed]), (TRIALS, 2, len(TARGET)))
    draft = jnp.broadcast_to(proposed, (TRIALS, len(DRAFT)))
    tokens = (drawn(draft, sampling, keys[0]) if is_sampled else sample(draft))[:, None]
    drafted = {"num_drafted": jnp.full((TRIALS,), num_drafted)}
    sampled = {"sampling": sampling, "draft_logits": draft[:, None] if is_sampled else None}
    seen = evidence(target, tokens, **sampled, **drafted, key=keys[1])
    result = accept(Exact(), seen, tokens, **drafted)
    first = jnp.where(result.num_accepted > 0, tokens[:, 0], result.next_token)
    return tokens[:, 0], first, result.next_token, result.next_why


@pytest.mark.parametrize(
    ("sampling", "is_sampled"),
    [*((sampling, True) for sampling in SETTINGS), (SETTINGS[0], False), (SETTINGS[-1], False)],
    ids=str,
)
def test_draws_have_their_distribution_and_emitted_tokens_the_targets(
    sampling: Sampling, is_sampled: bool
) -> None:
    target, draft = probs_of(TARGET, sampling), probs_of(DRAFT, sampling)
    assert np.abs(target - draft).sum() > 0.5, "the draft must be a poor one"
    given = draft_and_verify(sampling, is_sampled, 1, *LOGITS)
    tokens, first, follower, why = map(np.asarray, given)
    assert_fits(first, target)
    is_bonus = why == Why.BONUS
    if not is_sampled:
        draft = np.eye(len(draft))[draft.argmax()]
    assert_fits(tokens, draft)
    overlap = np.minimum(target, draft).sum()  # the probability of acceptance
    assert is_bonus.mean() == pytest.approx(overlap, abs=4 * (0.25 / TRIALS) ** 0.5)
    if overlap > 0.02:
        assert_fits(follower[is_bonus], probs_of(DRAFT, sampling))
    residual = np.maximum(target - draft, 0)
    assert_fits(follower[~is_bonus], residual / residual.sum())


def test_without_a_draft_the_target_is_sampled() -> None:
    _, first, _, why = map(np.asarray, draft_and_verify(Sampling(), True, 0, *LOGITS))
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


def test_the_entropy_is_that_of_the_logits_however_is_sampled() -> None:
    target = np.random.default_rng(5).normal(size=(ROWS, 5, 6)).astype(np.float32)
    tokens, needs = target[:, 1:].argmax(-1), Fly().needs
    given = {"sampling": Sampling(0.8, top_k=3), "key": jax.random.key(2)}
    seen = verified(target, tokens, needs=needs, draft_logits=target[:, 1:], **given)
    np.testing.assert_allclose(seen.entropy, verified(target, tokens, needs=needs).entropy)


WIDE, DEVICES = 96, 8  # a vocabulary over all devices
LAYOUT = layout_on("2x4")

placed_draws = jax.jit(sample_at, static_argnames="layout")


@jax.jit
def sharded(logits: jax.Array, sampling: Sampling) -> jax.Array:
    split = PartitionSpec(None, ("x", "y"))
    on_shard = functools.partial(processed_log_probs, axis_names=("x", "y"))
    specs = {"in_specs": (split, PartitionSpec()), "out_specs": split}
    return jax.shard_map(on_shard, mesh=LAYOUT.mesh, **specs)(logits, sampling)


def many_kinds_of_logits(seed: int) -> np.ndarray:
    """Rows that are peaked, flat, all equal, full of ties, or mostly ruled out."""
    rng, logits = np.random.default_rng(seed), oracle.random_logits(seed, (ROWS, WIDE))
    ruled_out = rng.random((ROWS, WIDE)) < rng.choice([0.0, 0.0, 0.9, 1.0], (ROWS, 1))
    logits[:, 1:][ruled_out[:, 1:]] = -np.inf
    return np.roll(logits, rng.integers(WIDE), axis=1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), steps=st.sampled_from(["top-k", "top-p", "both"]),
    shared=st.sampled_from(SETTINGS),
)  # fmt: skip
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


def test_neighbouring_floats_are_told_apart() -> None:
    """Over the shards as on one device."""
    logits = np.zeros((ROWS, WIDE), np.float32)
    logits[:, 0] = 1.0
    for token in range(1, 30):
        logits[:, token] = np.nextafter(logits[:, token - 1], np.float32(0))
    logits = logits[:, np.random.default_rng(0).permutation(WIDE)]
    top_k = np.array([1, 2, 3, 17, 29, 30], np.int32)
    for found in (processed, sharded):
        left = np.isfinite(found(logits, Sampling(np.ones(ROWS, np.float32), top_k)))
        np.testing.assert_array_equal(left.sum(axis=1), top_k)


PLACED = jax.device_put(
    np.random.default_rng(1).normal(size=(4, 1, 4096)).astype(np.float32) * 3,
    LAYOUT.sharding(("rows", None, "vocab"), (4, 1, 4096)),
)
NOISE = jax.random.split(jax.random.key(0), 4), jnp.full((4, 1), 7)
STEPS = {"temperature": (Sampling(0.7), 1), "top-k": (Sampling(0.7, top_k=50), 3)}
STEPS |= {"top-p": (Sampling(0.7, top_p=0.83), 3)}
STEPS |= {"top-k and top-p": (Sampling(0.7, top_k=50, top_p=0.83), 4)}


@functools.cache
def drawing(sampling: Sampling | None) -> tuple[str, list[Exchange]]:
    """The program that draws from logits over all devices, and what it exchanges."""
    text = placed_draws.lower(PLACED, sampling, *NOISE, layout=LAYOUT).compile().as_text()
    return text, exchanges(text, DEVICES)


@pytest.mark.parametrize("steps", STEPS)
def test_a_draw_takes_few_exchanges_more_than_the_argmax(steps: str) -> None:
    sampling, most = STEPS[steps]
    text, sent = drawing(sampling)
    assert sum(one.count for one in sent) <= sum(one.count for one in drawing(None)[1]) + most
    assert max(math.prod(shape) for one in sent for shape in one.shapes) < PLACED.size / 8
    # Nothing of the whole vocabulary's size is anywhere: each device draws its own noise.
    assert f"{len(PLACED)},1,{PLACED.shape[-1]}]" not in text
    draws = placed_draws(PLACED, sampling, *NOISE, layout=LAYOUT)
    np.testing.assert_array_equal(draws, placed_draws(np.asarray(PLACED), sampling, *NOISE))
