"""A drafter from the target itself: its own matrices, rounded to 8 or 4 bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, layout_on
from random_pairs import batch_engine, greedy, logits_after, until_end
from tiny_pair import CONFIG, write_tokenizer

import fly_jax
from fly_jax import Exact, FlyJaxError
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.launch.__main__ import main
from fly_jax.models.architectures import INT8, parameter_specs, scale_groups, scale_name
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.llama import Llama
from fly_jax.models.quantise import SELF_DRAFTS, self_draft
from fly_jax.sharding.rules import Layout

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
SPEC = RoundSpec(Exact(), RoundStatic(3, eos_token_ids=(2,)))


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def target(request: pytest.FixtureRequest) -> Llama:
    return load_llama(GOLDEN / request.param)


def on_a_mesh(target: Llama) -> tuple[Llama, Layout]:
    layout = layout_on("2x2")
    folder = "qwen2" if target.config.attention_biases else "llama3"
    return load_llama(GOLDEN / folder, layout=layout), layout


def widened(draft: Llama, name: str) -> np.ndarray:
    """A stack of matrices, as numbers."""
    values = draft.parameters()
    matrix, scale = (np.asarray(values[one], np.float32) for one in (name, scale_name(name)))
    spec = parameter_specs(draft.config)[name]
    if scale.ndim == matrix.ndim:
        axis, group = scale_groups(spec, 64)
        return matrix * np.repeat(scale, group, axis)
    return matrix * np.expand_dims(scale, [spec.axes.index(one) for one in spec.inputs])


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_each_number_is_the_nearest(target: Llama, name: str) -> None:
    draft, most = self_draft(target, SELF_DRAFTS[name]), {"int8": 127, "int4": 7}[name]
    wide = target.parameters()
    for one, spec in parameter_specs(target.config).items():
        if spec.axes[0] != "layers" or not spec.inputs:
            assert draft.parameters()[one] is wide[one], "the same array, not another one"
            continue
        assert draft.parameters()[one].dtype == SELF_DRAFTS[name].dtype
        inputs = tuple(spec.axes.index(axis) for axis in spec.inputs)
        matrix = np.asarray(wide[one])
        largest = np.abs(matrix)
        if name == "int4":  # of each group
            axis, group = scale_groups(spec, 64)
            shape = (*matrix.shape[:axis], -1, group, *matrix.shape[axis + 1 :])
            largest = np.repeat(largest.reshape(shape).max(axis=axis + 1), group, axis)
        else:
            largest = largest.max(axis=inputs, keepdims=True)
        assert (np.abs(widened(draft, one) - matrix) <= 0.51 * largest / most).all(), one


@pytest.mark.parametrize("name", SELF_DRAFTS)
@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_kept_as_int8_it_holds_nearly_the_same_numbers(target: Llama, name: str, mesh: str) -> None:
    spread, layout = (target, None) if mesh == "1x1" else on_a_mesh(target)
    rounded = self_draft(spread, SELF_DRAFTS[name])
    kept = self_draft(spread, SELF_DRAFTS[name], held=INT8)
    specs = parameter_specs(target.config, INT8)
    for one, spec in parameter_specs(target.config).items():
        values = kept.parameters()[one]
        if spec.axes[0] == "layers" and spec.inputs:
            assert values.dtype == jnp.int8
            assert kept.parameters()[scale_name(one)].shape == specs[scale_name(one)].shape
            expected = widened(rounded, one)
            step = 0.51 * np.abs(expected).max() / 127 if name == "int4" else 1e-6
            assert np.abs(widened(kept, one) - expected).max() <= step, one
        if layout is not None:
            wanted = layout.sharding(spec.axes, spec.shape)
            assert values.sharding.is_equivalent_to(wanted, values.ndim), one


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_exact_decoding_is_the_targets(target: Llama, name: str) -> None:
    expected = [until_end(one, (2,)) for one in greedy(target, PROMPTS, 16)]
    draft = self_draft(target, SELF_DRAFTS[name])
    found = batch_engine(target, draft, SPEC, 2).generate(PROMPTS, 16)
    assert [one.token_ids for one in found] == expected
    assert sum(one.num_accepted_tokens for one in found) > 0
    same = [logits_after(one, PROMPTS[0]) for one in (draft, draft.unstacked())]
    # Unstacked, the activations are rounded to int8, too.
    np.testing.assert_allclose(*same, atol=1e-4 if name == "int4" else 0.1)


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_a_mesh_rounds_alike(target: Llama, name: str) -> None:
    alone = self_draft(target, SELF_DRAFTS[name]).parameters()
    spread, layout = on_a_mesh(target)
    for one, values in self_draft(spread, SELF_DRAFTS[name]).parameters().items():
        np.testing.assert_array_equal(values, alone[one], err_msg=one)
        spec = parameter_specs(target.config, SELF_DRAFTS[name])[one]
        expected = layout.sharding(spec.axes, spec.shape)
        assert values.sharding.is_equivalent_to(expected, values.ndim), one


def test_an_int8_target_drafts_with_4_bits() -> None:
    target = load_llama(GOLDEN / "llama3", int8=True)
    draft = self_draft(target, SELF_DRAFTS["int4"])
    assert draft.parameters()["query"].dtype == jnp.int4
    assert draft.parameters()["embedding"] is target.parameters()["embedding"]
    wide = widened(target, "up")
    assert np.abs(widened(draft, "up") - wide).max() <= 0.51 * np.abs(wide).max() / 7


def test_the_library_and_the_command_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    target = str(EMBEDDED_PAIR[0])
    pair = fly_jax.load_pair(target, "self:int4")
    assert pair.draft is not None
    # A CPU multiplies int8, and nothing narrower.
    assert pair.draft.parameters()["query"][0].dtype == jnp.int8
    given = {"rule": "exact", "num_speculative_tokens": 4, "max_new_tokens": 24}
    (found,) = fly_jax.generate(pair, ["import os\n"], **given)
    assert found.mean_accepted_tokens > 2
    arguments = ["--target", target, "--draft=self:int4", "--prompt=import os\n", "--nochat"]
    assert main([*arguments, *(f"--{name}={value}" for name, value in given.items())]) == 0
    assert pair.tokenizer.decode(found.token_ids, continues=True) in capsys.readouterr().out


def test_what_is_not_rounded_is_in_memory_once(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=False)
    save_hf(Llama.random(config, jax.random.key(0)), tmp_path, jnp.float32)
    write_tokenizer(tmp_path)
    pair = fly_jax.load_pair(tmp_path, "self:int4", dtype="float32")
    assert pair.draft is not None
    assert pair.target.is_unstacked
    assert pair.draft.is_unstacked
    own, drafts = pair.target.parameters(), pair.draft.parameters()
    for name in ("embedding", "unembedding", "final_norm"):
        assert drafts[name] is own[name]
    of_unstacked = self_draft(pair.target, SELF_DRAFTS["int4"], held=INT8).parameters()
    for name, values in pair.draft.stacked().parameters().items():
        np.testing.assert_array_equal(of_unstacked[name], values, err_msg=name)


def test_what_cannot_be() -> None:
    with pytest.raises(FlyJaxError, match=r"no draft 'self:int3'.*self:int8 or self:int4"):
        fly_jax.load_pair(EMBEDDED_PAIR[0], "self:int3", dtype="float32")
    with pytest.raises(FlyJaxError, match="matrices are int8 themselves"):
        fly_jax.load_pair(EMBEDDED_PAIR[0], "self:int8", dtype="int8")
    with pytest.raises(FlyJaxError, match="proposes alone"):
        fly_jax.load_pair(EMBEDDED_PAIR[0], ["self:int4", "ngram"], dtype="float32")
