from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from fly_jax.evaluation.paired import compare_paired, mcnemar, retention


def _verdicts(both: int, lost: int, gained: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = (both, lost, gained, neither)
    base, other = np.repeat([True, True, False, False], sizes), np.repeat([1, 0, 1, 0], sizes)
    return base, other.astype(bool)


def test_retention() -> None:
    kept, low, high = retention(*_verdicts(70, 10, 5, 15)) or (0.0, 0.0, 0.0)
    assert kept == pytest.approx(75 / 80)
    assert low < kept < high
    assert retention(*_verdicts(0, 0, 3, 3)) is None


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (3, 3), (1, 9), (40, 12)])
def test_mcnemar(gained: int, lost: int) -> None:
    wanted = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(wanted)


def test_tango() -> None:
    # With no item changed the limit is z^2 / (n + z^2).
    for number, verdict in ((380, "undecided"), (381, "not worse")):
        assert compare_paired(*_verdicts(number, 0, 0, 0), 1.0)["verdict"] == verdict
    assert compare_paired(*_verdicts(50, 50, 0, 0), 1.0)["verdict"] == "worse"


def test_items_to_decide() -> None:
    found = compare_paired(*_verdicts(96, 2, 2, 0), 1.0)
    # (1.96 + 0.84)^2 times the variance over the margin squared. The variance is 4 in 100, and 0.2
    # more for shares that fit a loss of the margin.
    assert found["items_to_decide"] == pytest.approx(7.849 * 0.04217 / 0.01**2, rel=1e-3)
    many = compare_paired(*_verdicts(9600, 240, 170, 0), 1.0)
    assert many["verdict"] == "undecided"
    assert many["items_to_decide"] > 10_000
