"""The rule of FLy's reference code: its own decisions, stored as numbers.

`reference_rule.npz` holds, for each K, logits (int8, times `scale`), draft tokens, and what one
round of the unmodified reference code (AMD-AGI/FLy at 6667ae8, PyTorch 2.13 on a CPU) made of them
under six settings: draft tokens kept, and the token that follows.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from fly_jax.verification.rules import Exact, Fly, Rule
from fly_jax.verification.verify import verify

STORED = np.load(Path(__file__).parents[1] / "fixtures" / "reference_rule.npz")

decide = jax.jit(verify)

SETTINGS: dict[str, Rule] = {
    "default": Fly(window="reference"),
    "no_gate": Fly(window="reference", entropy_threshold=0.0),
    "thre_0.6": Fly(window="reference", entropy_threshold=0.6),
    "no_window": Fly(window="reference", window_size=0),
    "win_len_4": Fly(window="reference", window_size=4),
    "strict": Exact(),
}


@pytest.mark.parametrize("num_draft", [6, 7, 15, 25])
@pytest.mark.parametrize("setting", SETTINGS)
def test_decides_as_the_reference_code_does(setting: str, num_draft: int) -> None:
    rule = SETTINGS[setting]
    logits = STORED[f"logits_{num_draft}"] * np.float32(STORED["scale"])
    draft = STORED[f"draft_{num_draft}"].astype(np.int32)

    verdict = decide(rule, logits, draft)
    np.testing.assert_array_equal(verdict.num_accepted, STORED[f"accepted_{num_draft}_{setting}"])
    np.testing.assert_array_equal(verdict.next_token, STORED[f"next_{num_draft}_{setting}"])


def test_the_stored_cases_tell_the_two_windows_apart() -> None:
    logits = STORED["logits_15"] * np.float32(STORED["scale"])
    draft = STORED["draft_15"].astype(np.int32)
    kept = decide(Fly(), logits, draft).num_accepted
    assert np.any(np.asarray(kept) != STORED["accepted_15_default"])
