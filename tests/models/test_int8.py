"""int8 matrices: what they are made of, and that a forward pass with them is what it should be."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, layout_on
from launch_types import Patch
from test_golden import Golden, cached, stored, uncached

from fly_jax.models import llama, quantise
from fly_jax.models.architectures import INT8, ParameterSpec, parameter_specs, scale_name
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.llama import Llama
from fly_jax.models.presets import preset
from fly_jax.models.quantise import SELF_DRAFTS, quantised


# With tied embeddings, windows, biases and norms of heads: what a matrix or its scale may meet.
@pytest.fixture(scope="module", params=["llama32", "mistral", "qwen2", "qwen3"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return stored(request.param, int8=True)


def assert_near(found: np.ndarray, expected: np.ndarray, least_agreement: float) -> None:
    """Golden logits, whose standard deviation is about 1.

    The models are tiny and their weights random, so that every rounding shows.
    """
    error = np.abs(found - expected)
    assert 0 < error.mean() <= 0.06
    assert error.max() <= 0.8
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= least_agreement


def widened(model: Llama) -> Llama:
    """The same model with the numbers that its int8 matrices stand for, in float32."""
    parameters = model.parameters()
    for name, spec in parameter_specs(model.config).items():
        if spec.inputs:
            axes = [spec.axes.index(axis) for axis in spec.inputs]
            scale = jnp.expand_dims(parameters.pop(scale_name(name)), axes)
            parameters[name] = parameters[name].astype(jnp.float32) * scale
    return Llama(model.config, parameters)


def test_golden_logits_are_kept(golden: Golden) -> None:
    assert golden.model.int8
    logits = uncached(golden.model, golden.tokens)
    assert_near(logits, golden.logits, 0.92)
    exact = uncached(widened(golden.model), golden.tokens)
    assert np.abs(logits - exact).max() <= 1e-4


@pytest.mark.parametrize("kind", ["llama2", "smollm3"])
def test_one_array_per_layer_where_activations_are_rounded_too(kind: str) -> None:
    golden = stored(kind, int8=True)
    found, _ = cached(golden.model.unstacked(), golden.tokens)
    fed = ~np.isnan(found[..., 0])
    assert_near(found[fed], golden.logits[fed], 0.87)


# Rows, and how many tokens each pass is fed: more than attention reads at a time, too.
PASSES = {
    "by two to nine": ([0], (2, 3, 5, 8, 9)),
    "at once": ([0], (150,)),
    "beside others": ([2, 0], (1, 5)),
    "in a batch": ([1, 1, 0, 2, 2], (1, 17)),
}


@functools.cache
def fed(kind: str, rows: tuple[int, ...], widths: tuple[int, ...]) -> list[np.ndarray]:
    """Logits, keys and values of the rows that were fed so many tokens at a time."""
    model = stored(kind, int8=True).model.unstacked()
    config = model.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 150), np.int32)[[*rows]]
    time = tokens.shape[1]

    @functools.partial(jax.jit, static_argnames="attended")
    def step(
        parameters: dict[str, jax.Array], some: np.ndarray, cache: KVCache, attended: int | None
    ) -> tuple[jax.Array, KVCache]:
        model = Llama(config, parameters)
        hidden, cache = model.extend(some, cache.attending(attended))
        return model.logits(hidden), cache.attending(None)

    cache, logits, at = empty_cache(config, len(rows), time + 11, jnp.float32), [], 0
    turns = itertools.cycle(widths)
    while at < time:
        some = tokens[:, at : at + next(turns)]
        # All of the cache, but a token that is fed alone, which attends to no more than it must.
        attended = -(-at // 64) * 64 if widths == (1,) else None
        found, cache = step(model.parameters(), some, cache, attended)
        logits.append(found)
        at += some.shape[1]
        cache = cache.with_length(jnp.full(len(rows), at, jnp.int32))
    entries = [one[:, :, :, :time].swapaxes(0, 1) for one in (cache.keys, cache.values)]
    return [np.asarray(one) for one in (jnp.concatenate(logits, axis=1), *entries)]


# All kinds of passes over a model with biases and windows; one kind over others.
@pytest.mark.parametrize(
    ("kind", "name"), [*(("qwen2_windows", name) for name in PASSES), ("qwen3", "in a batch")]
)
def test_a_token_gets_the_same_bits_whatever_is_fed_beside_it(kind: str, name: str) -> None:
    rows, widths = PASSES[name]
    expected = fed(kind, (0,), (1,))
    for one, alone in zip(fed(kind, tuple(rows), widths), expected, strict=True):
        np.testing.assert_array_equal(one[rows.index(0)], alone[0])


def test_specs_describe_the_parameters(golden: Golden) -> None:
    specs, found = parameter_specs(golden.model.config, INT8), golden.model.parameters()
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (spec.shape, spec.dtype or golden.model.dtype) for name, spec in specs.items()
    }


def test_405b_in_int8() -> None:
    """Every matrix is int8, and a scale lies where its outputs do."""
    config = preset("llama-3.1-405b")
    plain, specs = parameter_specs(config), parameter_specs(config, INT8)
    assert {name for name in specs if specs[name].dtype == jnp.int8} == {
        "embedding", "query", "key", "value", "output", "gate", "up", "down", "unembedding"
    }  # fmt: skip
    scales = {scale_name(name) for name, spec in plain.items() if spec.inputs}
    assert specs.keys() - plain.keys() == scales
    axes = ("layers", "q_heads", "head")
    assert specs["query_scale"] == ParameterSpec((126, 128, 128), axes, (), np.dtype(np.float32))
    assert specs["output_scale"].axes == ("layers", "embed")
    assert specs["embedding_scale"].axes == specs["unembedding_scale"].axes == ("vocab",)
    assert specs["down_scale"].shape == (126, 16_384)


def test_an_output_has_a_scale_of_its_own() -> None:
    spec = ParameterSpec((3, 2), ("embed", "ffw"), ("embed",))
    matrix = jnp.asarray([[1.5, 200.0], [-2.0, 50.0], [0.5, -254.0]])
    integers, scales = quantised(matrix, spec, INT8)
    np.testing.assert_allclose(scales, np.array([2, 254]) / 127.5, rtol=1e-6)
    expected = np.array([[95.625, 100.39], [-127.5, 25.1], [31.875, -127.5]])
    assert integers.dtype == jnp.int8
    assert np.abs(integers - expected).max() <= 0.501
    _, scales = quantised(jnp.zeros((3, 2)), spec, INT8)
    assert np.isfinite(scales).all()


@pytest.mark.parametrize(("mesh", "rules"), [("2x4", "tensor"), ("2x2x2", "tensor_long")])
def test_layouts_give_the_same_logits(mesh: str, rules: str) -> None:
    golden, layout = stored("llama31", int8=True), layout_on(mesh, rules)
    one, tokens = golden.model, golden.tokens[:2, :9]
    split = load_llama(GOLDEN / "llama31", layout=layout, int8=True)
    for name, spec in parameter_specs(one.config, INT8).items():
        value, wanted = split.parameters()[name], layout.sharding(spec.axes, spec.shape)
        np.testing.assert_array_equal(value, one.parameters()[name])
        assert value.sharding.is_equivalent_to(wanted, value.ndim), name
    np.testing.assert_allclose(uncached(split, tokens), uncached(one, tokens), atol=1e-4)


def test_the_device_keeps_int8() -> None:
    """A compiled pass takes a byte for each weight, and has no room for them widened at once."""
    config = dataclasses.replace(
        preset("llama-3.2-1b"), num_layers=12, embed_size=256, ffw_size=1024, vocab_size=512,
        num_heads=8, num_kv_heads=2, head_size=32,
    )  # fmt: skip
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype or jnp.float32)
        for name, spec in parameter_specs(config, INT8).items()
    }

    def run(parameters: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        model, visible = Llama(config, parameters), jnp.ones((1, 1, 1), bool)
        return model.logits(model.uncached_and_inputs(tokens, jnp.zeros_like(tokens), visible)[0])

    compiled = jax.jit(run).lower(shapes, jax.ShapeDtypeStruct((1, 1), jnp.int32)).compile()
    memory = compiled.memory_analysis()
    num_bytes = sum(shape.size for shape in shapes.values() if shape.dtype == jnp.int8)
    assert memory.argument_size_in_bytes < 1.1 * num_bytes
    assert memory.temp_size_in_bytes < num_bytes


def test_a_cpus_program_has_only_the_products_once_for_each_layer() -> None:
    """So it is compiled in seconds, and still reads each matrix where it lies."""
    loops, room = set(), 0
    for num_layers in (2, 6):
        config = dataclasses.replace(
            preset("llama-3.2-1b"), num_layers=num_layers, embed_size=256, ffw_size=1024,
            vocab_size=512, num_heads=8, num_kv_heads=2, head_size=32,
        )  # fmt: skip
        parameters = {
            name: jnp.zeros(spec.shape, spec.dtype or jnp.float32)
            for name, spec in parameter_specs(config, INT8).items()
        }
        model = Llama(config, parameters).unstacked()

        def run(parameters: dict[str, jax.Array], cache: KVCache, config=config) -> jax.Array:
            return Llama(config, parameters).hidden(jnp.zeros((2, 3), jnp.int32), cache)[0]

        cache = empty_cache(config, 2, 64, jnp.dtype("float32"))
        compiled = jax.jit(run).lower(model.parameters(), cache).compile()
        loops.add(compiled.as_text().count(" while("))
        room = compiled.memory_analysis().temp_size_in_bytes
    assert len(loops) == 1
    assert room < model.parameters()["gate"][0].nbytes


def test_the_qwix_that_vllm_for_tpu_asks_for_has_the_same_integers(monkeypatch: Patch) -> None:
    import qwix.pallas

    monkeypatch.setitem(sys.modules, "qwix.pallas", qwix.pallas)
    monkeypatch.setitem(sys.modules, "qwix", ModuleType("qwix"))  # without `quantize`
    made = spec_from_file_location("llama_with_older_qwix", llama.__file__)
    with_older = module_from_spec(made)
    made.loader.exec_module(with_older)
    spec = ParameterSpec((128, 6), ("embed", "ffw"), ("embed",))
    matrix, x = (jax.random.normal(jax.random.key(0), shape) for shape in (spec.shape, (1, 5, 128)))
    wanted = {one: quantised(matrix, spec, one) for one in (INT8, SELF_DRAFTS["int4"])}
    integers, scales = wanted[INT8]
    given = (x, integers.T, scales)
    assert np.array_equal(with_older.of_integers(*given), llama.of_integers(*given))
    monkeypatch.setattr(quantise, "quantize", with_older.quantize)
    for matrices, expected in wanted.items():
        found = quantised(matrix, spec, matrices)
        assert all(map(np.array_equal, found, expected))
