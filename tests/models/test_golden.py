"""Logits equal those of transformers, for every family and every way of quantising.

And int8 matrices and products: what is stored, in which order it is multiplied, that it fits.
"""

import dataclasses
import functools
import itertools
import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import BITS_OF_TINY_HEADS, GOLDEN, altered, assert_same, layout_on
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_types import Patch
from random_pairs import logits_of
from refusals import assert_refused
from safetensors.numpy import load_file

from fly_jax.models import integers, llama, quantise
from fly_jax.models.architectures import INT8, ParameterSpec, parameter_specs, scale_of
from fly_jax.models.cache import KVCache, NewEntries, empty_cache
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.write import convert, save_hf
from fly_jax.models.integers import behind, of_integers
from fly_jax.models.llama import Llama, in_front, matmul, turned_equation
from fly_jax.models.presets import preset
from fly_jax.models.quantise import SELF_DRAFTS, quantised

# What makes a kind another model than the ones before it: without it the logits are wrong.
KINDS: dict[str, dict[str, object]] = {
    "llama2": {"rope_theta": 20_000.0}, "llama3": {"rope_theta": 10_000.0},
    "llama31": {"rope_scaling": None}, "llama32": {"rope_scaling": None},
    "mistral": {"sliding_window": None}, "qwen2": {"attention_biases": False},
    "qwen2_windows": {"windowed_layers": (0, 1, 2)}, "qwen3": {"head_norms": False},
    "smollm3": {"unrotated_layers": ()}, "qwen3_yarn": {"rope_scaling": None},
}  # fmt: skip
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Golden:
    """A tiny model, and what transformers computes with it."""

    kind: str
    model: Llama
    tokens: np.ndarray
    logits: np.ndarray


def stored(kind: str, *, int8: bool = False) -> Golden:
    numbers = np.load(GOLDEN / kind / "golden.npz")
    model = load_llama(GOLDEN / kind, int8=int8)
    return Golden(kind, model, numbers["tokens"], numbers["logits"])


