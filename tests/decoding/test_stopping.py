"""Drafting that stops early: where the definition says, and nothing else changes."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array
from oracle import fly_row, greedy_evidence
from random_pairs import (
    CAPACITY,
    CONFIG,
    EOS,
    MOST_TOKENS,
    NOISES,
    autoregressive,
    greedy,
    logits_after,
    random_draft,
    random_target,
    state_after,
)

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.drafters.chain import drafter_of
from fly_jax.decoding.drafters.drafter import Draft
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.generation import Generation
from fly_jax.decoding.spec import RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Budget, Exact, Fly, Rule

K, PAIR, NOISE = 7, 2, 0.2
STOP = EntropyStop(share=0.7, first=0.45, step=0.1)
FLY = Fly(entropy_threshold=0.2, window_size=2)
LOOKUP = Lookup(num_tokens=3)


def bounds(model: Llama, prompt: list[int], drafted: list[int]) -> list[float]:
    """1 - sqrt(gamma H) of the distribution of every drafted token."""
    logits = logits_after(model, [*prompt, *drafted])[len(prompt) - 1 : -1].astype(np.float64)
    found = []
    for row in logits:
        probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        found.append(1 - math.sqrt(STOP.gamma * entropy))
    return found


def drafted_until(model: Llama, prompt: list[int], threshold: float) -> list[int]:
    """What is drafted after a prompt: K tokens, or up to the first one in doubt."""
    (drafted,) = greedy(model, [prompt], K)
    for index, bound in enumerate(bounds(model, prompt, drafted)):
        if bound < threshold:
            return drafted[: index + 1]
    return drafted


@functools.partial(jax.jit, static_argnames=("lookup", "sizes"))
def drafted(
    models: tuple[Llama, ...],
    text: Array,
    length: Array,
    threshold: Array,
    lookup: Lookup | None,
    sizes: tuple[int, ...],
) -> Draft:
    spec = RoundSpec(Exact(), K, lookup, level_speculative_tokens=sizes, draft_stop=STOP)
    drafter = drafter_of(models, spec)
    assert drafter is not None
    state = state_after(drafter, text, [length] * len(models), beyond=7.0)
    state = dataclasses.replace(state, threshold=threshold)
    return drafter.propose(state, text, length, K)[0]


@pytest.mark.parametrize(("lookup", "sizes"), [(None, ()), (LOOKUP, (3,))])
def test_rows_stop_by_themselves(lookup: Lookup | None, sizes: tuple[int, ...]) -> None:
    """Each after its own token in doubt, whatever the levels below propose beyond it."""
    draft = random_draft(PAIR, NOISE)
    prompts = [[1, 2, 3], [4, 5, 4, 5, 4], [6, 9]]
    text, counts = np.zeros((3, 64), np.int32), set()
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    length = jnp.asarray([len(prompt) for prompt in prompts])
    for thresholds in ([0.3, 0.6, 0.45], [0.0, 2.0, 0.5], [0.5, 0.4, 0.35]):
        models = (draft, *(random_draft(PAIR, 0.0) for _ in sizes))
        found = drafted(models, jnp.asarray(text), length, jnp.asarray(thresholds), lookup, sizes)
        for row, prompt in enumerate(prompts):
            expected = drafted_until(draft, prompt, thresholds[row])
            assert int(found.num_drafted[row]) == len(expected)
            assert found.tokens[row, : len(expected)].tolist() == expected
            counts.add(len(expected))
    assert len(counts) > 3, "all rows stop alike"


def test_the_bound() -> None:
    sure = jnp.asarray([[[0.0, -jnp.inf, -jnp.inf], [50.0, -50.0, -50.0]]])
    assert not jnp.any(STOP.stops(sure, jnp.ones(1))), "a draft without doubt never stops"
    even = jnp.zeros((1, 1, 4))
    bound = 1 - math.sqrt(STOP.gamma * math.log(4))
    assert STOP.stops(even, jnp.asarray([bound + 1e-3])).item()
    assert not STOP.stops(even, jnp.asarray([bound - 1e-3])).item()


def test_the_threshold_follows_what_is_accepted() -> None:
    before = jnp.asarray([0.4, 0.4, 0.4, 0.0, 1.0])
    after = STOP.after(before, jnp.asarray([7, 0, 1, 4, 0]), jnp.asarray([10, 5, 1, 4, 3]))
    np.testing.assert_allclose(after, [0.4, 0.47, 0.37, 0.0, 1.0], atol=1e-6)


@dataclasses.dataclass
class Plain:
    tokens: list[int]
    why: str = ""
    rounds: int = 0
    drafted: int = 0


def plain_row(prompt: list[int], limit: int) -> Plain:
    """One row of FLy with early stopping, from functions of the whole text."""
    target, draft = random_target(PAIR), random_draft(PAIR, NOISE)
    threshold, row = STOP.first, Plain([])
    while len(row.tokens) < limit and not (row.tokens and row.tokens[-1] in EOS):
        text = [*prompt, *row.tokens]
        proposed = drafted_until(draft, text, threshold)
        k = len(proposed)
        logits = logits_after(target, [*text, *proposed])[len(text) - 1 :]
        seen = [greedy_evidence(logits[at], proposed[at], "top_k", 3) for at in range(k)]
        decided = fly_row(
            [one.accepted for one in seen],
            [one.entropy for one in seen],
            [token in EOS or one.argmax in EOS for token, one in zip(proposed, seen, strict=True)],
            k, threshold=FLY.entropy_threshold, window_size=FLY.window_size, reference=False,
        )  # fmt: skip
        kept = decided.num_accepted
        row.rounds += 1
        row.drafted += k
        why = "".join({"MATCHED": "m", "RESCUED": "r"}[name] for name in decided.why[:kept])
        why += "b" if kept == k else "c"
        for token, letter in zip(
            [*proposed[:kept], int(np.argmax(logits[kept]))], why, strict=True
        ):
            if len(row.tokens) < limit and not (row.tokens and row.tokens[-1] in EOS):
                row.tokens.append(token)
                row.why += letter
        threshold = min(max(threshold + STOP.step * (STOP.share - kept / k), 0.0), 1.0)
    return row


def decode(
    rule: Rule, prompts: list[list[int]], limit: int, *,
    pair: int = PAIR, noise: float = NOISE, **static: object,
) -> list[Generation]:  # fmt: skip
    spec = RoundSpec(rule, K, eos_token_ids=EOS, draft_stop=STOP, **static)  # type: ignore[arg-type]
    decoder = Decoder(
        random_target(pair), random_draft(pair, noise), spec, capacity=CAPACITY, batch_size=3
    )
    return decoder.generate(prompts, limit)


def test_fly_equals_the_plain_walk() -> None:
    """Window and boundary are those of the row's own block, and so is the pass that follows."""
    prompts = [[first, 3, 5] for first in range(9)]
    rows, plain = (
        decode(FLY, prompts, MOST_TOKENS),
        [plain_row(one, MOST_TOKENS) for one in prompts],
    )
    for found, expected in zip(rows, plain, strict=True):
        assert found.token_ids == expected.tokens
        assert "".join(why.letter for why in found.why) == expected.why
        assert found.num_rounds == expected.rounds
        assert found.num_draft_tokens == expected.drafted
    assert sum(one.why.count("r") for one in plain) > 2
    assert K > sum(one.drafted for one in plain) / sum(one.rounds for one in plain) > 1.5


