"""What XLA computes on a CPU over more than 32,768 rows, where jaxlib 0.10.2 has a fault.

There a product with a small matrix, squared and summed by rows, is silently wrong from row 32,769
on (jax#39103). These tests say for each version of jaxlib whether the fault is there, and that what
fly_jax computes over so many rows is right all the same.
"""

import dataclasses

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from random_pairs import CONFIG, random_target
from train import next_token_loss

from fly_jax.models.architectures import INT8, ParameterSpec
from fly_jax.models.checkpoints.packings import Scaled
from fly_jax.models.llama import Llama
from fly_jax.models.quantise import quantised
from fly_jax.training.trainer import Row

ROWS = 33_000
WITH_FAULT = ("0.10.2",)

pytestmark = pytest.mark.usefixtures("compiled_well")


def test_the_known_case() -> None:
    """If this fails on a newer jaxlib, its version belongs into `WITH_FAULT`."""
    rows, matrix = np.zeros((ROWS, 3), np.float32), jnp.eye(3)
    rows[:, 0] = np.arange(ROWS)
    found = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
    is_right = bool(np.allclose(found, np.arange(ROWS, dtype=np.float64) ** 2))
    assert is_right == (jaxlib.__version__ not in WITH_FAULT)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Made before any test compiles well, which takes long for random numbers."""
    small = {"embed_size": 16, "ffw_size": 16, "num_heads": 1, "num_kv_heads": 1, "num_layers": 1}
    return random_target(0, dataclasses.replace(CONFIG, **small))


def test_a_loss_and_its_gradients(model: Llama) -> None:
    """Over a long batch they are the means of those over its pieces."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS // 12, 13), np.int32)

    @jax.jit
    @jax.value_and_grad
    def step(parameters: dict[str, jax.Array], tokens: np.ndarray) -> jax.Array:
        weights, positions = jnp.ones((len(tokens), 12)), jnp.arange(13)
        row = Row(tokens, weights, jnp.zeros_like(tokens), jnp.zeros_like(tokens) + positions)
        return next_token_loss(model.config, parameters, row)

    whole, *pieces = (step(model.parameters(), one) for one in (tokens, *np.split(tokens, 2)))
    means = jax.tree.map(lambda *parts: np.mean(parts, axis=0), *pieces)
    for one, mean in zip(jax.tree.leaves(whole), jax.tree.leaves(means), strict=True):
        assert np.linalg.norm(one - mean) < 0.01 * np.linalg.norm(mean)  # of bfloat16 products


def test_matrices_with_a_row_for_each_token() -> None:
    """A vocabulary's matrix, widened and rounded to int8."""
    rng = np.random.default_rng(0)
    stored = rng.integers(-127, 128, (ROWS, 48), np.int8)
    scale = rng.uniform(0.5, 2.0, (ROWS, 1)).astype(np.float32)
    spec = ParameterSpec((48, ROWS), ("embed", "vocab"), inputs=("embed",))

    @jax.jit
    def rounded(parts: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return quantised(Scaled().widened(parts, ROWS, 48).T, spec, INT8)

    integers, scales = map(np.asarray, rounded({"weight": stored, "weight_scale": scale}))
    wide = stored * scale.astype(np.float64)
    np.testing.assert_allclose(scales, np.abs(wide).max(1) / 127, rtol=0.01)
    back = integers.astype(np.float64) * scales
    np.testing.assert_allclose(back.T, wide, atol=0.51 * 2)


@pytest.mark.parametrize("width", [3, 8, 33, 64])
def test_norms_of_products(width: int) -> None:
    """Norms and log-sums of many rows, right behind a product."""
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((ROWS, width)).astype(np.float32)
    matrix = rng.standard_normal((width, width)).astype(np.float32)

    @jax.jit
    def reduced(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = rows @ matrix
        scale = jax.lax.rsqrt(jnp.mean(product * product, axis=-1, keepdims=True) + 1e-5)
        return product * scale, jax.nn.logsumexp(product, axis=-1)

    product, (norms, sums) = rows.astype(np.float64) @ matrix, reduced(rows, matrix)
    size = np.sqrt((product**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norms, product / size, atol=1e-3)
    np.testing.assert_allclose(sums, np.log(np.exp(product).sum(axis=-1)), atol=1e-3)
