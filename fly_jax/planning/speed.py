"""What times of steps mean for decoding: tokens per second, speed-up, and the best K."""

from __future__ import annotations

import dataclasses

from fly_jax.errors import FlyJaxError

# FLy on Llama-3.1-405B with an 8B draft, K = 25, mean of its authors' out-of-domain sets (arXiv
# 2511.22972): what is assumed where nothing is given.
PUBLISHED_MEAN_ACCEPTED, PUBLISHED_K = 17.13, 25
_MOST_DRAFTED = 64


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of each step.

    Attributes:
      draft_pass: one pass of the draft model.
      verify: the target's pass over K + 1 tokens.
      verify_token: what each further token adds to that.
      autoregressive: the target's pass over one token.
    """

    draft_pass: float
    verify: float
    autoregressive: float
    verify_token: float = 0.0

    def speed_up(self, num_drafted: int, mean_accepted: float) -> float:
        """Tokens per second of speculation over those of one token at a time."""
        return mean_accepted * self.autoregressive / self.round(num_drafted)

    def round(self, num_drafted: int, reference: int | None = None) -> float:
        """Seconds of a round with so many draft tokens, where `verify` is of `reference`."""
        more = 0 if reference is None else num_drafted - reference
        return num_drafted * self.draft_pass + self.verify + more * self.verify_token


def mean_accepted(acceptance: float, num_drafted: int) -> float:
    """Tokens of a round where each draft token is kept with this probability, on its own.

    (1 - a^(K+1)) / (1 - a): Leviathan et al., arXiv 2211.17192, equation 1. Real acceptance comes
    in streaks, so that for a K much different from the measured one this is a guess.
    """
    if acceptance >= 1:
        return num_drafted + 1.0
    return (1 - acceptance ** (num_drafted + 1)) / (1 - acceptance)


def acceptance_from(mean: float, num_drafted: int) -> float:
    """The probability that gives this mean with this K, by bisection.

    Raises:
      FlyJaxError: a mean that no probability gives.
    """
    if not 1 <= mean <= num_drafted + 1:
        raise FlyJaxError(
            f"A mean of {mean:g} accepted tokens was given with {num_drafted} draft tokens; a "
            f"round settles 1 to {num_drafted + 1}: give a mean in that range."
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_accepted(middle, num_drafted) < mean else (low, middle)
    return (low + high) / 2


def best_drafted(times: StepTimes, acceptance: float, reference: int) -> tuple[int, float]:
    """The K with most tokens per second, and its speed-up over one token at a time.

    Args:
      times: with `verify` for `reference` draft tokens.
      acceptance: probability that a draft token is kept.
      reference: K of `times.verify`.
    """
    speeds = {
        drafted: mean_accepted(acceptance, drafted)
        * times.autoregressive
        / times.round(drafted, reference)
        for drafted in range(1, _MOST_DRAFTED + 1)
    }
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]
