"""What is chosen for a bound, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fly_jax import DecodingConfig, load_config
from fly_jax.evaluation.gate import Candidate, best, upper_bound
from fly_jax.evaluation.strictness import as_toml


def test_the_laxer_the_bound_the_more_is_promised() -> None:
    rng = np.random.default_rng(0)
    found = [Candidate(DecodingConfig(), *rng.random(2)) for _ in range(200)]
    promised = []
    for limit in np.linspace(0, 1, 30):
        chosen, within = best(found, limit), [one for one in found if one.rate <= limit]
        assert chosen in (within or [None])
        if chosen is not None:
            promised.append(chosen.mean_accepted_tokens)
    assert promised == sorted(promised)
    assert len(set(promised)) > 2
    same = [Candidate(DecodingConfig(), rate, 5.0) for rate in (0.3, 0.1, 0.2)]
    assert best(same, 1.0) == same[1]


def test_the_upper_bound_is_that_of_prompts_drawn_anew() -> None:
    tokens = np.full(40, 50)
    assert upper_bound(np.full(40, 2), tokens) == pytest.approx(0.04)
    rescues = np.repeat([0, 4], 20)
    spread = upper_bound(rescues, tokens)
    # Of a mean of 40 draws with standard deviation 2: 1.645 * 2 / sqrt(40) = 0.52 above 2.
    assert spread == pytest.approx((2 + 0.52) / 50, rel=0.03)
    assert upper_bound(rescues, tokens, confidence=0.99) > spread


def test_a_config_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = DecodingConfig(
        rule="typical", typical_delta=1e-5, protect=("\\d", '"'), csd_online=False, memory="ä.npz"
    )
    path = tmp_path / "config.toml"
    path.write_text(as_toml(config, ["typical_delta"], "a command\n\nand two\nlines"))
    assert load_config(path) == config
    assert path.read_text().startswith("# a command\n#\n# and two\n# lines\n")
