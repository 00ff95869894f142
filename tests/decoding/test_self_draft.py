"""Drafts by their files: the target's own matrices, rounded or of some tokens; PARD; padding."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from golden import BITS_OF_TINY_HEADS, GOLDEN, altered, assert_same, layout_on
from launch_types import Folders
from refusals import assert_refused
from safetensors.numpy import load_file
from tiny_pair import CONFIG, VOCAB_SIZE, write_tokenizer

from fly_jax import Generation, Pair, Why, generate, load_pair
from fly_jax.decoding.pair import open_pair
from fly_jax.models.architectures import INT8, parameter_specs, scale_groups, scale_of
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.checkpoints.write import save_hf
from fly_jax.models.integers import signed
from fly_jax.models.llama import Llama
from fly_jax.models.quantise import SELF_DRAFTS, self_draft
from fly_jax.models.tokenizer import load_tokenizer

FAMILIES = {"int8": "llama3", "int4": "qwen2"}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(name: str) -> Llama:
    return load_llama(GOLDEN / FAMILIES[name])


@pytest.fixture(scope="module")
def draft(target: Llama, name: str) -> Llama:
    return self_draft(target, SELF_DRAFTS[name])


def widened(draft: Llama, name: str) -> np.ndarray:
    """A stack of matrices, as numbers."""
    values = draft.parameters()
    matrix, scale = (np.asarray(values[one], np.float32) for one in (name, scale_of(name)))
    spec = parameter_specs(draft.config)[name]
    if scale.ndim == matrix.ndim:
        axis, group = scale_groups(spec, 64)
        return matrix * np.repeat(scale, group, axis)
    return matrix * np.expand_dims(scale, [spec.axes.index(one) for one in spec.inputs])


def test_each_number_is_the_nearest(target: Llama, draft: Llama, name: str) -> None:
    wide, most = target.parameters(), {"int8": 127, "int4": 7}[name]
    for one, spec in parameter_specs(target.config).items():
        if spec.axes[0] != "layers" or not spec.inputs:
            assert draft.parameters()[one] is wide[one], "the same array, not another one"
            continue
        assert draft.parameters()[one].dtype == SELF_DRAFTS[name].dtype
        matrix = np.asarray(wide[one])
        if name == "int4":  # of each group
            axis, group = scale_groups(spec, 64)
            shape = (*matrix.shape[:axis], -1, group, *matrix.shape[axis + 1 :])
            largest = np.repeat(np.abs(matrix).reshape(shape).max(axis=axis + 1), group, axis)
        else:
            inputs = tuple(spec.axes.index(axis) for axis in spec.inputs)
            largest = np.abs(matrix).max(axis=inputs, keepdims=True)
        assert (np.abs(widened(draft, one) - matrix) <= 0.51 * largest / most).all(), one


def test_a_mesh_rounds_alike_and_int8_holds_nearly_the_same_numbers(
    target: Llama, draft: Llama, name: str
) -> None:
    layout = layout_on("2x2")
    assert layout is not None
    spread = pairs.placed(target, layout)
    rounded, kept = (self_draft(spread, SELF_DRAFTS[name], **held) for held in ({}, {"held": INT8}))
    assert_same(rounded, draft)
    for model, kind in ((rounded, SELF_DRAFTS[name]), (kept, INT8)):
        for one, spec in parameter_specs(target.config, kind).items():
            if one in model.parameters():
                values, wanted = model.parameters()[one], layout.sharding(spec.axes, spec.shape)
                assert values.sharding.is_equivalent_to(wanted, values.ndim), one
    specs = parameter_specs(target.config, INT8)
    for one, spec in parameter_specs(target.config).items():
        if spec.axes[0] == "layers" and spec.inputs:
            assert kept.parameters()[one].dtype == jnp.int8
            assert kept.parameters()[scale_of(one)].shape == specs[scale_of(one)].shape
            expected = widened(rounded, one)
            step = 0.51 * np.abs(expected).max() / 127 if name == "int4" else 1e-6
            assert np.abs(widened(kept, one) - expected).max() <= step, one


def test_exact_decoding_is_the_targets(target: Llama, draft: Llama, name: str) -> None:
    spec = pairs.rounds(3, eos_token_ids=(2,))
    found = pairs.batch_engine(target, draft, spec, 2).generate(pairs.PROMPTS, 16)
    assert pairs.tokens_of(found) == pairs.autoregressive(target, pairs.PROMPTS, 16, eos=(2,))
    assert sum(one.num_accepted_tokens for one in found) > 0
    same = [pairs.logits_after(one, pairs.PROMPTS[2]) for one in (draft, draft.unstacked())]
    # Unstacked, the activations are rounded to int8, too.
    np.testing.assert_allclose(*same, atol=1e-4 if name == "int4" else 0.1)


def test_an_int8_target_drafts_with_4_bits() -> None:
    target = load_llama(GOLDEN / "llama3", int8=True)
    draft = self_draft(target, SELF_DRAFTS["int4"])
    assert draft.parameters()["query"].dtype == jnp.int4
    assert draft.parameters()["embedding"] is target.parameters()["embedding"]
    wide = widened(target, "up")
    assert np.abs(widened(draft, "up") - wide).max() <= 0.51 * np.abs(wide).max() / 7


def test_the_pair_that_ships_drafts_with_its_own_matrices() -> None:
    pair = load_pair(EMBEDDED_PAIR[0], "self:int4")
    assert pair.draft is not None
    # A CPU multiplies int8, and nothing narrower.
    assert signed(pair.draft.parameters()["query"][0]).dtype == jnp.int8
    given = {"rule": "exact", "num_speculative_tokens": 4, "max_new_tokens": 24}
    (found,) = generate(pair, ["import os\n"], **given)
    assert found.mean_accepted_tokens > 2


def test_what_is_not_rounded_is_in_memory_once(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=False)
    save_hf(Llama.random(config, jax.random.key(0)), tmp_path, jnp.float32)
    write_tokenizer(tmp_path)
    pair = load_pair(tmp_path, "self:int4", dtype="float32")
    assert pair.draft is not None
    assert pair.target.is_unstacked
    assert pair.draft.is_unstacked
    for name in ("embedding", "unembedding", "final_norm"):
        assert pair.draft.parameters()[name] is pair.target.parameters()[name]
    assert_same(self_draft(pair.target, SELF_DRAFTS["int4"], held=INT8), pair.draft.stacked())


def test_what_cannot_be() -> None:
    here = EMBEDDED_PAIR[0]
    assert_refused("no draft 'self:int3'.*self:int8 or self:int4", load_pair, here, "self:int3")
    assert_refused("matrices are int8 themselves", load_pair, here, "self:int8", dtype="int8")
    assert_refused("proposes alone", load_pair, here, ["self:int4", "ngram"])


PLACES = ({"dtype": "int8"}, {"dtype": "float32", "mesh": "2x2"})
# The target's own matrices, so that drafts are accepted wherever the drafter knows the tokens.
KNOWN = np.arange(0, VOCAB_SIZE, 2)
ROWS = len(KNOWN) + 1


def narrowed(target: Llama) -> Llama:
    """The target with every second row of its embedding, and the mean of the others."""
    embedding, tokens = target.parameters()["embedding"], jnp.arange(VOCAB_SIZE)
    rows = jnp.concatenate([embedding[KNOWN], embedding[1::2].mean(axis=0, keepdims=True)])
    table = jnp.where(tokens % 2, len(KNOWN), tokens // 2).astype(jnp.int32)
    config = dataclasses.replace(target.config, draft_vocab_size=ROWS)
    return Llama(config, target.parameters() | {"embedding": rows, "token_rows": table})


def padded(folder: Path, to: Path, rows: int) -> None:
    """The model with that many rows more, which would win every time if they were kept."""
    parameters = load_llama(folder).parameters()
    embedding = jnp.pad(parameters["embedding"], ((0, rows), (0, 0)), constant_values=50)
    config = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE + rows)
    save_hf(Llama(config, parameters | {"embedding": embedding}), to)
    shutil.copy(folder / "tokenizer.model", to)


@pytest.fixture(scope="module")
def root(tiny_pair: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folders are the models."""
    root = shutil.copytree(tiny_pair[0].parent, tmp_path_factory.mktemp("pair") / "models")
    target, draft = root / "target", root / "draft"
    save_hf(narrowed(load_llama(target)), root / "narrow", jnp.float32)
    shutil.copy(target / "tokenizer.model", root / "narrow")
    padded(target, root / "wide_target", 3)
    padded(draft, root / "wide_draft", 2)
    padded(draft, root / "other", 40)
    return root


