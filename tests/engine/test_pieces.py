from __future__ import annotations

import itertools

from fly_jax.engine.prefill import piece_sizes, pieces, shared_beginnings


def test_pieces_cover_a_prompt() -> None:
    for start, end in itertools.product(range(0, 250, 7), range(1, 250, 3)):
        done = start
        for piece in pieces(start, end, piece_sizes(64), (256,)):
            assert piece.start <= done <= piece.attended
            assert piece.start + piece.size <= 256
            done = piece.start + piece.size
        assert done >= end or start >= end
        assert done - max(start, end) < 64


def test_shared_beginnings() -> None:
    prompts = [[1, 2, 3, 4], [9], [1, 2, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4], [9, 9]]
    assert shared_beginnings(prompts) == [3, 0, 2, 4, 3, 1]
    assert shared_beginnings([[5, 6]]) == [0]
