"""What an engine samples is distributed as the target says."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
import random_pairs as pairs
import scipy.stats

from fly_jax import Exact, Fly, Generation, Lookup, Margin, Rule, Sampling
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.models.llama import Llama

# A small vocabulary, so that every token is drawn often enough to be counted.
SMALL = dataclasses.replace(pairs.CONFIG, vocab_size=8, eos_token_ids=())
SHARPNESS = 1.5
PROMPT = [3, 1, 4, 1]
ROWS, DRAWS = 16, 768
TEMPERATURE, TOP_K = 0.9, 6
LOOKUP = Lookup(max_ngram=1, num_speculative_tokens=2)


def models() -> tuple[Llama, Llama]:
    target = pairs.random_target(5, SMALL, SHARPNESS)
    return target, pairs.random_draft(5, 1.0, SMALL, SHARPNESS)


def decode(
    rule: Rule, lookup: Lookup | None, *, draws: int = DRAWS, count: int, seed: int = 0
) -> list[Generation]:
    spec = RoundSpec(rule, RoundStatic(3, lookup), Sampling(TEMPERATURE, TOP_K))
    engine = pairs.batch_engine(*models(), spec, ROWS)
    return engine.generate([PROMPT] * draws, count, seed=seed)


def probabilities(text: list[int], model: int = 0, below: float = np.inf) -> np.ndarray:
    """The distribution of the token that follows a text, by the oracle; 1 is the draft's.

    Of tokens whose logit is at most so far below the largest.
    """
    logits = pairs.logits_after(models()[model], text)[-1]
    cut = np.where(logits >= logits.max() - below, logits, -np.inf)
    return oracle.processed_probs(cut, TEMPERATURE, TOP_K, 1.0)


def goodness_of_fit(tokens: list[int], probs: np.ndarray) -> float:
    """The p-value of a chi-square test; tokens that are expected too seldom share a bin."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert not np.any(counts[probs == 0])
    both = np.stack([counts, probs * len(tokens)])
    rare = both[1] < 5
    both = np.column_stack([both[:, ~rare], both[:, rare].sum(axis=1)])
    both = both[:, both[1] > 0]
    # One bin alone fits: nothing else could be drawn.
    return float(scipy.stats.chisquare(*both).pvalue) if both.shape[1] > 1 else 1.0


@pytest.mark.parametrize(("lookup", "below"), [(LOOKUP, np.inf), (None, 1.0)])
def test_tokens_have_the_targets_distribution(lookup: Lookup | None, below: float) -> None:
    """Speculation is lossless for the target as the rule's support cuts it, before all else."""
    rows = decode(Exact(Margin(below) if below == 1 else None), lookup, count=3)
    assert all(row.num_draft_tokens == 3 * row.num_rounds for row in rows)
    accepted = sum(row.num_accepted_tokens for row in rows) / sum(row.num_rounds for row in rows)
    assert 0.2 < accepted < 2.5, "the draft is too good or too bad to test anything"
    probs = probabilities(PROMPT, below=below)
    assert 1 < np.count_nonzero(probs) <= TOP_K - (below == 1)
    assert goodness_of_fit([row.token_ids[0] for row in rows], probs) > 1e-3
    # Given what came before, the second and the third one too.
    for depth in (1, 2):
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(row.token_ids[:depth]), []).append(row.token_ids[depth])
        largest = sorted(groups, key=lambda group: len(groups[group]), reverse=True)[:3]
        assert len(groups[largest[-1]]) > 25
        for one in largest:
            probs = probabilities([*PROMPT, *one], below=below)
            assert goodness_of_fit(groups[one], probs) > 1e-4, one


def test_the_test_of_fit_notices_the_wrong_distribution() -> None:
    tokens = np.random.default_rng(0).choice(SMALL.vocab_size, DRAWS, p=probabilities([2, 2]))
    assert goodness_of_fit(tokens[tokens < 8].tolist(), probabilities([2, 2])) > 1e-3
    drawn = np.random.default_rng(0).choice(SMALL.vocab_size, DRAWS, p=probabilities(PROMPT, 1))
    target = np.where(probabilities(PROMPT) == 0, 1e-9, probabilities(PROMPT))
    assert goodness_of_fit(drawn.tolist(), target / target.sum()) < 1e-6


def test_fly_emits_only_what_the_target_may_say() -> None:
    rule, seeds = Fly(entropy_threshold=0.3, window_size=1), (3, 3, 4)
    rows, again, other = (decode(rule, LOOKUP, draws=ROWS, count=16, seed=one) for one in seeds)
    assert sum(row.num_rescued_tokens for row in rows) > 0
    found, same, others = ([row.token_ids for row in some] for some in (rows, again, other))
    for tokens in found:
        for index, token in enumerate(tokens):
            assert probabilities([*PROMPT, *tokens[:index]])[token] > 0
    assert same == found != others
    assert len(set(map(tuple, found))) > ROWS // 2, "rows share their noise"