def test_logits_are_those_of_the_known_tokens() -> None:
    whole = Llama.random(CONFIG, jax.random.key(0))
    narrow = narrowed(whole)
    positions, visible = jnp.arange(4)[None], jnp.tril(jnp.ones((1, 4, 4), bool))
    hidden, other = (
        narrow.uncached_and_inputs(jnp.asarray([tokens]), positions, visible)[0]
        for tokens in ([0, 3, 8, 5], [0, 7, 8, 1])
    )
    logits = np.asarray(narrow.logits(hidden))
    assert logits.shape == (1, 4, VOCAB_SIZE)
    assert (logits[..., 1::2] == -np.inf).all()
    expected = whole.logits(hidden)[..., KNOWN]
    np.testing.assert_allclose(logits[..., KNOWN], expected, rtol=1e-5, atol=1e-6)
    # Tokens that it does not know are all the same to it.
    np.testing.assert_array_equal(hidden, other)


def decoded(pair: Pair, rule: str = "exact", **given: Any) -> list[Generation]:
    given |= {"max_new_tokens": 24, "batch_size": 2}
    given |= {} if rule == "autoregressive" else {"num_speculative_tokens": 4}
    return generate(pair, ["Ada has 3 apples", "Boris"], rule=rule, **given)


@pytest.mark.parametrize(
    "where", [pytest.param(PLACES[0], marks=BITS_OF_TINY_HEADS), PLACES[1]], ids=str
)
def test_text_of_a_part_of_the_vocabulary_is_the_targets(root: Path, where: dict[str, str]) -> None:
    pair = load_pair(root / "target", root / "narrow", **where)
    assert pair.drafts[0].parameters()["token_rows"].dtype == jnp.int32
    alone, exact = decoded(pair, "autoregressive"), decoded(pair)
    assert pairs.tokens_of(exact) == pairs.tokens_of(alone)
    assert sum(one.num_accepted_tokens for one in exact) > 0
    for one in exact:  # what stands there as the draft has proposed it, it knows
        for token, why in zip(one.token_ids, one.why, strict=True):
            assert token in KNOWN or why is not Why.MATCHED


