"""A training run that was stopped goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tiny_pair import CONFIG

from fly_jax.training.trainer import Recipe, Row, steps_done, train

RECIPE = Recipe(
    config=CONFIG, num_steps=9, batch_size=2, row_length=12, learning_rate=1e-2, warmup_steps=2,
    seed=0,
)  # fmt: skip


def rows(start: int, *, stop: int | None = None) -> Iterator[Row]:
    """Those of each step, from one on; Ctrl-C before another."""
    for step in range(start, RECIPE.num_steps):
        if step == stop:
            raise KeyboardInterrupt
        size = (RECIPE.batch_size, RECIPE.row_length + 1)
        tokens = np.random.default_rng(step).integers(4, CONFIG.vocab_size, size, np.int32)
        positions = np.broadcast_to(np.arange(size[1], dtype=np.int32), size)
        ones = np.ones((size[0], size[1] - 1), np.float32)
        yield Row(tokens, ones, np.ones(size, np.int32), positions)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train(RECIPE, rows, tmp_path / "whole", steps_per_checkpoint=4)
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, lambda start: rows(start, stop=6), stopped, steps_per_checkpoint=4)
    assert steps_done(stopped) == 4
    again = Mock(wraps=rows)
    resumed = train(RECIPE, again, stopped, steps_per_checkpoint=4)
    again.assert_called_once_with(4)
    assert steps_done(stopped) == RECIPE.num_steps
    for name, values in whole.parameters().items():
        np.testing.assert_array_equal(resumed.parameters()[name], values, err_msg=name)
