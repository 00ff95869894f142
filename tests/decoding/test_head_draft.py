"""Heads (EAGLE-3, DFlash, DSpark), drafts of one pass (PARD) and models below another: no loss."""

import collections
import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from golden import FIXTURES, layout_on
from jaxtyping import Array
from random_pairs import PROMPTS, tokens_of
from refusals import assert_refused

from fly_jax import DecodingConfig, Draft, Drafter, Engine, Fly, Generation, Lookup, Request, Terms
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.head_draft import HeadDrafter
from fly_jax.decoding.drafters.lookup import _RATES
from fly_jax.decoding.drafters.model import ParallelDraft
from fly_jax.decoding.pair import OpenPair, checked_drafter
from fly_jax.engine.depth_costs import DepthCosts
from fly_jax.models import llama
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.head import BlockHead
from fly_jax.models.head_config import Block, Eagle3
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Verdict

PAIR, LIMIT = 2, pairs.MOST_TOKENS
GIVEN = (PROMPTS, LIMIT)
_NOTHING = jnp.zeros((1, 1), jnp.int32)
VERDICT = Verdict(_NOTHING[0], _NOTHING[0], _NOTHING[0], _NOTHING, _NOTHING[0])  # is not read
FLOAT32 = jnp.dtype("float32")


def recorded(kind: str, prefix: str, *more: str) -> tuple[np.ndarray, ...]:
    """The text of one row, and of the published code's rounds the drafts and what else is asked."""
    with np.load(FIXTURES / kind / "rounds.npz") as file:
        tokens, drafts, *others = (file[prefix + key] for key in ("tokens", "drafts", *more))
    text = np.zeros((1, len(tokens) + 2 * drafts.shape[1] + 2), np.int32)
    text[0, : len(tokens)] = tokens
    return text, drafts, *others


def built(target: Llama, draft: Llama | list[Llama], k: int, **given: Any) -> Drafter:
    drafter = checked_drafter(target, draft, RoundStatic(k, **given))
    assert drafter is not None
    return drafter


def features(target: Llama, drafter: Drafter, text: Array) -> Array:
    """Of a whole text, from one pass."""
    cache = empty_cache(target.config, len(text), 0, FLOAT32)
    return target.hidden_and_inputs(text, cache, drafter.hidden_layers)[2]


def read(drafter: Drafter, text: Array, seen: Array | None = None, known: int | None = None) -> Any:
    """The state after so many tokens of each row, which have these features."""
    state = drafter.init(*text.shape, FLOAT32)
    return drafter.prefill(state, text[:, :known], jnp.int32(0), seen)


