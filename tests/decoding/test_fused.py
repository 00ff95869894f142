"""The fused loop against the steps it is made of, an oracle of Fly, and its own account."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs
from jaxtyping import Array

from fly_jax import Generation, KVCache, Lookup, empty_cache, evidence, verify_step
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.decoding.drafters.drafter import Terms
from fly_jax.decoding.drafters.model import DraftModel, ModelState
from fly_jax.models.llama import Llama
from fly_jax.verification.rules import Exact, Fly, accept

PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3, 5, 8, 9]]
MAX_NEW_TOKENS = 24
DRAFTED = 5
FLY = Fly(entropy_threshold=0.4, window_size=2)
CASES = [pairs.SPECS[name] for name in ("exact", "fly, lookup", "sampled")]
PROTECTED = np.isin(np.arange(pairs.CONFIG.vocab_size), pairs.EOS)

draft_alone = jax.jit(DraftModel.propose, static_argnames="num_speculative_tokens")
verify_alone = jax.jit(verify_step)
evidence_alone = jax.jit(evidence, static_argnames="needs")
accept_alone = jax.jit(accept)


@jax.jit
def prefilled(target: Llama, drafter: DraftModel, text: Array) -> tuple[KVCache, ModelState]:
    cache = target.extend(text, empty_cache(target.config, *text.shape, jnp.float32))[1]
    state = drafter.init(*text.shape, jnp.float32)
    return cache, drafter.prefill(state, text, jnp.int32(0), None)


def fused(spec: RoundSpec, *, pair: int, noise: float, seed: int = 0) -> list[Generation]:
    return pairs.pair_engine(pair, spec, noise).generate(PROMPTS, MAX_NEW_TOKENS, seed=seed)


def foreign_engine(
    spec: RoundSpec, *, pair: int, noise: float, seed: int
) -> list[tuple[list[int], str]]:
    """Somebody else's loop: her own text and caches, and the steps called one by one."""
    rule, sampling = spec.rule, spec.sampling
    target, draft = pairs.random_target(pair), pairs.random_draft(pair, noise)
    text, length = pairs.padded(PROMPTS, pairs.CAPACITY)
    drafter = DraftModel(
        draft.parameters(), spec.static.lookup, config=pairs.CONFIG, num_speculative_tokens=DRAFTED
    )
    target_cache, drafter_state = prefilled(target, drafter, text)
    keys = draft_keys = verify_keys = pairs.keys_from(seed, len(PROMPTS))
    emitted: list[tuple[list[int], str]] = [([], "") for _ in PROMPTS]
    live = set(range(len(PROMPTS)))
    while live:
        if sampling is not None:
            split = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
            keys, draft_keys, verify_keys = split[:, 0], split[:, 1], split[:, 2]
        terms = Terms(None, sampling, None if sampling is None else draft_keys)
        proposal, drafter_state = draft_alone(drafter, drafter_state, text, length, DRAFTED, terms)
        logits, target_cache = verify_alone(target, target_cache, text, length, proposal.tokens)
        seen = evidence_alone(
            logits, proposal.tokens, needs=rule.needs, sampling=sampling,
            draft_logits=proposal.logits, key=verify_keys,
        )  # fmt: skip
        kept = accept_alone(rule, seen, proposal.tokens, protected=PROTECTED)
        for row in sorted(live):
            count = int(kept.num_accepted[row])
            new = [*np.asarray(proposal.tokens[row, :count]).tolist(), int(kept.next_token[row])]
            tokens, letters = emitted[row]
            letters += "".join("mr"[int(why)] for why in np.asarray(kept.why[row, :count]))
            letters += "cb"[int(count == DRAFTED)]
            tokens = pairs.until_end([*tokens, *new])[:MAX_NEW_TOKENS]
            emitted[row] = (tokens, letters[: len(tokens)])
            text[row, length[row] : length[row] + len(new)] = new
            if tokens[-1] in pairs.EOS or len(tokens) == MAX_NEW_TOKENS:
                live.discard(row)
            else:
                length[row] += len(new)
    return emitted