@pytest.fixture(scope="module", params=KINDS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return stored(request.param)


def uncached(model: Llama, tokens: np.ndarray) -> np.ndarray:
    """Logits [rows, time, vocab] of whole sequences."""
    return np.asarray(logits_of(model, tokens))


# Columns: how many tokens each of the three rows takes; the widest is the chunk's width, and what
# a row does not take of it is fed all the same, as garbage that must leave no trace.
PREFILL = ((25, 9, 1),)
BLOCKS = ((4, 7, 2), (0, 7, 7), (7, 1, 3), (7, 0, 7))
SINGLES = ((1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1))


def cached(model: Llama, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits fed in ragged chunks, NaN where a row was not fed; and the rows' lengths."""
    config, (rows, time) = model.config, tokens.shape

    @jax.jit
    def step(
        model: Llama, fed: np.ndarray, cache: KVCache, taken: np.ndarray
    ) -> tuple[jax.Array, KVCache]:
        hidden, cache = model.extend(fed, cache)
        return model.logits(hidden), cache.with_length(cache.length + taken)

    cache = empty_cache(config, rows, time + 8, jnp.float32)
    found = np.full((rows, time, config.vocab_size), np.nan, np.float32)
    lengths = np.zeros(rows, np.int32)
    garbage = np.random.default_rng(0)
    for chunk in PREFILL + BLOCKS + SINGLES:
        taken = np.array(chunk, np.int32)
        fed = garbage.integers(0, config.vocab_size, (rows, max(chunk)), dtype=np.int32)
        for row, count in enumerate(chunk):
            fed[row, :count] = tokens[row, lengths[row] : lengths[row] + count]
        logits, cache = step(model, fed, cache, taken)
        for row, count in enumerate(chunk):
            found[row, lengths[row] : lengths[row] + count] = logits[row, :count]
        lengths += taken
        np.testing.assert_array_equal(cache.length, lengths)
    return found, lengths


def test_uncached_pass_and_cached_pass_in_ragged_chunks(golden: Golden) -> None:
    whole = uncached(golden.model, golden.tokens)
    assert np.abs(whole - golden.logits).max() <= TOLERANCE
    found, lengths = cached(golden.model, golden.tokens)
    assert len(set(lengths)) == len(lengths) > 1
    for row, length in enumerate(lengths):
        assert np.abs(found[row, :length] - golden.logits[row, :length]).max() <= TOLERANCE
        assert np.abs(found[row, :length] - whole[row, :length]).max() <= TOLERANCE


def test_fixtures_tell_right_from_wrong(golden: Golden) -> None:
    """The model of another kind misses the tolerance, so passing means something."""
    config = dataclasses.replace(golden.model.config, **KINDS[golden.kind])
    assert config != golden.model.config
    other = Llama(config, golden.model.parameters())
    assert np.abs(uncached(other, golden.tokens) - golden.logits).max() > 100 * TOLERANCE


def test_sharded_checkpoint_is_the_single_file() -> None:
    """On one device, and on a mesh."""
    assert len(list((GOLDEN / "llama3_sharded").glob("*.safetensors"))) > 1
    for mesh in (None, "2x2"):
        found = load_llama(GOLDEN / "llama3_sharded", layout=layout_on(mesh))
        assert_same(found, load_llama(GOLDEN / "llama3"))


def test_an_empty_cache_may_be_donated_whole() -> None:
    config = load_llama(GOLDEN / "llama2").config
    ones = jax.jit(lambda cache: jax.tree.map(lambda leaf: leaf + 1, cache), donate_argnums=0)
    cache = ones(empty_cache(config, 2, 8, jnp.dtype("float32")))
    assert float(cache.keys.sum()) == float(cache.values.sum()) == cache.keys.size


QUANTISED = Path(__file__).parents[1] / "fixtures" / "quantised"


@pytest.mark.parametrize("kind", sorted(path.name for path in QUANTISED.iterdir()))
def test_golden_logits(kind: str) -> None:
    """Those of transformers with the matrices as the format's own code widens them."""
    stored = np.load(QUANTISED / kind / "golden.npz")
    found = uncached(load_llama(QUANTISED / kind, dtype=jnp.float32), stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], atol=1e-4)


@pytest.mark.parametrize("mesh", [None, "2x2"])
def test_a_scale_for_a_whole_matrix(mesh: str | None, tmp_path: Path) -> None:
    """As AutoFP8 stores it, in floats; the cache has no scale here."""
    stored = load_file(QUANTISED / "int/model.safetensors")
    scales = {name: np.array(0.5, np.float32) for name in stored if name.endswith("weight_scale")}
    others = {"model.layers.0.self_attn.kv_scale": np.array(2, np.float32)}
    said = packed("int-quantized", num_bits=8, strategy="tensor")
    given = {"quantization_config": said}, scales | others
    folder = altered(QUANTISED / "int", tmp_path, *given)
    found = load_llama(folder, dtype=jnp.float32, layout=layout_on(mesh)).parameters()["down"][0]
    weights = stored["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(found, 0.5 * weights.T)


def test_a_mesh_and_a_conversion_give_the_same_parameters(tmp_path: Path) -> None:
    alone = load_llama(QUANTISED / "awq", dtype=jnp.float32)
    assert_same(load_llama(QUANTISED / "awq", dtype=jnp.float32, layout=layout_on("2x2")), alone)
    convert(QUANTISED / "awq", tmp_path / "converted", "float32")
    assert_same(load_llama(tmp_path / "converted", dtype=jnp.float32), alone)
    assert "quantization_config" not in json.loads((tmp_path / "converted/config.json").read_text())


def test_requantised_to_int8() -> None:
    wide = load_llama(QUANTISED / "gptq", dtype=jnp.float32).parameters()
    rounded = load_llama(QUANTISED / "gptq", dtype=jnp.float32, int8=True).parameters()
    assert rounded["gate"].dtype == jnp.int8
    found = rounded["gate"] * rounded["gate_scale"][:, None]
    step = np.abs(wide["gate"]).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(found - wide["gate"]) <= 0.51 * step)


def packed(form: str, **weights: object) -> dict[str, object]:
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
NVFP4 = "nvfp4-pack-quantized"
OTHER_WAYS: dict[str, dict[str, object]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"}, "gemv": AWQ | {"version": "gemv"},
    "3": AWQ | {"quant_method": "gptq", "bits": 3},
    NVFP4: packed(NVFP4, num_bits=4, strategy="tensor_group"),
}  # fmt: skip
PACKED = packed("pack-quantized", num_bits=4, strategy="group", group_size=16)
WRONG: list[tuple[str, object]] = [
    ("describes weights.* in a way", PACKED | {"sparsity_config": {"format": "sparse-bitmask"}}),
    ("lacks the tensor", PACKED | {"sparsity_config": {"format": "dense"}}),
    *((f"quantised in a way.*{named}.*give such", said) for named, said in OTHER_WAYS.items()),
    ("in a way that fly_jax does not read", {"bits": 4}), ("a size of 0", AWQ | {"group_size": 0}),
    ("is not described as expected", {"quant_method": "awq", "bits": 4}),
    ("is not described as expected", "awq"), ("lacks the tensor .*q_proj.weight_packed", PACKED),
    ("in groups of 48", AWQ | {"group_size": 48}),
    (r"qzeros.* has shape \[2, 8\].* asks for \[4, 8\]", AWQ | {"group_size": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "said"), WRONG)
def test_wrong_descriptions(message: str, said: object, tmp_path: Path) -> None:
    """Other ways are named before any tensor."""
    folder = altered(QUANTISED / "awq", tmp_path, {"quantization_config": said}, {})
    assert_refused(message, open_weights, folder)


def test_parts_that_are_missing_or_damaged(tmp_path: Path) -> None:
    name, damaged = "model.layers.0.mlp.up_proj.g_idx", np.full(32, 7, np.int32)
    for value, words in ((None, r"lacks the tensor .*g_idx"), (damaged, "holds NaN or infinite")):
        folder = altered(QUANTISED / "gptq", tmp_path, {}, {name: value})
        assert_refused(rf"up_proj.*{words}" if value is not None else words, load_llama, folder)


# With tied embeddings, windows, biases and norms of heads: what a matrix or its scale may meet.
@pytest.fixture(scope="module", params=["llama32", "mistral", "qwen2", "qwen3"])
def rounded(request: pytest.FixtureRequest) -> Golden:
    return stored(request.param, int8=True)


def assert_near(found: np.ndarray, expected: np.ndarray, least_agreement: float) -> None:
    """Golden logits (standard deviation 1) of tiny random models, so that every rounding shows."""
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
            scale = jnp.expand_dims(parameters.pop(scale_of(name)), axes)
            parameters[name] = parameters[name].astype(jnp.float32) * scale
    return Llama(model.config, parameters)


def test_golden_logits_are_kept(rounded: Golden) -> None:
    assert rounded.model.has_integers
    logits = uncached(rounded.model, rounded.tokens)
    assert_near(logits, rounded.logits, 0.92)
    assert np.abs(logits - uncached(widened(rounded.model), rounded.tokens)).max() <= 1e-4


@pytest.mark.parametrize("kind", ["llama2", "smollm3"])
def test_one_array_per_layer_where_activations_are_rounded_too(kind: str) -> None:
    golden = stored(kind, int8=True)
    found, _ = cached(golden.model.unstacked(), golden.tokens)
    fed = ~np.isnan(found[..., 0])
    assert_near(found[fed], golden.logits[fed], 0.87)


# Rows, and how many tokens each pass is fed: more than attention reads at a time, too.
PASSES = {"by two to nine": ([0], (2, 4, 9)), "at once": ([0], (150,))}
PASSES |= {"beside others": ([2, 0], (1, 5)), "in a batch": ([1, 1, 0, 2, 2], (1, 17))}


@functools.cache
def fed(kind: str, rows: tuple[int, ...], widths: tuple[int, ...]) -> list[np.ndarray]:
    """Logits, keys and values of the rows that were fed so many tokens at a time."""
    model = stored(kind, int8=True).model.unstacked()
    config = model.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 150), np.int32)[[*rows]]
    time = tokens.shape[1]

    @functools.partial(jax.jit, static_argnames="attended")
    def step(
        model: Llama, some: np.ndarray, cache: KVCache, attended: int | None
    ) -> tuple[jax.Array, KVCache]:
        hidden, cache = model.extend(some, cache.attending(attended))
        return model.logits(hidden), cache.attending(None)

    cache, logits, at = empty_cache(config, len(rows), time + 11, jnp.float32), [], 0
    turns = itertools.cycle(widths)
    while at < time:
        some = tokens[:, at : at + next(turns)]
        # All of the cache, but a token that is fed alone, which attends to no more than it must.
        attended = -(-at // 64) * 64 if widths == (1,) else None
        found, cache = step(model, some, cache, attended)
        logits.append(found)
        at += some.shape[1]
        cache = cache.with_length(jnp.full(len(rows), at, jnp.int32))
    entries = [one[:, :, :, :time].swapaxes(0, 1) for one in (cache.keys, cache.values)]
    return [np.asarray(one) for one in (jnp.concatenate(logits, axis=1), *entries)]


# Over a model with biases and windows, and once over others, of one whose heads share no keys.
TINY = [*((name, "qwen2_windows") for name in list(PASSES)[:3]), ("by two to nine", "llama2")]
OF_TINY = [pytest.param(*one, marks=BITS_OF_TINY_HEADS) for one in TINY]


@pytest.mark.parametrize(("name", "kind"), [*OF_TINY, ("in a batch", "qwen3")])
def test_a_token_gets_the_same_bits_whatever_is_fed_beside_it(name: str, kind: str) -> None:
    rows, widths = PASSES[name]
    expected = fed(kind, (0,), (1,))
    for one, alone in zip(fed(kind, tuple(rows), widths), expected, strict=True):
        np.testing.assert_array_equal(one[rows.index(0)], alone[0])


def test_a_machine_that_multiplies_unsigned_matrices_gets_the_same_bits(monkeypatch: Patch) -> None:
    found, kinds = [], []
    for is_unsigned in (False, True):
        monkeypatch.setattr(llama, "multiplies_unsigned", lambda known=is_unsigned: known)
        model = stored("qwen3", int8=True).model.unstacked()
        kinds.append({name: model.parameters()[name] for name in ("embedding", "up")})
        found.append(fed.__wrapped__("qwen3", (0, 2), (5,)))
        assert_same(model.stacked(), stored("qwen3", int8=True).model)
    assert [one["up"][0].dtype for one in kinds] == [jnp.int8, jnp.uint8]
    assert [one["embedding"].dtype for one in kinds] == [jnp.int8, jnp.uint8]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_specs_describe_the_parameters(rounded: Golden) -> None:
    specs, found = parameter_specs(rounded.model.config, INT8), rounded.model.parameters()
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (spec.shape, spec.dtype or rounded.model.dtype) for name, spec in specs.items()
    }


