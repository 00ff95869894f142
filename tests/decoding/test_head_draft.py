"""Heads of a target (EAGLE-3, DFlash, DSpark): their drafts, and what they change."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from golden import layout_on
from jaxtyping import Array

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.drafter import Draft, Terms
from fly_jax.decoding.drafters.head_draft import HeadDraft, HeadDrafter, HeadState
from fly_jax.decoding.pair import checked_drafter
from fly_jax.models import llama
from fly_jax.models.cache import empty_cache
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.head import BlockHead
from fly_jax.models.head_config import Block, Eagle3
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Fly, Verdict

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN = {
    "eagle3": ("official", "specforge", "speculators", "speculators_each", "speculators_all"),
    "block": ("dflash", "dspark", "speculators"),
}
BOTH = (False, True)
PAIR = 2
PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9, 2, 6]]
_NOTHING = jnp.zeros((1, 1), jnp.int32)
VERDICT = Verdict(_NOTHING[0], _NOTHING[0], _NOTHING[0], _NOTHING, _NOTHING[0])  # is not read


@pytest.mark.parametrize(
    ("kind", "name", "unstacked", "cached_bytes"),
    [
        *((kind, *one, None) for kind in GOLDEN for one in itertools.product(GOLDEN[kind], BOTH)),
        ("eagle3", "official", True, 0), ("block", "dspark", True, 0),
        # Heads of less, but not with the tables of their target, which has more.
        ("eagle3", "official", True, 70_000), ("block", "dflash", True, 70_000),
    ],
)  # fmt: skip
def test_drafts_are_those_of_the_published_code(
    kind: str, name: str, unstacked: bool, cached_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round, with acceptances of every length and the caches that they leave.

    Models of more than the cached bytes have matrices that lie otherwise on a CPU.
    """
    if cached_bytes is not None:
        monkeypatch.setattr(llama, "_CACHED_BYTES", cached_bytes)
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
    prefill = jax.jit(drafter.prefill)
    observe = jax.jit(lambda *given, draft, live: drafter.observe(*given, draft=draft, live=live))
    seen, last, piece = features(jnp.asarray(text)), int(lengths[0]) - 1, 4
    for start, end in ((0, piece), (piece, last)):
        given = (text[:, start:end], jnp.int32(start), seen[:, start:end])
        state = prefill(state, *given)
    for length, expected in zip(lengths, drafts, strict=True):
        unknown = text.copy()
        unknown[0, length:] = 1  # of what comes it must know nothing
        draft, state = propose(state, jnp.asarray(unknown), jnp.asarray([length]))
        np.testing.assert_array_equal(draft.tokens[0], expected)
        assert draft.num_passes.tolist() == [k if kind == "eagle3" else 1]
        unknown[0, length : length + k] = draft.tokens[0]
        block = features(jnp.asarray(unknown))[:, length - 1 : length + k]
        state = observe(state, VERDICT, block, draft=draft, live=jnp.asarray([True]))


BLOCK = {"block_size": 6, "mask_token": 5, "target_embed_size": 32, "layers": (0, 1)}
OWN = {
    "eagle3": Eagle3(target_embed_size=pairs.CONFIG.embed_size, layers=(0, 1, 1)),
    "dspark": Block(
        **BLOCK, anchor_predicts=True, markov_rank=8, has_confidence=True,
        confidence_reads_markov=True, causal_windows=True,
    ),
}  # fmt: skip
# Whose second layer sees little, and whose block is longer than what it drafts.
WINDOW = {"num_layers": 2, "head_norms": True, "sliding_window": 9, "windowed_layers": (1,)}


@functools.cache
def head_of(seed: int, kind: str = "eagle3", noise: float | None = None) -> Llama:
    """A random head of the random target, or draft, that knows the tokens which it says most."""
    if kind == "dflash":  # it knows all of them, with the target's tables
        own = Block(**BLOCK, has_unembedding=False)
        config = dataclasses.replace(pairs.CONFIG, **WINDOW, head=own)
        return Llama.random(config, jax.random.key(seed))
    target = pairs.random_target(seed) if noise is None else pairs.random_draft(seed, noise)
    said = collections.Counter(itertools.chain(*pairs.greedy(target, PROMPTS)))
    rows = np.full(pairs.CONFIG.vocab_size, 3, np.int32)
    for row, (token, _) in enumerate(said.most_common(3)):
        rows[token] = row
    sizes = {"num_layers": 1} if kind == "eagle3" else WINDOW
    config = dataclasses.replace(pairs.CONFIG, **sizes, draft_vocab_size=3, head=OWN[kind])
    parameters = Llama.random(config, jax.random.key(seed)).parameters()
    return Llama(config, parameters | {"token_rows": jnp.asarray(rows)})


