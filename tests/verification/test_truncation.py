"""Top-k and top-p over a sharded vocabulary: exact, and with few exchanges."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from fly_jax.planning.hlo import exchanges
from fly_jax.sharding.rules import Layout, ShardingRules
from fly_jax.verification.sampling import Sampling, processed_log_probs, sample_at

ROWS, VOCAB, DEVICES = 6, 96, 8
MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
LAYOUT = Layout(MESH, ShardingRules(rows=(), vocab=("x", "y")))

whole = jax.jit(processed_log_probs)
drawn = jax.jit(sample_at, static_argnames="layout")


@jax.jit
def sharded(logits: jax.Array, sampling: Sampling) -> jax.Array:
    split = PartitionSpec(None, ("x", "y"))
    return jax.shard_map(
        lambda shard, sampling: processed_log_probs(shard, sampling, ("x", "y")),
        mesh=MESH,
        in_specs=(split, PartitionSpec()),
        out_specs=split,
    )(logits, sampling)


def logits_of(seed: int) -> np.ndarray:
    """Rows that are peaked, flat, all equal, full of ties, or mostly ruled out."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, VOCAB)) * rng.choice([0.0, 0.1, 1.0, 5.0, 30.0], (ROWS, 1))
    logits = np.where(rng.random((ROWS, 1)) < 0.5, np.round(logits * 2) / 2, logits)
    ruled_out = rng.random((ROWS, VOCAB)) < rng.choice([0.0, 0.1, 0.9, 1.0], (ROWS, 1))
    ruled_out[:, rng.integers(VOCAB)] = False
    return np.where(ruled_out, -np.inf, logits).astype(np.float32)


def assert_oracles(probs: np.ndarray, logits: np.ndarray, sampling: Sampling) -> None:
    for row in range(ROWS):
        top_k = 0 if sampling.top_k is None else int(sampling.top_k[row])
        top_p = 1.0 if sampling.top_p is None else float(sampling.top_p[row])
        expected = oracle.processed_probs(
            logits[row], float(sampling.temperature[row]), top_k, top_p
        )
        np.testing.assert_array_equal(probs[row] > 1e-30, expected > 1e-30)
        np.testing.assert_allclose(probs[row], expected, rtol=2e-5, atol=1e-30)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.sampled_from(["top-k", "top-p", "both"]))
def test_the_shards_keep_together_what_the_oracle_keeps(seed: int, steps: str) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(seed)
    top_k = rng.choice([0, 1, 2, 7, 40, VOCAB, VOCAB + 5, 10**6], ROWS).astype(np.int32)
    # No sum of equal masses is p itself, which rounding could count on either side.
    top_p = np.where(
        rng.random(ROWS) < 0.3, rng.choice([1.0, 1e-30, 1e-6], ROWS), rng.random(ROWS) * 0.99
    ).astype(np.float32)
    sampling = Sampling(
        rng.choice([0.3, 1.0, 2.5], ROWS).astype(np.float32),
        None if steps == "top-p" else top_k,
        None if steps == "top-k" else top_p,
    )
    assert_oracles(np.exp(sharded(logits, sampling)), logits, sampling)
    assert_oracles(np.exp(whole(logits, sampling)), logits, sampling)


def test_ties_over_all_shards_are_kept_together() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1:, ::13] = 2.0  # eight tokens, one on most shards
    logits[2:, 5] = 3.0
    top_k = np.array([1, 1, 1, 2, 9, 10], np.int32)
    sampling = Sampling(np.ones(ROWS, np.float32), top_k)
    kept = np.isfinite(sharded(logits, sampling)).sum(axis=1)
    assert kept.tolist() == [VOCAB, 8, 1, 9, 9, VOCAB]
    # The most probable token is kept, however little is asked for.
    least = Sampling(np.ones(ROWS, np.float32), None, np.full(ROWS, 1e-38, np.float32))
    assert np.isfinite(sharded(logits, least)).sum(axis=1).tolist() == [VOCAB, 8, 1, 1, 1, 1]


def test_neighbouring_floats_are_told_apart() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 0] = 1.0
    for token in range(1, 30):
        logits[:, token] = np.nextafter(logits[:, token - 1], np.float32(0))
    logits = logits[:, np.random.default_rng(0).permutation(VOCAB)]
    top_k = np.array([1, 2, 3, 17, 29, 30], np.int32)
    kept = np.isfinite(sharded(logits, Sampling(np.ones(ROWS, np.float32), top_k)))
    assert kept.sum(axis=1).tolist() == top_k.tolist()


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
    keys, positions = jax.random.split(jax.random.key(0), rows), jnp.full((rows, 1), 7)

    def program(sampling: Sampling | None) -> str:
        compiled = drawn.lower(placed, sampling, keys, positions, layout=LAYOUT).compile()
        return compiled.as_text()

    greedy, text = program(None), program(sampling)
    number = sum(one.count for one in exchanges(text, DEVICES))
    assert number <= sum(one.count for one in exchanges(greedy, DEVICES)) + most
    sizes = [math.prod(shape) for one in exchanges(text, DEVICES) for shape in one.shapes]
    assert max(sizes) < rows * vocab / 8
    # Nothing of the whole vocabulary's size is anywhere: each device draws its own noise.
    assert f"{rows},1,{vocab}]" not in text
    np.testing.assert_array_equal(
        drawn(placed, sampling, keys, positions, layout=LAYOUT),
        drawn(logits, sampling, keys, positions),
    )
