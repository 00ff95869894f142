"""What an engine samples is distributed as the target says."""

import dataclasses

import numpy as np
import oracle
import pytest
import random_pairs as pairs

from fly_jax import Exact, Lookup, Margin, Sampling
from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.models.llama import Llama

# A small vocabulary, so that every token is drawn often enough to be counted.
SMALL = dataclasses.replace(pairs.CONFIG, vocab_size=8, eos_token_ids=())
SHARPNESS = 1.5
PROMPT = [3, 1, 4, 1]
ROWS, DRAWS = 16, 768
TEMPERATURE, TOP_K = 0.9, 6


def models() -> tuple[Llama, Llama]:
    target = pairs.random_target(5, SMALL, SHARPNESS)
    return target, pairs.random_draft(5, 1.0, SMALL, SHARPNESS)


def probabilities(text: list[int], model: int = 0, below: float = np.inf) -> np.ndarray:
    """The distribution of the token that follows a text, by the oracle; 1 is the draft's.

    Of tokens whose logit is at most so far below the largest.
    """
    logits = pairs.logits_after(models()[model], text)[-1]
    cut = np.where(logits >= logits.max() - below, logits, -np.inf)
    return oracle.processed_probs(cut, TEMPERATURE, TOP_K, 1.0)


@pytest.mark.parametrize(("lookup", "below"), [(Lookup(1), np.inf), (None, 1.0)])
def test_tokens_have_the_targets_distribution(lookup: Lookup | None, below: float) -> None:
    """Speculation is lossless for the target as the rule's support cuts it, before all else."""
    rule, sampling = Exact(Margin(below) if below == 1 else None), Sampling(TEMPERATURE, TOP_K)
    engine = pairs.batch_engine(*models(), RoundSpec(rule, RoundStatic(3, lookup), sampling), ROWS)
    rows = engine.generate([PROMPT] * DRAWS, 3)
    assert all(row.num_draft_tokens == 3 * row.num_rounds for row in rows)
    accepted = sum(row.num_accepted_tokens for row in rows) / sum(row.num_rounds for row in rows)
    assert 0.2 < accepted < 2.5, "the draft is too good or too bad to test anything"
    probs = probabilities(PROMPT, below=below)
    assert 1 < np.count_nonzero(probs) <= TOP_K - (below == 1)
    assert oracle.goodness_of_fit([row.token_ids[0] for row in rows], probs) > 1e-3
    # Given what came before, the second and the third one too.
    for depth in (1, 2):
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(row.token_ids[:depth]), []).append(row.token_ids[depth])
        largest = sorted(groups, key=lambda group: len(groups[group]), reverse=True)[:3]
        assert len(groups[largest[-1]]) > 25
        for one in largest:
            probs = probabilities([*PROMPT, *one], below=below)
            assert oracle.goodness_of_fit(groups[one], probs) > 1e-4, one


def test_the_test_of_fit_notices_the_wrong_distribution() -> None:
    tokens = np.random.default_rng(0).choice(SMALL.vocab_size, DRAWS, p=probabilities([2, 2]))
    assert oracle.goodness_of_fit(tokens[tokens < 8].tolist(), probabilities([2, 2])) > 1e-3
    drawn = np.random.default_rng(0).choice(SMALL.vocab_size, DRAWS, p=probabilities(PROMPT, 1))
    target = np.where(probabilities(PROMPT) == 0, 1e-9, probabilities(PROMPT))
    assert oracle.goodness_of_fit(drawn.tolist(), target / target.sum()) < 1e-6