def test_sampling_knows_nothing_of_it(root: Path) -> None:
    pair = load_pair(root / "target", root / "narrow", dtype="float32")
    sampled = decoded(pair, "sampled", temperature=1.0, top_k=20)
    tokens = [token for one in sampled for token in one.token_ids]
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    drafted = sum(one.num_draft_tokens for one in sampled)
    assert 0 < sum(one.num_accepted_tokens for one in sampled) < drafted
    assert any(token % 2 for token in tokens), "half of them can only be the target's own"


def test_rows_that_cannot_be(root: Path, tmp_path: Path) -> None:
    narrow, wrong = root / "narrow", tmp_path / "wrong"
    table = load_file(narrow / "model.safetensors")["token_rows"]
    for row in (-1, ROWS):
        table[5] = row
        folder = altered(narrow, wrong, {}, {"token_rows": table})
        assert_refused(f"token_rows.* each must be from 0 to {ROWS - 1}", load_llama, folder)
    for rows in (1, VOCAB_SIZE + 1, ROWS - 1):
        words = "has shape" if rows == ROWS - 1 else f"draft_vocab_size={rows} and vocab_size"
        folder = altered(narrow, wrong, {"draft_vocab_size": rows}, {})
        assert_refused(words, load_pair, root / "target", folder)


def test_the_head_that_is_here() -> None:
    """It loads, is small, and knows the tokens of what its target answers."""
    folder = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct"
    head, ids = load_llama(folder), load_tokenizer(folder).encode("The capital of France is Paris.")
    assert head.config.head.layers == (2, 15, 29)
    values = head.parameters()
    assert sum(values[name].size for name in {*values} - {"unembedding", "token_rows"}) < 5_200_000
    rows = np.asarray(values["token_rows"])[ids]
    assert len({*rows}) == len({*ids})
    assert rows.max() < head.config.unknown_row == values["unembedding"].shape[1]


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_what_pads_is_cut(root: Path, where: dict[str, str]) -> None:
    texts = []
    for names in (("target", "draft"), ("wide_target", "draft"), ("target", "wide_draft")):
        pair = load_pair(*(root / name for name in names), **where)
        assert pair.target.config.vocab_size == VOCAB_SIZE
        texts.append(pairs.tokens_of(decoded(pair, "fly", window_size=2)))
    assert texts[0] == texts[1] == texts[2]
    # More than padding is another vocabulary.
    folders = (root / "target", root / "other")
    assert_refused("320 tokens and the draft one of 360", load_pair, *folders, **where)


def test_pard_is_known_by_its_config_or_by_a_given_token(root: Path, tmp_path: Path) -> None:
    target, draft = root / "target", root / "draft"
    marked = altered(draft, tmp_path / "marked", {"pard_token": 5}, {})
    pair = load_pair(target, marked, dtype="float32")
    other = load_pair(open_pair(target, draft, draft_parallel=5), dtype="float32")
    given = {"rule": "fly", "num_speculative_tokens": 8}
    found, expected = (generate(one, ["Ada has 3"], **given)[0] for one in (other, pair))
    assert found.token_ids == expected.token_ids
    assert found.num_draft_passes == found.num_rounds
    (lossless,) = generate(pair, ["Ada has 3"], rule="exact", num_speculative_tokens=4)
    (plain,) = generate(pair, ["Ada has 3"], rule="autoregressive")
    assert lossless.token_ids == plain.token_ids
    assert lossless.num_draft_passes == lossless.num_rounds < plain.num_rounds
    assert_refused("there is no draft model", open_pair, target, draft_parallel=5)
    assert_refused("pard_token=100000 ", open_pair, target, draft, draft_parallel=100_000)
    assert_refused("last --draft", open_pair, target, [marked, target])
    assert_refused("pard_token=320", dataclasses.replace, CONFIG, pard_token=VOCAB_SIZE)