def test_405b_in_int8() -> None:
    """Every matrix is int8, and a scale lies where its outputs do."""
    config = preset("llama-3.1-405b")
    plain, specs = parameter_specs(config), parameter_specs(config, INT8)
    assert {name for name in specs if specs[name].dtype == jnp.int8} == {
        "embedding", "query", "key", "value", "output", "gate", "up", "down", "unembedding"
    }  # fmt: skip
    scales = {scale_of(name) for name, spec in plain.items() if spec.inputs}
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


NARROW = dataclasses.replace(
    preset("llama-3.2-1b"), embed_size=256, ffw_size=1024, vocab_size=512, num_heads=8,
    num_kv_heads=2, head_size=32,
)  # fmt: skip


def test_the_device_keeps_int8() -> None:
    """A compiled pass takes a byte for each weight, and has no room for them widened at once."""
    config = dataclasses.replace(NARROW, num_layers=12)
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
        config = dataclasses.replace(NARROW, num_layers=num_layers)
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
    made = spec_from_file_location("integers_with_older_qwix", integers.__file__)
    with_older = module_from_spec(made)
    made.loader.exec_module(with_older)
    spec = ParameterSpec((128, 6), ("embed", "ffw"), ("embed",))
    matrix, x = (jax.random.normal(jax.random.key(0), shape) for shape in (spec.shape, (1, 5, 128)))
    wanted = {one: quantised(matrix, spec, one) for one in (INT8, SELF_DRAFTS["int4"])}
    rounded, scales = wanted[INT8]
    given = (x, rounded.T, scales)
    assert np.array_equal(with_older.of_integers(*given), of_integers(*given))
    monkeypatch.setattr(quantise, "quantize", with_older.quantize)
    for matrices, expected in wanted.items():
        assert all(map(np.array_equal, quantised(matrix, spec, matrices), expected))


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
        turned, equation_of_it = matrix.transpose(outputs_first), turned_equation(equation)
        return [(in_front(equation_of_it, x, turned), matmul(equation, x, matrix)) for x in xs]

    matrix = array(stored)
    for found, expected in both([array(letters, *few) for few in FEW], matrix):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # Of integers, as a TPU multiplies them, and one CPU device.
    matrix, x = np.round(50 * matrix).astype(np.int8), array(letters, 2, 3)
    found, turned = behind(equation, x, matrix), matrix.transpose(outputs_first)
    scale = np.ones(found.shape[2:], np.float32)
    np.testing.assert_allclose(found, of_integers(x, turned, scale), rtol=1e-6)