tokens = st.integers(0, CONFIG.vocab_size - 1) | st.integers(0, 2)


@pytest.mark.parametrize("name", ["lookup", "depths", "defer"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    pair=st.integers(0, 3),
    noise=st.sampled_from(NOISES),
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=16), min_size=1, max_size=4),
    limit=st.integers(1, MOST_TOKENS),
)
def test_lossless_rules_stay_lossless(
    name: str, pair: int, noise: float, prompts: list[list[int]], limit: int
) -> None:
    rule: Rule = Budget(FLY, 0.0) if name == "defer" else Exact()
    static = {"lookup": {"lookup": LOOKUP}, "depths": {"depths": (2, K)}}
    more = static.get(name, {"boundary": "defer"})
    rows = decode(rule, prompts, limit, pair=pair, noise=noise, **more)
    assert [row.token_ids for row in rows] == autoregressive(random_target(pair), prompts, limit)


def test_windows_are_deferred_behind_short_blocks() -> None:
    """What settles is what the target says after it, but for rescues and their windows."""
    prompts = [[first, 3, 5] for first in range(9)]
    rows = decode(Fly(0.0, 3), prompts, MOST_TOKENS, pair=1, noise=0.1, boundary="defer")
    assert sum(row.num_rollbacks for row in rows) > 0
    for row, prompt in zip(rows, prompts, strict=True):
        choices = np.argmax(logits_after(random_target(1), [*prompt, *row.token_ids]), axis=1)
        own = choices[len(prompt) - 1 : -1].tolist()
        for index, (token, choice, why) in enumerate(zip(row.token_ids, own, row.why, strict=True)):
            assert (token == choice) == (why.letter != "r")
            if why.letter == "r":  # the window, in which the target's own tokens do not count
                rest = [one.letter for one in row.why[index + 1 :] if one.letter != "b"]
                assert set(rest[:3]) <= {"m"}


@pytest.mark.parametrize("wrong", [{"gamma": 0.0}, {"share": 1.0}, {"first": 1.5}, {"step": -1.0}])
def test_impossible_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(FlyJaxError, match=f"draft_stop_{next(iter(wrong))}"):
        EntropyStop(**wrong)