@pytest.mark.parametrize(("kind", "name", "unstacked", "cached_bytes"), [
    *(("eagle3", f"speculators{one}", False, None) for one in ("", "_each", "_all")),
    ("block", "speculators", False, None),
    ("eagle3", "specforge", True, None), ("block", "speculators", True, None),
    ("eagle3", "official", True, 0), ("block", "dspark", True, 0),
    # A head of less, but not with the tables of its target, which has more.
    ("block", "dflash", True, 70_000),
])  # fmt: skip
def test_drafts_are_those_of_the_published_code(
    kind: str, name: str, unstacked: bool, cached_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round, with acceptances of every length and the caches that they leave."""
    if cached_bytes is not None:  # models of more have matrices that lie otherwise on a CPU
        monkeypatch.setattr(llama, "_CACHED_BYTES", cached_bytes)
    text, drafts, lengths = recorded(kind, f"{name}.", "lengths")
    k, folders = drafts.shape[1], ("eagle3/target", f"{kind}/{name}")
    target, head = (load_llama(FIXTURES / one, unstacked=unstacked) for one in folders)
    drafter = built(target, head, k)
    assert isinstance(drafter, HeadDrafter)
    state, features_of = drafter.init(*text.shape, FLOAT32), jax.jit(features)
    propose = jax.jit(lambda state, text, length: drafter.propose(state, text, length, k))
    prefill = jax.jit(drafter.prefill)
    observe = jax.jit(lambda *given, draft, live: drafter.observe(*given, draft=draft, live=live))
    seen = features_of(target, drafter, text)
    for start, end in ((0, 4), (4, lengths[0] - 1)):
        state = prefill(state, text[:, start:end], jnp.int32(start), seen[:, start:end])
    for length, expected in zip(lengths, drafts, strict=True):
        unknown = text.copy()
        unknown[0, length:] = 1  # of what comes it must know nothing
        draft, state = propose(state, unknown, length[None])
        np.testing.assert_array_equal(draft.tokens[0], expected)
        assert draft.num_passes.tolist() == [k if kind == "eagle3" else 1]
        unknown[0, length : length + k] = draft.tokens[0]
        block = features_of(target, drafter, unknown)[:, length - 1 : length + k]
        state = observe(state, VERDICT, block, draft=draft, live=np.array([True]))


def test_a_head_that_has_rested_drafts_as_one_that_has_not() -> None:
    """It makes no pass while nothing is wanted, and then takes in what the text has got since."""
    text, drafts, lengths = recorded("eagle3", "official.", "lengths")
    k, folders = drafts.shape[1], ("eagle3/target", "eagle3/official")
    target, head = (load_llama(FIXTURES / one) for one in folders)
    drafter = built(target, head, k, depths=(0, k))
    seen, begun = jax.jit(features)(target, drafter, text), lengths[0] - 1
    state = read(drafter, text[:, : text.shape[1]], seen[:, :begun], begun)
    propose = jax.jit(lambda state, text, at, terms: drafter.propose(state, text, at, k, terms))
    passes, ends = [], [*lengths[1:], lengths[-1]]
    for at, (length, end, expected) in enumerate(zip(lengths, ends, drafts, strict=True)):
        wanted = 0 if at % 9 else k
        given = text, length[None], Terms(np.array([wanted]))
        behind = drafter.passes_behind(state, length[None], np.array([True]))
        draft, state = propose(state, *given)
        passes.append(draft.num_passes.item())
        assert passes[-1] == (behind + k if wanted else 0)
        if wanted:
            np.testing.assert_array_equal(draft.tokens[0], expected)
        block = seen[:, length - 1 : end - 1]
        state = drafter.observe(state, VERDICT, block, draft=draft, live=np.array([True]))
    assert max(passes) > k, "it never lacked more than a draft takes in"


def test_drafts_of_one_pass_are_those_of_the_published_code() -> None:
    """With acceptances of every length and the caches that they leave."""
    text, drafts, lengths = recorded("pard", "", "lengths")
    model, k = load_llama(FIXTURES / "pard/draft"), drafts.shape[1]
    drafter = ParallelDraft(model.parameters(), config=model.config, num_speculative_tokens=k)
    state = read(drafter, text, known=lengths[0])
    propose = jax.jit(lambda state, text, length: drafter.propose(state, text, length, k))
    assert len(set(np.diff(lengths).tolist())) >= 3
    for length, expected in zip(lengths, drafts, strict=True):
        unknown = np.where(np.arange(text.shape[1]) < length, text, 1)
        draft, state = propose(state, unknown, length[None])
        np.testing.assert_array_equal(draft.tokens[0], expected)
        assert draft.num_passes.tolist() == [1]


BLOCK = {"block_size": 6, "mask_token": 5, "target_embed_size": 32, "layers": (0, 1)}
OWN = {
    "eagle3": Eagle3(target_embed_size=pairs.CONFIG.embed_size, layers=(0, 1, 1)),
    "dspark": Block(
        **BLOCK, markov_rank=8, anchor_predicts=True, has_confidence=True,
        confidence_reads_markov=True, causal_windows=True,
    ),
}  # fmt: skip
# Whose second layer sees little, and whose block is longer than what it drafts.
WINDOW = {"num_layers": 2, "head_norms": True, "sliding_window": 9, "windowed_layers": (1,)}
# Drafts of one pass, and levels of draft models above a lookup, by the noise of their weights.
LEVELS = {"levels": (0.25, 0.2), "all useless": (10.0, 0.3)}
PARD = {"pard": 0.05, "pard, alike": 0.0, "pard, useless": 10.0}
NOISE, BELOW = 0.2, 3  # of a draft model, and what its head proposes at a time


@functools.cache
def head_of(kind: str = "eagle3", noise: float | None = None) -> Llama:
    """A random head of the random target, or draft, that knows the tokens which it says most."""
    config, key = pairs.CONFIG, jax.random.key(PAIR)
    if kind in PARD:
        draft = pairs.random_draft(PAIR, PARD[kind])
        return Llama(dataclasses.replace(config, pard_token=5), draft.parameters())
    if kind == "dflash":  # it knows all of them, with the target's tables
        own = Block(**BLOCK, has_unembedding=False)
        return Llama.random(dataclasses.replace(config, **WINDOW, head=own), key)
    target = pairs.random_target(PAIR) if noise is None else pairs.random_draft(PAIR, noise)
    said = collections.Counter(itertools.chain(*pairs.greedy(target, PROMPTS)))
    rows = np.full(config.vocab_size, 3, np.int32)
    rows[[token for token, _ in said.most_common(3)]] = range(3)
    sizes = {"num_layers": 1} if kind == "eagle3" else WINDOW
    config = dataclasses.replace(config, **sizes, draft_vocab_size=3, head=OWN[kind])
    return Llama(config, Llama.random(config, key).parameters() | {"token_rows": jnp.asarray(rows)})


def without_cost(rows: list[Generation]) -> list[Generation]:
    return [dataclasses.replace(row, num_draft_passes=0, seconds=0.0) for row in rows]


def drafts_of(name: str, kind: str = "eagle3") -> tuple[list[Llama], RoundSpec]:
    """A head alone, or below a draft model, and the rounds called so; an unsure DSpark stops."""
    alone = name.removesuffix(", lookup")
    short = alone.removesuffix(" below")
    sure = 0.4 if kind == "dspark" and short != "exact" else 0.0
    spec = pairs.SPECS[short].with_static(draft_confidence=sure)
    if alone != name:
        spec = spec.with_static(lookup=Lookup())
    if short == alone:
        return [head_of(kind)], spec
    if kind in LEVELS:
        spec = spec.with_static(lookup=Lookup(num_speculative_tokens=3))
        below = [pairs.random_draft(PAIR, noise) for noise in LEVELS[kind]]
    else:
        below = [head_of(kind, NOISE)]
    models = [pairs.random_draft(PAIR, NOISE), *below]
    return models, spec.with_static(level_speculative_tokens=(BELOW, 2)[: len(below)])


def engine_of(name: str, kind: str = "eagle3", **given: Any) -> Engine:
    models, spec = drafts_of(name, kind)
    return pairs.pair_engine(PAIR, spec, *models, **given)


@pytest.mark.parametrize(("kind", "name", "margin"), [
    ("eagle3", "exact", 0.0), ("eagle3", "sampled", 0.0), ("pard", "sampled", 0.0),
    ("eagle3", "depths", 0.0), ("eagle3", "depths below", 0.0), ("eagle3", "exact below", 2.0),
    ("eagle3", "exact, lookup", 0.0), ("eagle3", "depths, lookup", 0.0),
    ("dspark", "sampled, lookup", 0.0), ("dspark", "exact", 0.0),
])  # fmt: skip
def test_lossless_alone_and_in_batches(kind: str, name: str, margin: float) -> None:
    models, spec = drafts_of(name, kind)
    engine = pairs.pair_engine(PAIR, spec.with_static(level_margin=margin), *models)
    found = engine.generate(*GIVEN, seed=1)
    if "sampled" not in name:
        assert max(one.mean_accepted_tokens for one in found) > 1.2
        assert tokens_of(found) == pairs.autoregressive(pairs.random_target(PAIR), PROMPTS)
    assert kind != "pard" or all(one.num_draft_passes == one.num_rounds for one in found)
    if (kind, name) == ("eagle3", "exact, lookup"):
        plain = engine_of("exact").generate(*GIVEN)
        assert sum(one.num_rounds for one in found) < sum(one.num_rounds for one in plain)
    for row, one in enumerate(PROMPTS):
        assert engine.generate([one], LIMIT, seed=1 + row)[0].token_ids == found[row].token_ids


def taken_over(
    text: list[int], own: list[int], rates: Array, enough: int = LIMIT
) -> tuple[list[int], int]:
    """The draft of a row, and from where it is copied: by the rule, place by place."""
    for place, left in enumerate(range(k := len(own), 0, -1)):
        lookup = Lookup(num_speculative_tokens=left)
        rest, matching, _ = pairs.looked_up(lookup, [*text, *own[:place]])
        is_enough = len(rest) >= min(left, enough)
        if is_enough and _RATES[min(matching, len(_RATES)) - 1] > rates[place]:
            return [*own[:place], *rest], place
    return own, k


def test_a_draft_behind_which_k_is_chosen_ends_where_no_more_of_it_pays() -> None:
    """With the shares of its tokens that are kept, and what a lookup in front has found of it."""
    target, head, k = pairs.random_target(PAIR), head_of("eagle3"), 5
    random = np.random.default_rng(0)
    said = [random.integers(0, 9, random.integers(4, 30)).tolist() for _ in range(16)]
    said[0] = [7, 8, 9] * 4  # the latest match is followed by three tokens
    text, length = pairs.padded(said, 64)

    @functools.partial(jax.jit, static_argnames="lookup")
    def drafted(least: Array | None, lookup: Lookup | None = None) -> Draft:
        drafter = built(target, head, k, lookup=lookup)
        state = read(drafter, text, features(target, drafter, text))
        return drafter.propose(state, text, length, k, Terms(least_rate=least))[0]

    whole, plain = drafted(jnp.float32(0)), drafted(None)
    np.testing.assert_array_equal(whole.tokens, plain.tokens)
    assert plain.rates is None
    assert whole.rates is not None
    rates = np.asarray(whole.rates)
    assert np.all(whole.num_drafted == k)
    assert np.all((rates > 1 / 4) & (rates <= 1)), "of three known tokens the likeliest"
    reached = np.cumprod(rates, axis=1).mean(axis=0)
    ended = set()
    for least in (0.9 * reached[1], 1.1 * reached[1], 0.99):
        (short,) = jax.device_get([drafted(jnp.float32(least))])
        most = 1 + int(np.sum(np.cumprod(reached[:-1] > least)))
        assert short.num_passes.tolist() == [most]
        np.testing.assert_array_equal(short.num_drafted, most)
        np.testing.assert_array_equal(short.tokens[:, :most], whole.tokens[:, :most])
        np.testing.assert_array_equal(short.rates[:, :most], rates[:, :most])
        ended.add(most)
    assert len(ended) > 1, "the case proves nothing"

    kept, copied = jax.device_get([drafted(jnp.float32(x), Lookup()) for x in (0, 1e-9)])
    assert kept.tokens.tolist() == drafted(None, Lookup()).tokens.tolist(), "K is not free"
    lengths = set()
    for row, one in enumerate(said):
        expected, place = taken_over(one, whole.tokens[row].tolist(), rates[row], enough=3)
        number = copied.num_drafted[row]
        assert copied.tokens[row, :number].tolist() == expected
        np.testing.assert_array_equal(copied.rates[row, :place], rates[row, :place])
        assert np.all(np.isin(copied.rates[row, place:number], np.float32(_RATES)))
        lengths.add((place < k, int(number)))
    assert {(False, k), (True, k), (True, 3)} <= lengths, "the case proves nothing"


def test_how_many_drawn_tokens_count_is_chosen_before_they_are_drawn(monkeypatch: Any) -> None:
    """Else what was drawn would say so; one that is not drawn may be longer than what counts."""
    costs = np.array([[1.0, 1.01, 4.0], [1.0] * 3, [0.01] * 3, [0.0] * 3, [1.0] * 3], np.float32)
    monkeypatch.setattr(DepthCosts, "next", lambda *_, may_vary: costs)
    longer = {}
    for name in ("exact", "sampled"):
        spec = pairs.SPECS[name].with_static(depths=(1, 2, 5))
        engine = pairs.pair_engine(PAIR, spec, head_of("eagle3"))
        (one,) = engine.generate(PROMPTS[:1], LIMIT)
        longer[name] = one.num_draft_passes - one.num_draft_tokens
        assert engine.generate(PROMPTS[:1], 1)[0].num_draft_passes == 1, "there is no room for more"
    assert longer["exact"] > longer["sampled"] == 0


def test_passes_of_a_head_are_timed_where_a_lookup_in_front_finds_nothing() -> None:
    """With K = 0 it rests."""
    spec = pairs.SPECS["exact"].with_static(depths=(0, 2, 5), lookup=Lookup())
    engine = pairs.pair_engine(PAIR, spec, head_of("eagle3"), max_length=40)
    engine.warm_up_for(engine.requests(PROMPTS[:1], 20))
    assert engine.costs is not None
    assert engine.costs._num_passes.tolist() == [0, 2, 5]


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "pard"])
def test_draws_are_of_the_logits_that_acceptance_divides_by(kind: str) -> None:
    """As those of draft models are; then what is emitted is distributed as without a draft.

    What a lookup in front has copied counts as drawn from what is certain.
    """
    target, head, k, rows = pairs.random_target(PAIR), head_of(kind), 5, 24
    random = np.random.default_rng(0)
    often = np.flatnonzero(head.parameters().get("token_rows", np.arange(48)) < 3)
    said = [random.choice(often, random.integers(4, 30)).tolist() for _ in range(rows)]
    said[::2] = [[*one, 40] for one in said[::2]]  # of which no match goes on at once
    text, length = pairs.padded(said, 64)
    terms = Terms(None, pairs.SPECS["sampled"].sampling, pairs.keys_from(3, rows))

    @functools.partial(jax.jit, static_argnames="lookup")
    def drafted(text: Array, length: Array, lookup: Lookup | None) -> Draft:
        drafter = built(target, head, k, lookup=lookup)
        seen = features(target, drafter, text) if drafter.needs_hidden else None
        return drafter.propose(read(drafter, text, seen), text, length, k, terms)[0]

    own, draft = (drafted(text, length, one) for one in (None, Lookup()))
    expected = terms.choose(own.logits, length[:, None] + np.arange(k), None)
    np.testing.assert_array_equal(own.tokens, expected)
    rates = np.max(jax.nn.softmax(own.logits), axis=-1)
    tokens, starts = zip(*map(taken_over, said, own.tokens.tolist(), rates), strict=True)
    assert draft.tokens.tolist() == list(tokens)
    is_copied = np.arange(k) >= np.array(starts)[:, None]
    certain = np.where(np.array(tokens)[..., None] == np.arange(48), 0, -np.inf)
    expected = np.where(is_copied[..., None], certain, own.logits)
    np.testing.assert_array_equal(draft.logits, expected)
    assert len({*starts} - {k}) > 1, "the case proves nothing"


@pytest.mark.parametrize(("kind", "name"), [
    *(("eagle3", name) for name in ("fly", "sampled", "deferred")),
    *((kind, "fly") for kind in ("dspark", "levels", "all useless", *list(PARD)[1:])),
    *((kind, "deferred") for kind in ("dspark", "pard, alike")),
])  # fmt: skip
def test_below_a_draft_model_no_token_changes(kind: str, name: str) -> None:
    given = ([*PROMPTS, *([first, 3, 5] for first in range(8))], LIMIT)
    alone = pairs.pair_engine(PAIR, pairs.SPECS[name], NOISE).generate(*given, seed=1)
    found = engine_of(f"{name} below", kind).generate(*given, seed=1)
    assert without_cost(found) == without_cost(alone)
    passes = [sum(one.num_draft_passes for one in rows) for rows in (found, alone)]
    assert name != "fly" or kind.endswith("useless") or passes[0] < passes[1]
    seen = {"fly": "num_rescued_tokens", "deferred": "num_rollbacks", "sampled": "num_rounds"}
    assert sum(getattr(one, seen[name]) for one in alone) > 0, "the case proves nothing"


def test_below_a_draft_model_its_slots_have_true_features_alone() -> None:
    """As if all had just been read: whatever was refused or rolled back, or not asked for."""
    k, rows, random = 7, 3, np.random.default_rng(1)
    sizes = {"level_speculative_tokens": (BELOW,), "depths": (0, 1, k)}
    drafter = built(pairs.random_target(PAIR), drafts_of("exact below")[0], k, **sizes)
    text = random.integers(0, pairs.CONFIG.vocab_size, (rows, 128)).astype(np.int32)
    length = np.array([1, 9, 14])
    read_anew = jax.jit(lambda text: read(drafter, text))
    propose = jax.jit(lambda state, text, at, terms: drafter.propose(state, text, at, k, terms))
    state, wanted_before = read_anew(text), k
    for wanted in (k, k, 0, k, 1, 1, 1, 1, 1, 1, 1, 1, k, k, 0, 0, 0, 0, k):
        draft, state = propose(state, text, length, Terms(np.full(rows, wanted)))
        for row, at in enumerate(length):
            text[row, at : at + wanted] = draft.tokens[row, :wanted]
        if wanted == k:
            passes, fresh = draft.num_passes.tolist(), read_anew(text)
            assert wanted_before < k or passes[1] <= BELOW * (passes[0] - 1)
            for row in range(rows):
                slots, known = int(state.below.cache.length[row]), int(state.cache.length[row])
                assert length[row] < slots < known == length[row] + k - 1
                for part, end in (("cache", slots), ("features", known)):
                    caches = (getattr(one.below, part) for one in (state, fresh))
                    place = np.s_[0, row, :, :end]
                    found, expected = ([one.keys[place], one.values[place]] for one in caches)
                    np.testing.assert_allclose(found, expected, atol=2e-5)
        kept, wanted_before = random.integers(0, wanted + 1, rows), wanted
        length = np.maximum(length + kept + 1 - random.integers(0, 4, rows) * (kept > 3), 1)
        for row, at in enumerate(length - 1):  # the target's own, also where a window has failed
            text[row, at] = random.integers(0, pairs.CONFIG.vocab_size)


def reading_anew(drafter: HeadDrafter) -> HeadDrafter:
    """The same, but it remembers nothing, and reads the whole text before each draft."""
    own = type(drafter)

    class ReadingAnew(own):  # type: ignore[misc, valid-type]
        def propose(self, state: Any, text: Array, *given: Any) -> tuple[Draft, Any]:
            filled = read(self, text, features(pairs.random_target(PAIR), self, text))
            anew = jax.tree.map(  # how much of it attention reads stays as it was
                lambda one, old: dataclasses.replace(one, attended=old.attended),
                filled,
                state,
                is_leaf=lambda one: isinstance(one, KVCache),
            )
            return own.propose(self, anew, text, *given)

    made = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(ReadingAnew))
    return made(**{one.name: getattr(drafter, one.name) for one in dataclasses.fields(drafter)})


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_rollback_restores_what_it_knows(kind: str) -> None:
    target, spec = pairs.random_target(PAIR), pairs.SPECS["deferred"]
    spec = dataclasses.replace(spec, rule=Fly(0.0, 2))  # windows open wherever a draft is refused
    prompts = [[one, 7 * one % 48] for one in range(24, 48)]
    drafter = checked_drafter(target, head_of(kind), spec.static)
    assert isinstance(drafter, HeadDrafter)
    found, expected = (
        pairs.batch_engine(target, one, spec).generate(prompts, LIMIT)
        for one in (drafter, reading_anew(drafter))
    )
    assert without_cost(found) == without_cost(expected)
    assert sum(one.num_rollbacks for one in found) > 0


@pytest.mark.parametrize(("kind", "name"), [
    ("eagle3", "exact, lookup"), ("dspark", "fly below"), ("pard", "exact"), ("dflash", "exact"),
])  # fmt: skip
def test_what_a_slot_held_before_changes_nothing(kind: str, name: str) -> None:
    """Requests that come and go, some of them on with the beginning that a slot holds."""
    beginning = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    prompts = [beginning + [one] * (one % 4 + 1) for one in (5, 8, 9, 11, 12, 13)] + [[6]]
    engine, fresh = (engine_of(name, kind, **one) for one in ({}, {"shared_block": 0}))
    first = tokens_of(engine.generate(prompts, LIMIT))
    prompts = [*(prompt + new for prompt, new in zip(prompts, first, strict=True)), *prompts]
    states = engine.answer(engine.requests(prompts, LIMIT))
    expected = fresh.generate(prompts, LIMIT)
    assert any(one.num_reused for one in states)
    assert without_cost([one.generation for one in states]) == without_cost(expected)


@pytest.mark.parametrize(("kind", "mesh", "target_rules", "rules", "name"), [
    ("eagle3", "2x2x2", "tensor_whole", "tensor", "deferred"),
    ("dflash", "4x2", "tensor", "replicated", "exact, lookup"),
    ("dspark", "2x2x2", "tensor_long", "narrow_long", "fly below"),
    ("pard", "2x2x2", "tensor_whole", "tensor", "exact"),
])  # fmt: skip
def test_on_eight_devices_tokens_are_those_of_one(
    kind: str, mesh: str, target_rules: str, rules: str, name: str
) -> None:
    (drafts, spec), target = drafts_of(name, kind), pairs.random_target(PAIR)
    one = pairs.batch_engine(target, drafts, spec).generate(*GIVEN)
    placed = pairs.placed(target, layout_on(mesh, target_rules))
    drafts = [pairs.placed(draft, layout_on(mesh, rules)) for draft in drafts]
    found = pairs.batch_engine(placed, drafts, spec).generate(*GIVEN)
    assert tokens_of(found) == tokens_of(one)
    if "exact" in name:
        assert tokens_of(one) == pairs.autoregressive(target, PROMPTS)
    assert [row.num_rounds for row in found] == [row.num_rounds for row in one]


@pytest.mark.parametrize("name", ["dspark", "speculators"])
def test_a_draft_ends_before_the_first_token_that_is_unsure(name: str) -> None:
    """By the confidence that the published code has in each token of the first draft."""
    tokens, drafts, scores = recorded("block", f"{name}.", "confidence")
    target, head = (load_llama(FIXTURES / one) for one in ("eagle3/target", f"block/{name}"))
    text = np.where(np.arange(16) < 7, tokens[:, :16], 0)
    sure, counts = 1 / (1 + np.exp(-scores[0])), set[int]()
    drafter = built(target, head, 5)
    seen = jax.jit(features)(target, drafter, text[:, :6])
    state = jax.jit(lambda text, seen: read(drafter, text, seen, known=6))(text, seen)
    for least in (*(sure[1:] + 1e-4), sure[0] - 1e-4):
        drafter = built(target, head, 5, draft_confidence=float(least))
        draft, _ = drafter.propose(state, text, jnp.asarray([7]), 5)
        expected = next((at for at, one in enumerate(sure) if one < least), 5)
        assert draft.num_drafted.tolist() == [expected]
        np.testing.assert_array_equal(draft.tokens[0], drafts[0])
        counts.add(expected)
    assert len(counts) > 1


def test_no_more_is_asked_of_a_block_than_it_has() -> None:
    """Unless K is chosen round by round."""
    target, head = pairs.random_target(PAIR), head_of("dspark")
    assert built(target, head, 7, depths=(0, 3, 7)).may_fall_short
    assert not built(target, head, 6).may_fall_short
    words = "speculative_tokens is 7, and the head drafts at most 6 tokens in a block"
    assert_refused(f"num_{words}", built, target, head, 7)
    levels = [pairs.random_draft(PAIR, NOISE), head_of("dspark", NOISE)]
    assert_refused(f"level_{words}", built, target, levels, 9, level_speculative_tokens=(7,))
    unread: list[Any] = [SimpleNamespace(config=one.config) for one in (target, head)]
    opened = OpenPair(unread[0], (unread[1],), is_embedded=False)
    for fitting in ("exact", "autoregressive"):  # whatever K the other rules would have
        opened.check_drafting(DecodingConfig(rule=fitting, lossless_speculative_tokens=6))
    auto = DecodingConfig(num_speculative_tokens="auto")
    opened.check_drafting(auto.replace(rule="exact"))
    assert_refused("window_size", opened.check_drafting, auto)
    engine = pairs.batch_engine(target, head, pairs.rounds(7, depths=(0, 3, 7)), rules=(Fly(),))
    assert_refused("window_size", engine.submit, Request([1], rule=Fly()))
    assert_refused("give num_speculative_tokens=6", opened.check_drafting, DecodingConfig())


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize(("from_block", "first"), [(True, 11), (False, 12)])
def test_a_layer_with_a_window_sees_no_more_of_the_context(
    from_block: bool, first: int, unstacked: bool
) -> None:
    """And a place of its block nothing behind itself, where windows are causal."""
    sizes = WINDOW | {"num_layers": 1, "windowed_layers": (0,)}
    block = dataclasses.replace(OWN["dspark"], windows_from_block=from_block)
    own = dataclasses.replace(pairs.CONFIG, **sizes, head=block)
    model = Llama.random(own, jax.random.key(3))
    head = BlockHead.on(model.unstacked() if unstacked else model, pairs.random_target(PAIR))
    cache = empty_cache(own, 1, 32, FLOAT32).with_length(jnp.asarray([20]))

    def found(at: int, token: int) -> Array:
        keys = cache.keys.at[:, :, :, at].set(1.0)
        seen = dataclasses.replace(cache, keys=keys, values=keys)
        return head.hidden(jnp.asarray([[3, 5, 5, token]]), seen)[0][0]

    plain, far, near = found(30, 5), found(first - 1, 5), found(first, 5)
    other = found(30, 7)
    np.testing.assert_array_equal(plain, far)  # every place sees 11 to 19, or the first 12 to 20
    changed = jnp.any(plain != near, axis=1).tolist()
    assert changed == [True] + [from_block] * 3
    np.testing.assert_array_equal(plain[:3], other[:3])
    assert jnp.any(plain[3] != other[3])
