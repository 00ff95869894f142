"""Logits equal those of transformers, for every family and every way of quantising."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, altered, assert_same, layout_on
from refusals import assert_refused

from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.write import convert
from fly_jax.models.llama import Llama

# What makes a kind another model than the ones before it: without it the logits are wrong.
KINDS: dict[str, dict[str, object]] = {
    "llama2": {"rope_theta": 20_000.0},
    "llama3": {"rope_theta": 10_000.0},
    "llama31": {"rope_scaling": None},
    "llama32": {"rope_scaling": None},
    "mistral": {"sliding_window": None},
    "qwen2": {"attention_biases": False},
    "qwen2_windows": {"windowed_layers": (0, 1, 2)},
    "qwen3": {"head_norms": False},
    "smollm3": {"unrotated_layers": ()},
    "qwen3_yarn": {"rope_scaling": None},
}
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
    config, layout, (rows, time) = model.config, model.layout, tokens.shape
    positions = np.broadcast_to(np.arange(time), (rows, time))
    visible = np.broadcast_to(np.tri(time, dtype=bool), (rows, time, time))

    @jax.jit
    def run(parameters: dict[str, jax.Array]) -> jax.Array:
        model = Llama(config, parameters, layout)
        return model.logits(model.uncached_and_inputs(tokens, positions, visible)[0])

    return np.asarray(run(model.parameters()))


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
        parameters: dict[str, jax.Array], fed: np.ndarray, cache: KVCache, taken: np.ndarray
    ) -> tuple[jax.Array, KVCache]:
        model = Llama(config, parameters)
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
        logits, cache = step(model.parameters(), fed, cache, taken)
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
    assert len(list((GOLDEN / "llama3_sharded").glob("*.safetensors"))) > 1
    assert_same(load_llama(GOLDEN / "llama3_sharded"), load_llama(GOLDEN / "llama3"))


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


def test_a_mesh_and_a_conversion_give_the_same_parameters(tmp_path: Path) -> None:
    alone = load_llama(QUANTISED / "awq", dtype=jnp.float32).parameters()
    split = load_llama(QUANTISED / "awq", dtype=jnp.float32, layout=layout_on("2x2")).parameters()
    convert(QUANTISED / "awq", tmp_path / "converted", "float32")
    again = load_llama(tmp_path / "converted", dtype=jnp.float32).parameters()
    for name, parameter in alone.items():
        np.testing.assert_array_equal(parameter, split[name])
        np.testing.assert_array_equal(parameter, again[name])
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
    "mxfp4": {"quant_method": "mxfp4"},
    "gemv": AWQ | {"version": "gemv"},
    "3": AWQ | {"quant_method": "gptq", "bits": 3},
    NVFP4: packed(NVFP4, num_bits=4, strategy="tensor_group"),
}
PACKED = packed("pack-quantized", num_bits=4, strategy="group", group_size=16)
WRONG: list[tuple[str, object]] = [
    *((f"quantised in a way.*{named}.*give such", said) for named, said in OTHER_WAYS.items()),
    ("in a way that fly_jax does not read", {"bits": 4}),
    ("is not described as expected", {"quant_method": "awq", "bits": 4}),
    ("is not described as expected", "awq"),
    ("a size of 0", AWQ | {"group_size": 0}),
    ("in groups of 48", AWQ | {"group_size": 48}),
    (r"qzeros.* has shape \[2, 8\].* asks for \[4, 8\]", AWQ | {"group_size": 8}),
    ("lacks the tensor .*q_proj.weight_packed", PACKED),
]


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