def spec_of(kind: str, name: str) -> RoundSpec:
    """The rounds of a name; DSpark's drafts end where it is not sure of them."""
    sure = 0.0 if kind == "eagle3" or name == "exact" else 0.4
    return pairs.SPECS[name].with_static(draft_confidence=sure)


@pytest.mark.parametrize("name", ["exact", "sampled", "depths", "deferred"])
@pytest.mark.parametrize("kind", OWN)
def test_lossless_alone_and_in_batches(kind: str, name: str) -> None:
    spec, given = spec_of(kind, name), (PROMPTS, pairs.MOST_TOKENS)
    target, head = pairs.random_target(PAIR), head_of(PAIR, kind)
    engine = pairs.batch_engine(target, head, spec)
    found = engine.generate(*given, seed=1)
    if name in ("exact", "depths"):
        least = 1.2 if name == "exact" or kind == "eagle3" else 1.0
        assert max(one.mean_accepted_tokens for one in found) > least
        for one, prompt in zip(found, PROMPTS, strict=True):
            (expected,) = pairs.greedy(target, [prompt], len(one.token_ids))
            assert one.token_ids == expected
    assert name == "deferred" or [one.token_ids for one in found] == [
        engine.generate([prompt], pairs.MOST_TOKENS, seed=1 + row)[0].token_ids
        for row, prompt in enumerate(PROMPTS)
    ]


NOISE, BELOW = 0.2, 3  # of a draft model, and what its head proposes at a time


def drafts_of(name: str, kind: str = "eagle3") -> tuple[list[Llama], RoundSpec]:
    """A head alone, or below a draft model, and the rounds that are called so."""
    spec = spec_of(kind, name.removesuffix(" below"))
    if not name.endswith(" below"):
        return [head_of(PAIR, kind)], spec
    spec = spec.with_static(level_speculative_tokens=(BELOW,))
    return [pairs.random_draft(PAIR, NOISE), head_of(PAIR, kind, NOISE)], spec


@pytest.mark.parametrize(
    ("kind", "name", "rows"),
    [
        ("eagle3", "fly", 1), ("eagle3", "sampled", 3), ("eagle3", "deferred", 3),
        ("dspark", "fly", 1), ("dspark", "sampled", 3),
    ],
)  # fmt: skip
def test_below_a_draft_model_no_token_changes(kind: str, name: str, rows: int) -> None:
    given, (models, spec) = (PROMPTS, pairs.MOST_TOKENS), drafts_of(f"{name} below", kind)
    alone = pairs.pair_engine(PAIR, pairs.SPECS[name], NOISE, rows=rows).generate(*given, seed=1)
    engine = pairs.batch_engine(pairs.random_target(PAIR), models, spec, rows)
    found = engine.generate(*given, seed=1)
    assert [(one.token_ids, one.why) for one in found] == [
        (one.token_ids, one.why) for one in alone
    ]
    passes = [sum(one.num_draft_passes for one in rows) for rows in (found, alone)]
    assert name != "fly" or passes[0] < passes[1]


@pytest.mark.parametrize("margin", [0.0, 2.0])
@pytest.mark.parametrize("name", ["exact", "depths"])
def test_below_a_draft_model_it_loses_nothing(name: str, margin: float) -> None:
    models, spec = drafts_of(f"{name} below")
    spec, target = spec.with_static(level_margin=margin), pairs.random_target(PAIR)
    found = pairs.batch_engine(target, models, spec).generate(PROMPTS, pairs.MOST_TOKENS)
    plain = pairs.autoregressive(target, PROMPTS, pairs.MOST_TOKENS)
    assert [one.token_ids for one in found] == plain