def test_bfloat16_is_summed_in_float32_where_that_is_asked_for() -> None:
    x = jnp.full((1, 5, 64), 1 / 3, jnp.bfloat16)
    matrix = jnp.full((7, 64), 1 / 3, jnp.bfloat16)
    for dtype in (None, jnp.float32):
        found = in_front("btd,vd->btv", x, matrix, dtype)
        expected = matmul("btd,vd->btv", x, matrix, dtype)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.sampled_from([24, 23, 22, 20, "heads"]))
def test_integers_are_summed_exactly(rows: int, time: int, drawn_outputs: int | str) -> None:
    """A token's numbers become the nearest integers, and sums of integers know no order.

    Before one token the rows of four outputs (uint8: eight) are joined, before two those of two
    (four), before four tokens those of two where the matrix is uint8, if all are.
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
    same = np.asarray(jax.jit(of_integers)(x, integers.unsigned(matrix), scale))
    np.testing.assert_array_equal(same, found)
    assert found.shape == (rows, time, *scale.shape)
    alone = np.asarray(jax.jit(of_integers)(x[-1:, -1:], matrix, scale))
    np.testing.assert_array_equal(found[-1, -1], alone[0, 0])
    which = draw.integers(0, 96, (rows, time), np.int32)  # looked up as on a TPU
    looked_up = integers.rows_by_tiles(jnp.eye(96, dtype=jnp.int8), which)
    np.testing.assert_array_equal(looked_up.argmax(axis=-1), which)
    found, x = found.reshape(rows, time, number + 96), x.reshape(rows, time, 96)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    step = np.where(largest == 0, 1, largest / np.float32(127.5))
    rounded = np.round(found[..., number:] / step)
    assert np.abs(rounded * step - x).max() <= 0.501 * step.max()
    assert (np.abs(rounded).max(axis=-1) >= 127)[largest[..., 0] > 0].all()
    sums = rounded @ drawn.T.astype(np.float64)
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
    logits_of.clear_cache()  # so that it is traced as it is patched
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
