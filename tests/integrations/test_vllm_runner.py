"""The sampler in the engine's own classes, beside the stock one; where vllm-tpu is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracle
import pytest
import scipy.stats
from jax.sharding import AxisType, Mesh

if importlib.util.find_spec("tpu_inference") is None:
    pytest.skip(
        "vllm-tpu is not installed: pip install vllm-tpu==0.32.0 (Python 3.12, 11 GB)",
        allow_module_level=True,
    )

from test_vllm_row_rules import (
    LONGEST,
    NEVER,
    ROWS,
    THRESHOLD,
    TOKENS,
    VOCAB,
    WINDOW,
    batch,
    greedy_rows,
    rows_of,
)
from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

from fly_jax.integrations.vllm_tpu.row_rules import RowRules
from fly_jax.integrations.vllm_tpu.runner import LoosenedSampler
from fly_jax.integrations.vllm_tpu.startup import decoding_config

FLY = {"rule": "fly", "entropy_threshold": THRESHOLD, "window_size": WINDOW}
RANKS = 2


def mesh(ranks: int) -> Mesh:
    """Data parallel attention over the first axis; the vocabulary is split over the second."""
    return jax.make_mesh((ranks, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sampler(ranks: int = 1, **asked: Any) -> LoosenedSampler:
    rows = RowRules(decoding_config(FLY | asked, LONGEST), 2 * ROWS)
    return LoosenedSampler(
        mesh(ranks), rows, max_drafted=LONGEST, protected=np.arange(VOCAB) == NEVER, memory=None
    )


def metadata(temperature: float | None) -> TPUSupportedSamplingMetadata:
    if temperature is None:
        return TPUSupportedSamplingMetadata(do_sampling=False)
    return TPUSupportedSamplingMetadata(
        temperature=np.full(ROWS, temperature, np.float32),
        top_k=np.full(ROWS, 5, np.int32),
        top_p=np.full(ROWS, 0.9, np.float32),
        do_sampling=True,
    )


def called(
    one: Callable[..., Any],
    inputs: tuple[np.ndarray, ...],
    temperature: float | None = None,
    seed: int = 0,
) -> np.ndarray:
    counts, drafts, logits, bonus = inputs
    key = jax.random.key(seed)
    return np.asarray(one(drafts, counts, None, logits, bonus, metadata(temperature), key))


def test_greedy_requests_are_the_oracles() -> None:
    one = sampler()
    for seed in range(6):
        inputs = batch(seed)
        assert rows_of(called(one, inputs), inputs[0]) == greedy_rows(inputs, [True] * ROWS)


def test_where_nothing_is_rescued_it_is_the_stock_sampler_bit_for_bit() -> None:
    one = sampler(entropy_threshold=1e9)
    stock = RejectionSampler(mesh(1))
    for seed in range(6):
        counts, drafts, logits, bonus = batch(seed)
        counts[-1] = 0  # what pads the tokens belongs to the last request, for the stock sampler
        found = called(one, (counts, drafts, logits, bonus))
        expected = called(stock, (counts, drafts, logits, bonus))
        used = counts.sum()
        assert found[:used].tolist() == expected[:used].tolist()
        assert found[TOKENS:].tolist() == expected[TOKENS:].tolist()


def test_each_rank_of_data_parallel_attention_decides_on_its_requests() -> None:
    alone, together = sampler(), sampler(RANKS)
    halves = [batch(seed) for seed in (1, 2)]
    # One rank after the other, each with its padding: half of the rows of a batch.
    inputs = tuple(np.concatenate(pair) for pair in zip(*halves, strict=True))
    found = called(together, inputs)
    expected = np.concatenate([called(alone, half) for half in halves])
    assert found.tolist() == expected.tolist()


def test_a_request_that_asks_for_it_is_decoded_exactly() -> None:
    one = sampler()
    inputs = batch(1)

    class Parameters:
        temperature = 0.0

        def __init__(self, name: str) -> None:
            self.extra_args = {"fly_jax": {"rule": "exact"}} if int(name) % 2 else None

    names = [str(row) for row in range(ROWS)]
    one.begin(names, names, Parameters)
    expected = greedy_rows(inputs, [row % 2 == 0 for row in range(ROWS)])
    assert rows_of(called(one, inputs), inputs[0]) == expected


def test_sampled_requests_have_the_targets_distribution() -> None:
    one = sampler(entropy_threshold=1e9)
    logits = np.random.default_rng(5).normal(0, 1, VOCAB).astype(np.float32)
    temperature = 0.8
    inputs = (
        np.ones(ROWS, np.int32),
        np.full(TOKENS, 2, np.int32),
        np.broadcast_to(logits, (TOKENS, VOCAB)),
        np.zeros(ROWS, np.int32),
    )
    found = []
    for seed in range(300):
        found.append(called(one, inputs, temperature, seed)[:ROWS])
    expected = oracle.processed_probs(logits, temperature, 5, 0.9)
    numbers = np.bincount(np.concatenate(found), minlength=VOCAB)
    live = expected > 0
    assert numbers[~live].sum() == 0
    assert scipy.stats.chisquare(numbers[live], expected[live] * numbers.sum()).pvalue > 1e-3
