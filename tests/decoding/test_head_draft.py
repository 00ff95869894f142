"""Heads of a target (EAGLE-3, DFlash, DSpark): their drafts, and what they change."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from golden import layout_on
from jaxtyping import Array

from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.drafters.chain import checked_drafter
from fly_jax.decoding.drafters.head_draft import HeadDrafter
from fly_jax.models.cache import empty_cache
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.head_config import Eagle3
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Verdict

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN = {
    "eagle3": ("official", "specforge", "speculators", "speculators_each", "speculators_all"),
    "block": ("dflash", "dspark", "speculators"),
}
PAIR = 2
PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9, 2, 6]]
_NOTHING = jnp.zeros((1, 1), jnp.int32)
VERDICT = Verdict(_NOTHING[0], _NOTHING[0], _NOTHING[0], _NOTHING, _NOTHING[0])  # is not read


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in GOLDEN.items() for name in names]
)
def test_drafts_are_those_of_the_published_code(kind: str, name: str, unstacked: bool) -> None:
    """Round after round, with acceptances of every length and the caches that they leave."""
    with np.load(FIXTURES / kind / "rounds.npz") as file:
        keys = ("tokens", "lengths", "drafts")
        tokens, lengths, drafts = (file[f"{name}.{key}"] for key in keys)
    k = drafts.shape[1]
    folders = ("eagle3/target", f"{kind}/{name}")
    target, head = (load_llama(FIXTURES / one, unstacked=unstacked) for one in folders)
    drafter = checked_drafter(target, head, RoundStatic(k))
    assert isinstance(drafter, HeadDrafter)
    text = np.zeros((1, len(tokens) + 2 * k + 2), np.int32)
    text[0, : len(tokens)] = tokens
    state = drafter.init(1, text.shape[1], jnp.dtype("float32"))

    @jax.jit
    def features(tokens: Array) -> Array:
        """Of a whole text, from one pass."""
        cache = empty_cache(target.config, 1, 0, jnp.dtype("float32"))
        return target.hidden_and_inputs(tokens, cache, drafter.hidden_layers)[2]

    propose = jax.jit(lambda state, text, length: drafter.propose(state, text, length, k))
    seen, last, piece = features(jnp.asarray(text)), int(lengths[0]) - 1, 4
    for start, end in ((0, piece), (piece, last)):
        given = (text[:, start:end], jnp.int32(start), seen[:, start:end])
        state = drafter.prefill(state, *given)
    for length, expected in zip(lengths, drafts, strict=True):
        unknown = text.copy()
        unknown[0, length:] = 1  # of what comes it must know nothing
        draft, state = propose(state, jnp.asarray(unknown), jnp.asarray([length]))
        np.testing.assert_array_equal(draft.tokens[0], expected)
        assert draft.num_passes.tolist() == [k if kind == "eagle3" else 1]
        unknown[0, length : length + k] = draft.tokens[0]
        block = features(jnp.asarray(unknown))[:, length - 1 : length + k]
        state = drafter.observe(state, VERDICT, block, draft=draft, live=jnp.asarray([True]))


@functools.cache
def head_of(seed: int) -> Llama:
    """A random head of the random target that knows the tokens which that says most often."""
    target = pairs.random_target(seed)
    said = collections.Counter(itertools.chain(*pairs.greedy(target, PROMPTS)))
    rows = np.full(pairs.CONFIG.vocab_size, 3, np.int32)
    for row, (token, _) in enumerate(said.most_common(3)):
        rows[token] = row
    own = Eagle3(target_embed_size=pairs.CONFIG.embed_size, layers=(0, 1, 1))
    config = dataclasses.replace(pairs.CONFIG, num_layers=1, draft_vocab_size=3, head=own)
    parameters = Llama.random(config, jax.random.key(seed)).parameters()
    return Llama(config, parameters | {"token_rows": jnp.asarray(rows)})


@pytest.mark.parametrize("name", ["exact", "sampled", "depths", "deferred"])
def test_lossless_and_a_pass_for_each_token(name: str) -> None:
    spec, given = pairs.SPECS[name], (PROMPTS, pairs.MOST_TOKENS)
    target = pairs.random_target(PAIR)
    engine = pairs.batch_engine(target, head_of(PAIR), spec)
    found = engine.generate(*given, seed=1)
    if name in ("exact", "depths"):
        assert max(one.mean_accepted_tokens for one in found) > 1.2
        for one, prompt in zip(found, PROMPTS, strict=True):
            (expected,) = pairs.greedy(target, [prompt], len(one.token_ids))
            assert one.token_ids == expected
    alone = pairs.batch_engine(target, head_of(PAIR), spec, rows=1)
    assert name == "deferred" or [one.token_ids for one in found] == [
        alone.generate([prompt], pairs.MOST_TOKENS, seed=1 + row)[0].token_ids
        for row, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("name", ["exact", "fly"])
def test_what_a_slot_held_before_changes_nothing(name: str) -> None:
    """Requests that come and go, some of them on with the beginning that a slot holds."""
    beginning = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    prompts = [beginning + [one] * (one % 4 + 1) for one in (5, 8, 9, 11, 12, 13)] + [[6]]
    spec, target = pairs.SPECS[name], pairs.random_target(PAIR)
    engine = pairs.batch_engine(target, head_of(PAIR), spec, rows=2)
    first = engine.generate(prompts, pairs.MOST_TOKENS)
    longer = [prompt + one.token_ids for prompt, one in zip(prompts, first, strict=True)]
    given = ([*longer, *prompts], pairs.MOST_TOKENS)
    fresh = pairs.batch_engine(target, head_of(PAIR), spec, rows=2, shared_block=0)
    for found, expected in zip(engine.generate(*given), fresh.generate(*given), strict=True):
        assert (found.token_ids, found.why) == (expected.token_ids, expected.why)
        assert found.num_rounds == expected.num_rounds


@pytest.mark.parametrize(
    ("mesh", "target_rules", "rules", "name"),
    [
        ("4x2", "tensor", "replicated", "exact"),
        ("2x4", "tensor_long", "narrow_long", "exact"),
        ("2x2x2", "tensor_whole", "tensor", "deferred"),
    ],
)
def test_on_eight_devices_tokens_are_those_of_one(
    mesh: str, target_rules: str, rules: str, name: str
) -> None:
    target, head, given = pairs.random_target(PAIR), head_of(PAIR), (PROMPTS, pairs.MOST_TOKENS)
    one = pairs.batch_engine(target, head, pairs.SPECS[name]).generate(*given)
    models = (
        pairs.placed(model, layout_on(mesh, kind))
        for model, kind in ((target, target_rules), (head, rules))
    )
    found = pairs.batch_engine(*models, pairs.SPECS[name]).generate(*given)
    assert [row.token_ids for row in found] == [row.token_ids for row in one]
    assert [row.num_rounds for row in found] == [row.num_rounds for row in one]
