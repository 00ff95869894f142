"""What the draft model takes in after a step of the target."""

from __future__ import annotations

import numpy as np

from fly_jax.integrations.vllm_tpu.draft_inputs import TargetStep, decoding_step, take_in

ROWS, TOKENS, LIMIT = 4, 10, 64


def taken(requests: list[tuple[int, list[int], int, int]]) -> object:
    """Requests as (position of the first token, tokens, rejected at the end, next token)."""
    counts = [len(tokens) for _, tokens, _, _ in requests]
    flat = [token for _, tokens, _, _ in requests for token in tokens]
    positions = [first + i for first, tokens, _, _ in requests for i in range(len(tokens))]
    pad = TOKENS - len(flat)
    missing = ROWS - len(requests)
    # What the engine leaves in places that are padding is not zero.
    return take_in(
        TargetStep(
            tokens=np.array(flat + [99] * pad),
            positions=np.array(positions + [5] * pad),
            starts=np.array([0, *np.cumsum(counts), *[1] * missing]),
            lengths=np.array([f + len(t) for f, t, _, _ in requests] + [7] * missing),
            next_token=np.array([token for *_, token in requests] + [98] * missing),
            num_rejected=np.array([n for _, _, n, _ in requests] + [3] * missing),
            num_requests=np.array([len(requests)]),
        ),
        max_length=LIMIT,
    )


def test_a_prompt_a_rejection_and_a_step_without_drafts() -> None:
    found = taken([(0, [10, 11, 12], 0, 13), (20, [30, 31, 32, 33], 2, 40), (9, [50], 0, 51)])
    assert found.tokens[:9].tolist() == [10, 11, 12, 13, 30, 31, 40, 50, 51]
    assert found.positions[:9].tolist() == [0, 1, 2, 3, 20, 21, 22, 9, 10]
    assert found.starts.tolist() == [0, 4, 7, 9, 9]
    assert found.lengths[:3].tolist() == [4, 23, 11]
    assert found.last[:3].tolist() == [3, 6, 8]
    assert found.distribution.tolist() == [0, 0, 3]


def test_no_request_reaches_beyond_its_limit() -> None:
    found = taken([(LIMIT - 3, [1, 2, 3], 0, 4)])
    assert found.positions[:4].tolist() == [LIMIT - 3, LIMIT - 2, LIMIT - 1, LIMIT - 1]
    assert found.lengths[0] == LIMIT


def test_a_step_without_requests_takes_in_nothing() -> None:
    found = taken([])
    assert found.starts.tolist() == [0] * (ROWS + 1)
    assert found.distribution.tolist() == [0, 0, 0]


def test_drafting_goes_on_from_the_last_token_of_each() -> None:
    found = taken([(0, [10, 11], 0, 12), (20, [30], 0, 31)])
    hidden = np.arange(TOKENS + ROWS)[:, None]
    last, positions, starts, distribution = decoding_step(
        hidden, np.asarray(found.positions), found.last, np.asarray(found.distribution)
    )
    assert last[:2, 0].tolist() == [2, 4]
    assert positions[:2].tolist() == [2, 21]
    assert starts.tolist() == [0, 1, 2, 3, 4]
    assert distribution.tolist() == [2, 2, 2]
