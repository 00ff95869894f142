"""The counter of rescued tokens, beside vLLM's own `spec_decode` ones."""

from __future__ import annotations

import contextlib
import logging
import time

import numpy as np
from jaxtyping import Array, Int32
from prometheus_client import REGISTRY, Counter

NAME = "vllm:spec_decode_num_rescued_tokens"
_LOGGER = logging.getLogger("vllm.fly_jax")  # which vLLM shows
_SECONDS_BETWEEN_LINES = 10.0
# One in a process, whichever engine counts; vLLM takes its own off the registry when it starts.
_COUNTER = Counter(
    NAME,
    "Accepted draft tokens that the target refused and the loosened rule kept.",
    ["model_name", "engine"],
    registry=None,
)


class RescueCounter:
    """Counts what the sampler has rescued, one step late so that no step waits for it."""

    def __init__(self, model_name: str, engine: int) -> None:
        """For one engine.

        Args:
          model_name: as it is served.
          engine: its number among those that are data parallel.
        """
        self._labels = model_name, str(engine)
        self._waiting: Int32[Array, ""] | None = None
        self._is_registered = False
        self._since_line, self._last_line = 0, time.monotonic()

    def wait_for(self, num_rescued: Int32[Array, ""]) -> None:
        """Notes a step's figure, which is still on the device."""
        self.flush()
        num_rescued.copy_to_host_async()
        self._waiting = num_rescued

    def flush(self) -> None:
        """Counts what was noted."""
        if self._waiting is None:
            return
        number, self._waiting = int(np.asarray(self._waiting)), None
        if not self._is_registered:
            with contextlib.suppress(ValueError):  # another engine's has been
                REGISTRY.register(_COUNTER)
            self._is_registered = True
        _COUNTER.labels(*self._labels).inc(number)
        self._since_line += number
        if time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES and self._since_line:
            _LOGGER.info("fly_jax: %d accepted draft tokens were rescues", self._since_line)
            self._since_line, self._last_line = 0, time.monotonic()
