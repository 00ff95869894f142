"""The worker class that vLLM makes where the plugin was asked for."""

from __future__ import annotations

from tpu_inference.worker import tpu_worker

from fly_jax.integrations.vllm_tpu.runner import Runner


class Worker(tpu_worker.TPUWorker):  # type: ignore[misc]
    """tpu-inference's, with `Runner` for its runner."""

    def init_device(self) -> None:
        """As `TPUWorker.init_device`, which makes the runner by this name."""
        stock = tpu_worker.TPUModelRunner
        tpu_worker.TPUModelRunner = Runner
        try:
            super().init_device()
        finally:
            tpu_worker.TPUModelRunner = stock
