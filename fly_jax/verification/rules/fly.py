"""FLy: entropy gate and deferred window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameter
from fly_jax.verification.data import Count, Number, data_tree
from fly_jax.verification.evidence import Entropy, EntropyMeasure
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.conditions import Undecided, Window, WindowKind
from fly_jax.verification.rules.rule import Loose

# vLLM's words for FLy, and ours.
VLLM_NAMES = {
    "rejection_sample_method": "rule",
    "fly_window_size": "window_size",
    "fly_entropy_threshold": "entropy_threshold",
    "fly_entropy_top_k": "entropy_top_k",
}


def from_vllm_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by our names, where vLLM's may have been given.

    Raises:
      FlyJaxError: a parameter has two names and two values.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        ours = VLLM_NAMES.get(name, name)
        if found.setdefault(ours, value) != value:
            raise FlyJaxError(
                f"{ours} is {found[ours]!r} and {value!r}, once by vLLM's name; give it once."
            )
    return found


@data_tree
@dataclasses.dataclass(frozen=True)
class Fly(Loose):
    """FLy: keeps a mismatch that an undecided target then goes along with (arXiv 2511.22972).

    The mismatch at position j (from 1) of a block of K draft tokens is rescued iff
      - the gate is open: the target's entropy at j is at least `entropy_threshold`;
      - its deferred window is clean: the lossless rule accepts j+1 .. j+W (W = `window_size`), each
        considered on its own, so that a second mismatch in the window refuses the first one even
        where it would itself be rescued;
      - the window fits into the block: j + W <= K;
      - the target gives the draft token a probability above 0 (in float32; with sampling, also
        after top-k and top-p), and neither it nor the target's argmax is protected.

    With sampling the lossless rule is rejection sampling. Fly then rescues only what that has
    refused and never redraws what it has accepted, so that the emitted distribution is no longer
    the target's: it is moved towards the draft's, at undecided positions, by the probability that
    the draft token is refused and its window clean. The gate always sees untempered logits.

    Attributes:
      entropy_threshold: in the unit of `entropy`; `GATE_OFF` or less switches the gate off.
      window_size: W; 0 rescues every mismatch that passes the gate.
      entropy: see `Entropy.measure`. The published results come from "top_k" with 0.3; with
        "normalized", the formula printed in the paper, 0.3 rescues almost nothing.
      entropy_top_k: see `Entropy.top_k`.
      window: "paper", or "reference" for FLy's reference code, which looks at j+1 .. j+W-1 only and
        yet demands j + W <= K.

    Raises:
      FlyJaxError: if a value is outside its range.
    """

    entropy_threshold: Number = parameter(
        0.3, "fly: least entropy of the target for a mismatch to be kept; 0 for no gate", low=0.0
    )
    window_size: Count = parameter(
        6, "fly: draft tokens after a mismatch that must match for it to be kept", low=0
    )
    entropy: EntropyMeasure = parameter(
        "top_k",
        "fly: what the threshold is compared with",
        choices=get_args(EntropyMeasure), static=True,
    )  # fmt: skip
    entropy_top_k: int = parameter(
        3, "fly: tokens that the entropy top_k looks at", low=1, static=True
    )
    window: WindowKind = parameter(
        "paper",
        "fly: the window of the paper, or that of the reference code, which is one shorter",
        choices=get_args(WindowKind), flag=False, static=True,
    )  # fmt: skip

    def clauses(self) -> tuple[Clause, ...]:
        """The gate and the deferred window."""
        gate = Undecided(self.entropy_threshold, Entropy(self.entropy, self.entropy_top_k))
        return (Clause((gate,), (Window(self.window_size, self.window),)),)