def letters(row: Generation) -> str:
    return "".join(why.letter for why in row.why)


@pytest.mark.parametrize("spec", CASES)
def test_steps_alone_give_the_same_tokens(spec: RoundSpec) -> None:
    seen = set()
    for pair, noise in ((0, 0.2), (2, 0.5)):
        rows = fused(spec, pair=pair, noise=noise, seed=pair)
        expected = foreign_engine(spec, pair=pair, noise=noise, seed=pair)
        assert [(row.token_ids, letters(row)) for row in rows] == expected
        seen |= set("".join(letters(row) for row in rows))
    assert seen == set("mrcb" if isinstance(spec.rule, Fly) else "mcb")


def fly_by_the_oracle(prompt: Sequence[int], *, pair: int, noise: float) -> tuple[list[int], str]:
    """Whole passes without a cache, and the plain loops of the rule's oracle."""
    tokens: list[int] = []
    why = ""
    while len(tokens) < MAX_NEW_TOKENS and not (tokens and tokens[-1] in pairs.EOS):
        drafted, seen, decided = pairs.fly_block(FLY, pair, noise, [*prompt, *tokens], DRAFTED)
        kept = decided.num_accepted
        tokens += [*drafted[:kept], seen[kept].argmax]
        why += "".join({"MATCHED": "m", "RESCUED": "r"}[name] for name in decided.why[:kept])
        why += {"CORRECTED": "c", "BONUS": "b"}[decided.next_why]
        tokens = pairs.until_end(tokens)
    tokens = tokens[:MAX_NEW_TOKENS]
    return tokens, why[: len(tokens)]


@pytest.mark.parametrize("name", ["fly", "fly, lookup"])
def test_fly_decodes_as_its_oracle(name: str) -> None:
    rescued = 0
    for pair, noise in ((0, 0.2), (3, 0.3)):
        rows = fused(pairs.SPECS[name], pair=pair, noise=noise)
        expected = [fly_by_the_oracle(prompt, pair=pair, noise=noise) for prompt in PROMPTS]
        assert [(row.token_ids, letters(row)) for row in rows] == expected
        rescued += sum(row.num_rescued_tokens for row in rows)
    assert rescued > 0


@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("noise", pairs.NOISES)
def test_the_account_adds_up(spec: RoundSpec, noise: float) -> None:
    for row in fused(spec, pair=1, noise=noise):
        why = letters(row)
        assert len(why) == len(row.token_ids)
        assert row.num_draft_tokens == DRAFTED * row.num_rounds
        assert row.num_accepted_tokens == why.count("m") + why.count("r")
        assert row.num_rescued_tokens == why.count("r")
        # Every round but a last one that was cut short ends in a token of the target's own.
        own = why.count("c") + why.count("b")
        assert own == row.num_rounds - (why[-1] in "mr")
        assert row.mean_accepted_tokens == len(row.token_ids) / row.num_rounds
        assert row.num_rounds <= row.num_draft_passes <= DRAFTED * row.num_rounds
        assert row.seconds > 0
        if noise == 0 and spec is pairs.SPECS["exact"]:
            assert {"m"} <= set(why) <= {"m", "b"}


def test_a_round_needs_no_more_room_than_it_says() -> None:
    """The last position of the text and of the cache may be the last that a round writes."""
    spec = RoundSpec(Exact(), RoundStatic(12, Lookup(num_speculative_tokens=3)))
    prompts = [[1] * 24, [6, 3], [7, 3]]
    length = 24 + MAX_NEW_TOKENS
    engine = pairs.pair_engine(2, spec, 0.2, max_length=length)
    assert engine._capacity == length + spec.static.room
    rows = engine.generate(prompts, MAX_NEW_TOKENS)
    assert [row.token_ids for row in rows] == pairs.greedy(pairs.random_target(2), prompts)
