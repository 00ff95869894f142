"""When a row's drafting ends before K: where the draft model itself is in doubt.

AdaEDL (arXiv 2410.18351): 1 - sqrt(gamma H(q)) bounds from below how probably a token of the draft
distribution q, with entropy H(q), is accepted. Drafting stops where that is below a threshold,
which follows what becomes of the row's drafts.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from fly_jax.parameters import check_parameters, parameter

# Below any bound: the threshold of a row that does not stop.
NEVER = -math.inf


@dataclasses.dataclass(frozen=True)
class EntropyStop:
    """Stops a row's drafting after a token of which the draft model is not sure enough.

    All but `gamma` is ours: what the paper's authors chose is not known to us. After each round the
    threshold rises by `step` times what the accepted share of the drafted tokens lacks of `share`,
    and so falls where more than that is accepted.

    Attributes:
      gamma: weight of the entropy, which is in nats.
      share: of the drafted tokens, what is wanted to be accepted.
      first: the threshold of a row of which nothing has been seen.
      step: how fast the threshold moves.

    Raises:
      FlyJaxError: a value outside its range.
    """

    gamma: float = parameter(
        0.2,
        "draft_stop: weight of the draft model's entropy",
        name="draft_stop_gamma", above=0.0, flag=False,
    )  # fmt: skip
    share: float = parameter(
        0.4,
        "draft_stop: share of the drafted tokens that is wanted to be accepted",
        name="draft_stop_share", above=0.0, below=1.0, flag=False,
    )  # fmt: skip
    first: float = parameter(
        0.2,
        "draft_stop: threshold of a row of which nothing has been seen",
        name="draft_stop_first", low=0.0, high=1.0, flag=False,
    )  # fmt: skip
    step: float = parameter(
        0.05,
        "draft_stop: how fast the threshold moves",
        name="draft_stop_step", low=0.0, flag=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_parameters(self)

    def stops(
        self, logits: Float[Array, "rows time vocab"], threshold: Float32[Array, " rows"]
    ) -> Bool[Array, "rows time"]:
        """Whether nothing should be drafted after the token of these raw logits of the draft."""
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        surprise = jnp.where(log_probs > -jnp.inf, -jnp.exp(log_probs) * log_probs, 0)
        entropy = jnp.maximum(jnp.sum(surprise, axis=-1), 0)
        return 1 - jnp.sqrt(self.gamma * entropy) < threshold[:, None]

    def after(
        self,
        threshold: Float32[Array, " rows"],
        num_accepted: Int[Array, " rows"],
        num_drafted: Int[Array, " rows"],
    ) -> Float32[Array, " rows"]:
        """The rows' thresholds after a round that accepted so much of what was drafted."""
        lacking = self.share - num_accepted / num_drafted
        return jnp.clip(threshold + self.step * lacking, 0, 1)
