"""A long prompt that is taken in piece by piece decodes as one that is taken in at once."""

from __future__ import annotations

import pytest
from fly_jax.decoding.capacity import bucket_for, capacity_for
from fly_jax.decoding.decoder import Decoder
from random_pairs import CAPACITY, EOS, autoregressive, random_draft, random_target

from fly_jax.decoding import capacity, programs
from fly_jax.decoding.programs import prefill_piece
from fly_jax.decoding.spec import RoundSpec
from fly_jax.verification.rules import Exact

PIECE = 16


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (programs, capacity):
        monkeypatch.setattr(module, "prefill_piece", lambda rows: PIECE)


@pytest.mark.usefixtures("pieces")
def test_pieces_are_as_good_as_the_whole() -> None:
    prompts = [[token % 48 for token in range(3, 3 + length)] for length in (38, 5, 17, 33)]
    spec = RoundSpec(Exact(), 3, None, EOS)
    decoder = Decoder(random_target(1), random_draft(1, 0.2), spec, capacity=CAPACITY, batch_size=4)
    found = [row.token_ids for row in decoder.generate(prompts, 16)]
    assert found == autoregressive(random_target(1), prompts, 16)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("length", "padded"), [(16, 16), (17, 32), (33, 48), (48, 48)])
def test_a_long_prompt_is_padded_to_whole_pieces(length: int, padded: int) -> None:
    spec = RoundSpec(Exact(), 0, None, EOS)
    assert capacity_for(spec, [[1] * length], 1, 64) >= padded
    assert bucket_for(length, rows=1) == padded


def test_a_piece_of_many_rows_is_shorter() -> None:
    """What fills a chip is the scores of all rows together."""
    pieces = [prefill_piece(rows) for rows in range(1, 300)]
    assert pieces == sorted(pieces, reverse=True)
    assert all(piece.bit_count() == 1 for piece in pieces)
    assert all(rows * piece <= 2 * pieces[0] for rows, piece in enumerate(pieces, start=1))
    assert prefill_piece(10**6) == 1