def test_below_a_draft_model_its_slots_have_true_features_alone() -> None:
    """As if all had just been read: whatever was refused or rolled back, or not asked for."""
    k, rows, random = 7, 3, np.random.default_rng(1)
    models = [pairs.random_draft(PAIR, NOISE), head_of(PAIR, noise=NOISE)]
    static = RoundStatic(k, level_speculative_tokens=(BELOW,), depths=(0, 1, k))
    drafter = checked_drafter(pairs.random_target(PAIR), models, static)
    assert drafter is not None
    text = random.integers(0, pairs.CONFIG.vocab_size, (rows, 128)).astype(np.int32)
    length = np.array([1, 9, 14])
    read = jax.jit(
        lambda text: drafter.prefill(
            drafter.init(*text.shape, jnp.dtype("float32")), text, jnp.int32(0), None
        )
    )
    propose = jax.jit(
        lambda state, text, length, wanted: drafter.propose(state, text, length, k, Terms(wanted))
    )
    state = read(text)
    wanted_before = k
    for wanted in (k, k, 0, k, 1, 1, 1, 1, 1, 1, 1, 1, k, k, 0, 0, 0, 0, k):
        draft, state = propose(state, text, length, np.full(rows, wanted))
        for row, at in enumerate(length):
            text[row, at : at + wanted] = draft.tokens[row, :wanted]
        if wanted == k:
            passes = draft.num_passes.tolist()
            assert wanted_before < k or passes[1] <= BELOW * (passes[0] - 1)
            fresh = read(text)
            for row in range(rows):
                slots, known = (
                    int(cache.length[row]) for cache in (state.below.cache, state.cache)
                )
                assert length[row] < slots < known == length[row] + k - 1
                for found, expected, end in (
                    (state.below.cache, fresh.below.cache, slots),
                    (state.below.features, fresh.below.features, known),
                ):
                    for one, other in (
                        (found.keys, expected.keys),
                        (found.values, expected.values),
                    ):
                        one, other = (array[0, row, :, :end] for array in (one, other))
                        np.testing.assert_allclose(one, other, atol=2e-5)
        kept, wanted_before = random.integers(0, wanted + 1, rows), wanted
        length = np.maximum(length + kept + 1 - random.integers(0, 4, rows) * (kept > 3), 1)
        for row, at in enumerate(length - 1):  # the target's own, also where a window has failed
            text[row, at] = random.integers(0, pairs.CONFIG.vocab_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReadingAnew(HeadDraft):
    """A head that remembers nothing, and reads the whole text before each draft."""

    def propose(self, state: Any, text: Array, *given: Any) -> tuple[Draft, Any]:
        """The same after a prefill."""
        cache = empty_cache(pairs.CONFIG, *text.shape, jnp.dtype("float32"))
        read = pairs.random_target(PAIR).hidden_and_inputs(text, cache, self.hidden_layers)[2]
        empty = self.init(*text.shape, jnp.dtype("float32"))
        filled = self.prefill(empty, text, jnp.int32(0), read)
        anew = [
            dataclasses.replace(one, attended=held.attended)
            for one, held in (
                (filled.cache, state.cache), (filled.features, state.features),
            )
        ]  # fmt: skip
        return super().propose(HeadState(*anew), text, *given)


def test_a_rollback_restores_what_it_knows() -> None:
    target, spec = pairs.random_target(PAIR), pairs.SPECS["deferred"]
    spec = dataclasses.replace(spec, rule=Fly(0.0, 2))  # windows open wherever a draft is refused
    given = ([[one, 7 * one % 48] for one in range(24, 48)], pairs.MOST_TOKENS)
    drafter = checked_drafter(target, head_of(PAIR), spec.static)
    assert isinstance(drafter, HeadDraft)
    fields = {one.name: getattr(drafter, one.name) for one in dataclasses.fields(drafter)}
    found, expected = (
        pairs.batch_engine(target, one, spec).generate(*given)
        for one in (drafter, ReadingAnew(**fields))
    )
    assert sum(one.num_rollbacks for one in found) > 0
    assert [(one.token_ids, one.why, one.num_rounds) for one in found] == [
        (one.token_ids, one.why, one.num_rounds) for one in expected
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("eagle3", "exact"), ("eagle3", "fly below"), ("dspark", "fly"), ("dspark", "fly below")],
)
def test_what_a_slot_held_before_changes_nothing(kind: str, name: str) -> None:
    """Requests that come and go, some of them on with the beginning that a slot holds."""
    beginning = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    prompts = [beginning + [one] * (one % 4 + 1) for one in (5, 8, 9, 11, 12, 13)] + [[6]]
    (models, spec), target = drafts_of(name, kind), pairs.random_target(PAIR)
    engine = pairs.batch_engine(target, models, spec, rows=2)
    first = engine.generate(prompts, pairs.MOST_TOKENS)
    longer = [prompt + one.token_ids for prompt, one in zip(prompts, first, strict=True)]
    given = ([*longer, *prompts], pairs.MOST_TOKENS)
    fresh = pairs.batch_engine(target, models, spec, rows=2, shared_block=0)
    assert engine.num_reused_tokens > 0
    for found, expected in zip(engine.generate(*given), fresh.generate(*given), strict=True):
        assert (found.token_ids, found.why) == (expected.token_ids, expected.why)
        assert found.num_rounds == expected.num_rounds


