"""A matrix in front of a few tokens gives the plain product; int8 times int8 sums exactly."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_types import Patch
from test_golden import TOLERANCE, stored, uncached

from fly_jax.models import llama
from fly_jax.models.cache import KVCache, NewEntries
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama, in_front, matmul, of_integers, with_turned

# Rows and tokens: each step of their number, what is added to it, and more than a few.
FEW = ((1, 1), (1, 2), (2, 2), (1, 5), (8, 1), (3, 3), (7, 2), (5, 5), (8, 16), (3, 43), (8, 20))


# How a matrix [*in, *out] is multiplied.
@pytest.mark.parametrize(
    "equation", ["btd,dhk->bthk", "bthk,hkd->btd", "btd,vd->btv", "btd,df->btf"]
)
def test_it_is_the_plain_product(equation: str) -> None:
    letters, stored = equation.split("->")[0].split(",")
    outputs_first = sorted(range(len(stored)), key=lambda index: stored[index] in letters)
    draw = np.random.default_rng(31)

    def array(letters: str, rows: int = 1, time: int = 1) -> np.ndarray:
        sizes = {"d": 12, "h": 3, "k": 4, "v": 20, "f": 9, "b": rows, "t": time}
        return draw.standard_normal([sizes[one] for one in letters], np.float32)

    @jax.jit
    def both(xs: list[jax.Array], matrix: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        turned, product = matrix.transpose(outputs_first), with_turned(in_front)
        return [(product(equation, x, turned), matmul(equation, x, matrix)) for x in xs]

    for found, expected in both([array(letters, *few) for few in FEW], array(stored)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_summed_in_float32_where_that_is_asked_for() -> None:
    x = jnp.full((1, 5, 64), 1 / 3, jnp.bfloat16)
    matrix = jnp.full((7, 64), 1 / 3, jnp.bfloat16)
    for dtype in (None, jnp.float32):
        found = in_front("btd,vd->btv", x, matrix, dtype)
        expected = matmul("btd,vd->btv", x, matrix, dtype)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.sampled_from([24, 23, 22, "heads"]))
def test_integers_are_summed_exactly(rows: int, time: int, drawn_outputs: int | str) -> None:
    """A token's numbers become the nearest integers, and sums of integers know no order.

    Before one token the rows of four outputs are joined, before two those of two, if all are.
    """
    has_heads = drawn_outputs == "heads"
    number = 24 if has_heads else drawn_outputs
    draw = np.random.default_rng(rows * 31 + time)
    x = draw.standard_normal((rows, time, 96), np.float32) * 3
    x[0, 0] = 0
    # Outputs of a unit matrix show what the numbers became.
    drawn = draw.integers(-128, 128, (number, 96), np.int8)
    matrix = np.concatenate((drawn, np.eye(96, dtype=np.int8)))
    scale = np.append(draw.uniform(1e-3, 1e-2, number), np.ones(96)).astype(np.float32)
    if has_heads:
        x, matrix = x.reshape(rows, time, 6, 16), matrix.reshape(12, 10, 6, 16)
        scale = scale.reshape(12, 10)
    found = np.asarray(jax.jit(of_integers)(x, matrix, scale))
    assert found.shape == (rows, time, *scale.shape)
    alone = np.asarray(jax.jit(of_integers)(x[-1:, -1:], matrix, scale))
    np.testing.assert_array_equal(found[-1, -1], alone[0, 0])
    found, x = found.reshape(rows, time, number + 96), x.reshape(rows, time, 96)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    step = np.where(largest == 0, 1, largest / np.float32(127.5))
    integers = np.round(found[..., number:] / step)
    assert np.abs(integers * step - x).max() <= 0.501 * step.max()
    assert (np.abs(integers).max(axis=-1) >= 127)[largest[..., 0] > 0].all()
    sums = integers @ drawn.T.astype(np.float64)
    expected = sums * step * scale.reshape(-1)[:number]
    np.testing.assert_allclose(found[..., :number], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "is_large"), [("llama3", False), ("qwen2", True), ("qwen3", True), ("mistral", False)]
)
def test_matrices_of_large_models_lie_turned(name: str, is_large: bool, monkeypatch: Patch) -> None:
    """Where no cache holds them; and they give the same."""
    if is_large:
        monkeypatch.setattr(llama, "_CACHED_BYTES", 0)
    golden = stored(name)
    apart, config = golden.model.unstacked(), golden.model.config
    sizes = (config.embed_size, config.ffw_size)
    assert apart.parameters()["up"][0].shape == (sizes[::-1] if is_large else sizes)
    np.testing.assert_allclose(uncached(apart, golden.tokens), golden.logits, atol=TOLERANCE)
    for model in (golden.model, stored(name, int8=True).model):
        assert model.unstacked().is_unstacked
        assert not model.is_unstacked, "the one that was given stays as it is"
        assert_same(model.unstacked().stacked(), model)


def test_it_is_saved_as_it_was(tmp_path: Path) -> None:
    model = load_llama(GOLDEN / "llama3")
    model.unstack()
    save_hf(model, tmp_path, jnp.float32)
    assert_same(load_llama(tmp_path), load_llama(GOLDEN / "llama3"))


def test_a_few_tokens_stand_behind_the_matrix_once_compiled(monkeypatch: Patch) -> None:
    """Behind them the compiler would pack the matrix, which is all of a pass's time."""
    monkeypatch.setattr(llama, "_CACHED_BYTES", 0)
    model = load_llama(GOLDEN / "llama3").unstacked()
    given = (jnp.zeros((1, 5), jnp.int32), jnp.arange(5)[None], jnp.tri(5, dtype=bool)[None])

    def step(parameters: dict) -> jax.Array:
        return Llama(model.config, parameters).uncached_and_inputs(*given)[0]

    text, width = jax.jit(step).lower(model.parameters()).compile().as_text(), model.config.ffw_size
    assert re.search(rf"f32\[{width},8\]\S* dot\(", text), "outputs by tokens, in eights"
    assert not re.search(rf"f32\[[58],{width}\]\S* dot\(", text)


def test_a_gpu_has_an_array_per_layer_of_floats_but_a_stack_of_integers(monkeypatch: Patch) -> None:
    """Its matrices lie [out, in] and are multiplied by plain products; logits stay the golden."""
    golden = stored("llama31")
    monkeypatch.setattr(llama, "_platform", lambda _: "gpu")
    monkeypatch.setattr(llama, "_CACHED_BYTES", 0)
    monkeypatch.setattr(llama, "in_front", None)
    model = llama.for_backend(golden.model)
    assert model.is_unstacked
    assert not llama.runs_unstacked(stored("llama31", int8=True).model)
    np.testing.assert_allclose(uncached(model, golden.tokens), golden.logits, atol=TOLERANCE)
    monkeypatch.setattr(llama, "_platform", lambda _: "tpu")
    assert not llama.for_backend(golden.model).is_unstacked


def test_a_gpu_writes_all_rows_of_a_cache_at_once(monkeypatch: Patch) -> None:
    """One operation for all rows leaves what one for each of them does, to the last position."""
    draw = np.random.default_rng(7)

    def entries(time: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal((2, 3, 2, time, 4), np.float32))

    cache = KVCache(entries(8), entries(8), jnp.array([0, 6, 3]))
    new = NewEntries(entries(2), entries(2))
    by_row = cache.written(new, None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.tree.map(np.testing.assert_array_equal, cache.written(new, None), by_row)
    assert "scatter" in str(jax.make_jaxpr(cache.written, static_argnums=1)(new, None))
