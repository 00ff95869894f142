"""The model of acceptance and speed."""

from __future__ import annotations

import pytest

from fly_jax.errors import FlyJaxError
from fly_jax.planning.roofline import StepTimes, acceptance_from, best_drafted, mean_accepted


def test_mean_accepted_is_the_sum_over_prefixes() -> None:
    assert mean_accepted(0.8, 3) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    assert mean_accepted(0.0, 9) == 1
    assert mean_accepted(1.0, 9) == 10


@pytest.mark.parametrize(("mean", "drafted"), [(1.0, 4), (12.41, 15), (17.13, 25), (6.0, 5)])
def test_acceptance_gives_the_mean_back(mean: float, drafted: int) -> None:
    assert mean_accepted(acceptance_from(mean, drafted), drafted) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("mean", [0.5, 6.5])
def test_a_mean_beyond_the_block_is_refused(mean: float) -> None:
    with pytest.raises(FlyJaxError, match="1 to 6"):
        acceptance_from(mean, 5)


def test_best_k_is_the_best_of_all() -> None:
    times = StepTimes(draft_pass=0.1, verify=1.0, autoregressive=1.0)
    best, speed_up = best_drafted(times, 0.8, 10)
    speeds = [mean_accepted(0.8, k) / (1 + 0.1 * k) for k in range(1, 40)]
    assert best == 1 + speeds.index(max(speeds))
    assert speed_up == pytest.approx(max(speeds))


def test_a_free_draft_that_is_always_right_gives_a_block_for_a_pass() -> None:
    times = StepTimes(draft_pass=0.0, verify=2.0, autoregressive=2.0)
    assert times.speed_up(9, 10.0) == pytest.approx(10.0)
