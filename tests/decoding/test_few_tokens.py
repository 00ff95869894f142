"""A draft model that scores the first tokens of its vocabulary alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from golden import layout_on
from tiny_pair import write_pair

from fly_jax import FlyJaxError, Why, load_pair
from fly_jax.decoding.pair import open_pair
from fly_jax.models.architectures import INT8, parameter_specs
from fly_jax.models.cache import empty_cache
from fly_jax.models.llama import Llama
from fly_jax.models.quantise import quantised
from fly_jax.sharding.rules import Layout

FEW = 24  # of 48; two of the four that end a text lie beyond them


def logits_of(model: Llama) -> np.ndarray:
    cache = empty_cache(model.config, 1, 16, jnp.dtype(jnp.float32), model.layout)
    hidden, _ = model.hidden(jnp.asarray([[5, 40, 19, 3]]), cache)
    return np.asarray(model.logits(hidden))


def rounded(model: Llama) -> Llama:
    """The model with the matrices outside its layers in int8."""
    parameters, specs = model.parameters(), parameter_specs(model.config)
    for name, spec in specs.items():
        if spec.inputs and spec.axes[0] != "layers":
            parameters |= quantised(name, parameters[name], spec, INT8)
    return Llama(model.config, parameters)


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_the_models_own_and_no_other_token_has_one(
    tied: bool, int8: bool, unstacked: bool
) -> None:
    config = dataclasses.replace(pairs.CONFIG, tied_embeddings=tied)
    whole = Llama(config, pairs.random_target(0).parameters())
    whole = rounded(whole) if int8 else whole
    whole = whole.unstacked() if unstacked else whole
    few = whole.drafting_few(FEW)
    scores, own = logits_of(few), logits_of(whole)
    np.testing.assert_allclose(scores[..., :FEW], own[..., :FEW], atol=1e-5)
    assert np.all(np.isneginf(scores[..., FEW:]))
    assert few.unembedding[...].size == FEW * config.embed_size
    np.testing.assert_array_equal(few.embedding[...], whole.embedding[...])


@pytest.mark.parametrize("kind", ["exact", "fly", "sampled", "depths", "fly, lookup"])
def test_lossless_rules_stay_lossless_and_only_known_tokens_are_drafted(kind: str) -> None:
    target, draft = pairs.random_target(1), pairs.random_draft(1, 0.05).drafting_few(FEW)
    engine = pairs.batch_engine(target, draft, pairs.SPECS[kind])
    prompts = [[3, 8], [40, 41, 2], [5] * 9, [17]]
    made = engine.generate(prompts, 20, seed=3)
    drafted = [
        token
        for one in made
        for token, why in zip(one.token_ids, one.why, strict=True)
        if why in (Why.MATCHED, Why.RESCUED)
    ]
    assert drafted
    assert kind == "fly, lookup" or max(drafted) < FEW
    if kind in ("exact", "depths"):
        assert [one.token_ids for one in made] == pairs.autoregressive(target, prompts, 20)


def test_a_mesh_drafts_what_a_device_does() -> None:
    prompts, found = [[3, 8], [40, 41, 2]], []
    layouts: list[Layout | None] = [None, layout_on("2x4")]
    for layout in layouts:
        target = pairs.placed(pairs.random_target(1), layout)
        draft = pairs.placed(pairs.random_draft(1, 0.05), layout).drafting_few(FEW)
        made = pairs.batch_engine(target, draft, pairs.SPECS["exact"]).generate(prompts, 20)
        found.append([(one.token_ids, one.why) for one in made])
    assert found[0] == found[1]


def test_a_pair_is_loaded_so_and_what_cannot_draft_few_is_refused(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    (drafted,) = load_pair(open_pair(target, draft, draft_vocab_size=280)).drafts
    assert drafted.config.draft_vocab_size == 280
    for given, size, said in (
        (draft, 100, "at least 256 and fewer"),
        (draft, 320, "here are 320 tokens"),
        ("ngram", 280, "no such models"),
        ("self:int8", 280, "no such models"),
        (None, 280, "no such models"),
    ):
        with pytest.raises(FlyJaxError, match=said):
            open_pair(target, given, draft_vocab_size=size)