@pytest.mark.parametrize(
    ("kind", "mesh", "target_rules", "rules", "name"),
    [
        ("eagle3", "4x2", "tensor", "replicated", "exact"),
        ("eagle3", "2x4", "tensor_long", "narrow_long", "exact"),
        ("eagle3", "2x2x2", "tensor_whole", "tensor", "deferred"),
        ("dflash", "4x2", "tensor", "replicated", "exact"),
        ("dspark", "2x4", "tensor_long", "narrow_long", "fly"),
        ("eagle3", "2x4", "tensor_whole", "narrow_whole", "exact below"),
        ("dspark", "2x2x2", "tensor", "tensor", "deferred below"),
    ],
)
def test_on_eight_devices_tokens_are_those_of_one(
    kind: str, mesh: str, target_rules: str, rules: str, name: str
) -> None:
    (drafts, spec), given = drafts_of(name, kind), (PROMPTS, pairs.MOST_TOKENS)
    target = pairs.random_target(PAIR)
    one = pairs.batch_engine(target, drafts, spec).generate(*given)
    placed = pairs.placed(target, layout_on(mesh, target_rules))
    drafts = [pairs.placed(draft, layout_on(mesh, rules)) for draft in drafts]
    found = pairs.batch_engine(placed, drafts, spec).generate(*given)
    assert [row.token_ids for row in found] == [row.token_ids for row in one]
    assert [row.num_rounds for row in found] == [row.num_rounds for row in one]


@pytest.mark.parametrize("name", ["dspark", "speculators"])
def test_a_draft_ends_before_the_first_token_that_is_unsure(name: str) -> None:
    """By the confidence that the published code has in each token of the first draft."""
    with np.load(FIXTURES / "block" / "rounds.npz") as file:
        tokens, drafts, scores = (
            file[f"{name}.{key}"] for key in ("tokens", "drafts", "confidence")
        )
    target, head = (load_llama(FIXTURES / one) for one in ("eagle3/target", f"block/{name}"))
    text = np.zeros((1, 16), np.int32)
    text[0, :7] = tokens[:7]
    cache = empty_cache(target.config, 1, 0, jnp.dtype("float32"))
    sure = 1 / (1 + np.exp(-scores[0]))
    counts = set[int]()
    for least in (*(sure + 1e-4), *(sure - 1e-4)):
        drafter = checked_drafter(target, head, RoundStatic(5, draft_confidence=float(least)))
        assert drafter is not None
        if not counts:
            prompt = jnp.asarray(text[:, :6])
            seen = target.hidden_and_inputs(prompt, cache, drafter.hidden_layers)[2]
            empty = drafter.init(1, 16, jnp.dtype("float32"))
            state = drafter.prefill(empty, prompt, jnp.int32(0), seen)
        draft, _ = drafter.propose(state, jnp.asarray(text), jnp.asarray([7]), 5)
        expected = next((at for at, one in enumerate(sure) if one < least), 5)
        assert draft.num_drafted.tolist() == [expected]
        np.testing.assert_array_equal(draft.tokens[0], drafts[0])
        counts.add(expected)
    assert len(counts) > 1


@pytest.mark.parametrize("unstacked", [False, True])
def test_a_layer_with_a_window_sees_no_more_of_the_context(unstacked: bool) -> None:
    """And a place of its block nothing behind itself, where windows are causal."""
    sizes = WINDOW | {"num_layers": 1, "windowed_layers": (0,)}
    own = dataclasses.replace(pairs.CONFIG, **sizes, head=OWN["dspark"])
    target = pairs.random_target(PAIR)
    model = Llama.random(own, jax.random.key(3))
    head = BlockHead.on(model.unstacked() if unstacked else model, target)
    cache = empty_cache(own, 1, 32, jnp.dtype("float32")).with_length(jnp.asarray([20]))

    def found(at: int, token: int) -> Array:
        keys = cache.keys.at[:, :, :, at].set(1.0)
        seen = dataclasses.replace(cache, keys=keys, values=keys)
        return head.hidden(jnp.asarray([[3, 5, 5, token]]), seen)[0][0]

    plain, far, near = found(30, 5), found(11, 5), found(12, 5)
    np.testing.assert_array_equal(plain, far)  # the first place sees 12 to 20
    assert jnp.any(plain[0] != near[0])
    np.testing.assert_array_equal(plain[1:], near[1:])
    other = found(30, 7)
    np.testing.assert_array_equal(plain[:3], other[:3])
    assert jnp.any(plain[3] != other[3])
