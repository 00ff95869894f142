"""When a row's drafting ends before K: where the draft model itself is in doubt.

AdaEDL (arXiv 2410.18351): 1 - sqrt(gamma H(q)) bounds from below how probably a token of the draft
distribution q, with entropy H(q), is accepted. Drafting stops where that is below a threshold,
which follows what becomes of the row's drafts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from fly_jax.errors import FlyJaxError

# How the threshold moves is ours: what the paper's authors chose is not known to us. Each round it
# rises by the step times the share of its drafted tokens that was missing to the wanted one.
_FIRST_THRESHOLD = 0.4
_WANTED_SHARE = 0.8
_STEP = 0.05
# Above any bound: a row stops with its first token.
_AT_ONCE = 2.0


@dataclasses.dataclass(frozen=True)
class EntropyStop:
    """Stops a row's drafting after a token of which the draft model is not sure enough.

    Attributes:
      gamma: weight of the entropy.

    Raises:
      FlyJaxError: a weight that is not positive.
    """

    gamma: float = 0.2

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise FlyJaxError(
                f"The entropy's weight gamma is {self.gamma}; it must be above 0: 0.2 is usual."
            )

    def stops(
        self, logits: Float[Array, "rows time vocab"], threshold: Float32[Array, " rows"]
    ) -> Bool[Array, "rows time"]:
        """Whether nothing should be drafted after the token of these raw logits of the draft."""
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        surprise = jnp.where(log_probs > -jnp.inf, -jnp.exp(log_probs) * log_probs, 0)
        entropy = jnp.maximum(jnp.sum(surprise, axis=-1), 0)
        return 1 - jnp.sqrt(self.gamma * entropy) < threshold[:, None]


def first_threshold(rows: int) -> Float32[Array, " rows"]:
    """Of rows of which nothing has been seen."""
    return jnp.full((rows,), _FIRST_THRESHOLD, jnp.float32)


def next_threshold(
    threshold: Float32[Array, " rows"],
    num_accepted: Int[Array, " rows"],
    num_drafted: Int[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Drafts that are refused make a row stop earlier, drafts that are accepted later."""
    missing = _WANTED_SHARE - num_accepted / num_drafted
    return jnp.clip(threshold + _STEP * missing, 0, 1)


def only_live(
    threshold: Float32[Array, " rows"], live: Bool[Array, " rows"]
) -> Float32[Array, " rows"]:
    """The thresholds with which no row that has finished keeps the others waiting."""
    return jnp.where(live, threshold, _AT_ONCE)
