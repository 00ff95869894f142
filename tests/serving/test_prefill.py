from __future__ import annotations

import itertools

from fly_jax.serving.prefill import piece_sizes, pieces


def test_pieces_cover_a_prompt() -> None:
    for start, end in itertools.product(range(0, 250, 7), range(1, 250, 3)):
        done = start
        for piece in pieces(start, end, piece_sizes(64), (256,)):
            assert piece.start <= done <= piece.attended
            assert piece.start + piece.size <= 256
            done = piece.start + piece.size
        assert done >= end or start >= end
        assert done - max(start, end) < 64
