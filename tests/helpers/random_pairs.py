"""Tiny random pairs of every agreement, engines of them, and the oracle: no cache and no rounds."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jaxtyping import Array, Key

from fly_jax import Drafter, Engine, Exact, Fly, Generation, Layout, Lookup, Rule, Sampling
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.lookup import _RATES
from fly_jax.decoding.drafters.model import DraftModel, ModelState
from fly_jax.models.architectures import LlamaConfig, parameter_specs
from fly_jax.models.llama import Llama, parameter_sharding
from fly_jax.shapes import Logits, RowInts, RowKeys, Text, Tokens

# About one token in ten ends a text.
EOS = (7, 19, 30, 41)
SIZES = {"embed_size": 32, "ffw_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
CONFIG = LlamaConfig(vocab_size=48, **SIZES, head_size=8, max_context=600, eos_token_ids=EOS)
# Tokens of a request, and cache positions of a row of so many and what a round writes beyond them.
# Nearly every program of these tests has as many, so that few are compiled.
MAX_LENGTH, CAPACITY = 96, 128
ROWS = 3
Texts = Sequence[Sequence[int]]
Drafts = Llama | Sequence[Llama] | Drafter | None
EXACT = Exact()


def rounds(k: int, rule: Rule = EXACT, sampling: Sampling | None = None, **given: Any) -> RoundSpec:
    """Rounds of so many drafted tokens, with other values of `RoundStatic`."""
    return RoundSpec(rule, RoundStatic(k, **{"eos_token_ids": EOS} | given), sampling)


# The rounds that most of them decode with; the numbers of a rule and of a sampling are data.
SPECS = {
    "autoregressive": rounds(0), "exact": rounds(5), "fly": rounds(5, Fly(0.4, 2)),
    "fly, lookup": rounds(5, Fly(0.4, 2), lookup=Lookup()), "lookup": rounds(5, lookup=Lookup()),
    "sampled": rounds(5, sampling=Sampling(0.7, top_p=0.9)), "depths": rounds(5, depths=(2, 3, 5)),
    "deferred": rounds(2, Fly(0.2, 2), deferred_window=2, rounds_per_dispatch=2, audits=True),
}  # fmt: skip
# Of different lengths, for tests that need no others.
PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9, 2, 6]]
# Noise of the draft's weights, relative to their own: agreement falls from all to chance.
NOISES = (0.0, 0.05, 0.2, 10.0)
MOST_TOKENS = 24
_UNCACHED, _TEXTS = 64, 8


@functools.cache
def random_target(seed: int, config: LlamaConfig = CONFIG, sharpness: float = 4.0) -> Llama:
    """A random target; `sharpness` scales its logits."""
    parameters = Llama.random(config, jax.random.key(seed)).parameters()
    return Llama(config, {**parameters, "unembedding": sharpness * parameters["unembedding"]})


@functools.cache
def random_draft(
    seed: int, noise: float, config: LlamaConfig = CONFIG, sharpness: float = 4.0
) -> Llama:
    """The target of the same seed with noise on its weights; 0 is the target itself."""
    parameters = random_target(seed, config, sharpness).parameters()
    key = jax.random.key(1000 + seed)
    return Llama(config, _disturbed(tuple(parameters), parameters, key, noise))


def placed(model: Llama, layout: Layout | None) -> Llama:
    """The model on a mesh, or bound to the first device, as one is that was loaded."""
    specs = parameter_specs(model.config)
    where = {name: parameter_sharding(layout, specs[name]) for name in model.parameters()}
    return Llama(model.config, jax.device_put(model.parameters(), where), layout)


def batch_engine(
    target: Llama, draft: Drafts, spec: RoundSpec, rows: int = ROWS, **given: Any
) -> Engine:
    """An engine whose requests all have the rule and the sampling of the spec."""
    given = {"load_may_change_text": True, "offline": True, "max_length": MAX_LENGTH} | given
    return Engine(target, draft, spec, num_slots=rows, **given)


def pair_engine(
    pair: int, spec: RoundSpec, *drafts: float | Llama, rows: int = ROWS, **given: Any
) -> Engine:
    """One of the random target of this seed, with drafts of these noises, or other ones."""
    models = [one if isinstance(one, Llama) else random_draft(pair, one) for one in drafts]
    return batch_engine(random_target(pair), models, spec, rows, **given)


def model_drafter(model: Llama, below: Drafter | None, k: int = 5) -> DraftModel:
    return DraftModel(model.parameters(), below, config=CONFIG, num_speculative_tokens=k)


def tokens_of(rows: Sequence[Generation]) -> list[list[int]]:
    return [row.token_ids for row in rows]


@functools.partial(jax.jit, static_argnums=0)
def _disturbed(
    names: tuple[str, ...], parameters: dict[str, Array], key: Key[Array, ""], noise: Array
) -> dict[str, Array]:
    """With noise on all but the norms; one program, whatever the seed and the noise."""
    disturbed = dict(parameters)
    for index, name in enumerate(names):  # `jit` hands a dictionary over in another order
        value = parameters[name]
        if not name.endswith("norm"):
            normal = jax.random.normal(jax.random.fold_in(key, index), value.shape)
            # Norms of about the same size keep the logits of a bad draft as sharp as the target's.
            disturbed[name] = (value + noise * jnp.std(value) * normal) / (1 + noise**2) ** 0.5
    return disturbed


@jax.jit
def logits_of(model: Llama, tokens: Tokens) -> Logits:
    """From one pass over whole texts, without a cache."""
    time = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), tokens.shape)
    visible = jnp.broadcast_to(jnp.tri(time, dtype=bool), (tokens.shape[0], time, time))
    return model.logits(model.uncached_and_inputs(tokens, positions, visible)[0])


def logits_after(model: Llama, text: Sequence[int]) -> np.ndarray:
    """Logits [time, vocab] after each token of one text, from one pass without a cache."""
    alone = Llama(model.config, model.parameters())  # on no mesh
    return np.asarray(logits_of(alone, padded([text], _UNCACHED)[0]))[0, : len(text)]


@jax.jit
def _greedy(model: Llama, tokens: Tokens, length: RowInts, count: Array) -> Tokens:
    rows = jnp.arange(tokens.shape[0])

    def step(index: Array, tokens: Array) -> Array:
        last = logits_of(model, tokens)[rows, length + index - 1]
        return tokens.at[rows, length + index].set(jnp.argmax(last, axis=-1))

    return jax.lax.fori_loop(0, count, step, tokens)


def greedy(model: Llama, texts: Texts, count: int = MOST_TOKENS) -> list[list[int]]:
    """The next tokens of every text, each from a pass over everything before it."""
    assert count <= MOST_TOKENS
    found, alone = [], Llama(model.config, model.parameters())
    for first in range(0, len(texts), _TEXTS):
        some = texts[first : first + _TEXTS]
        rows = 1 if len(texts) == 1 else _TEXTS  # two programs, whatever the number of texts
        given = padded([*some, *[[0]] * (rows - len(some))], _UNCACHED)
        tokens = np.asarray(_greedy(alone, *given, count))
        found += [tokens[row, len(text) :][:count].tolist() for row, text in enumerate(some)]
    return found


def fly_block(
    rule: Fly, pair: int, noise: float, text: Sequence[int], k: int
) -> tuple[list[int], list[oracle.Evidence], oracle.Row]:
    """The draft after a text, the evidence of it and of its bonus, and what the oracle decides."""
    (drafted,) = greedy(random_draft(pair, noise), [text], k)
    logits = logits_after(random_target(pair), [*text, *drafted])[-k - 1 :]
    seen = [
        oracle.greedy_evidence(row, token, rule.entropy, rule.entropy_top_k)
        for row, token in zip(logits, [*drafted, None], strict=True)
    ]
    tiny = math.log(np.finfo(np.float32).tiny)
    never = [
        token in EOS or one.argmax in EOS or one.draft_logit - one.log_sum_exp < tiny
        for token, one in zip(drafted, seen, strict=False)
    ]
    accepted, entropy = [one.accepted for one in seen[:k]], [one.entropy for one in seen[:k]]
    numbers = {"threshold": rule.entropy_threshold, "window_size": rule.window_size}
    decided = oracle.fly_row(accepted, entropy, never, k, **numbers, reference=False)
    return drafted, seen, decided


def padded(texts: Texts, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The texts as rows of so many tokens, and their lengths."""
    rows = np.zeros((len(texts), size), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return rows, np.array([len(text) for text in texts], np.int32)


def keys_from(seed: int, rows: int) -> RowKeys:
    """The random state of each row of a batch of which the first one has this seed."""
    return jax.vmap(jax.random.key)(np.arange(seed, seed + rows, dtype=np.uint32))


def state_after(drafter: Drafter, text: Text, known: Sequence[RowInts], beyond: float) -> Any:
    """A drafter's state whose models have seen so many tokens each; where none, `beyond` stands."""
    state = drafter.init(*text.shape, jnp.dtype(jnp.float32))
    return _cut(drafter.prefill(state, text, jnp.int32(0), None), list(known), beyond)


def _cut(state: Any, known: list[RowInts], beyond: float) -> Any:
    if not isinstance(state, ModelState):
        return state
    cache, (length, *below) = state.cache, known
    seen = jnp.arange(cache.capacity)[:, None] < length[:, None, None, None]
    keys, values = (jnp.where(seen, one, beyond) for one in (cache.keys, cache.values))
    cache = dataclasses.replace(cache, keys=keys, values=values, length=length)
    return dataclasses.replace(state, cache=cache, below=_cut(state.below, below, beyond))


def until_end(tokens: Sequence[int], eos: Sequence[int] = EOS) -> list[int]:
    """The tokens up to the first end of text, that one included."""
    return list(tokens[: next((at + 1 for at, one in enumerate(tokens) if one in eos), None)])


def autoregressive(
    model: Llama, prompts: Texts, max_new_tokens: int = MOST_TOKENS, eos: Sequence[int] = EOS
) -> list[list[int]]:
    """What greedy decoding of every prompt gives, its end of text included."""
    return [until_end(tokens, eos) for tokens in greedy(model, prompts, max_new_tokens)]


def looked_up(lookup: Lookup, text: Sequence[int]) -> tuple[list[int], int, int]:
    """Prompt lookup, from its definition: sizes downwards, then places in order.

    And how many tokens match there, which may be more than are looked for, up to which place.
    """
    for size in range(lookup.max_ngram, lookup.min_ngram - 1, -1):
        if size > len(text):
            continue
        places = range(len(text) - size)
        for place in places if lookup.match == "earliest" else reversed(places):
            if text[place : place + size] == text[-size:]:
                both = zip(reversed(text[: place + size]), reversed(text), strict=False)
                matching = sum(1 for _ in itertools.takewhile(lambda pair: len({*pair}) == 1, both))
                proposed = text[place + size :][: lookup.num_speculative_tokens]
                matching = min(matching, max(len(_RATES), lookup.max_ngram))
                return list(proposed), matching, place + size - 1
    return [], 0, 0
