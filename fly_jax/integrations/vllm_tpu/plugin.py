"""The entry point that vLLM calls in each process; docs/integrations.md has what it replaces."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any

from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.hooks import PACKAGES, PLATFORM, hook, root

_LOGGER = logging.getLogger("vllm.fly_jax")  # which vLLM shows


def register() -> None:
    """Hooks into vLLM, which calls this as `vllm.general_plugins` before settings are known."""
    if root() is None:
        if importlib.util.find_spec("vllm_torchtpu") is not None:
            ours = " or ".join(PACKAGES)
            _LOGGER.info("fly_jax works in %s; vllm_torchtpu has a sampler of its own.", ours)
        return
    try:
        platform = hook(f"{PLATFORM}:TpuPlatform")  # vLLM has imported it by now
    except FlyJaxError as error:
        _LOGGER.warning("fly_jax does nothing: %s", error)
        return
    if hasattr(platform.check_and_update_config, "by_fly_jax"):
        return
    update, validate = platform.check_and_update_config, platform.validate_request

    @functools.wraps(update)
    def check_and_update_config(vllm_config: Any) -> None:
        update(vllm_config)
        given, speculative = vllm_config.additional_config, vllm_config.speculative_config
        drafts = speculative is not None and speculative.method == "draft_model"
        if drafts or "fly_jax" in (given or {}) or "FLY_JAX_RULE" in os.environ:
            from fly_jax.integrations.vllm_tpu.startup import prepare, refuse

            try:
                prepare(vllm_config)
            except FlyJaxError as error:
                refuse(error)

    @functools.wraps(validate)
    def validate_request(processed_inputs: Any, params: Any) -> None:
        if "fly_jax" in (getattr(params, "extra_args", None) or {}):
            from vllm.exceptions import VLLMValidationError

            from fly_jax.integrations.vllm_tpu.startup import check_request

            try:
                check_request(params)
            except FlyJaxError as error:  # which the server would call its own fault
                raise VLLMValidationError(str(error)) from error
        validate(processed_inputs, params)

    check_and_update_config.by_fly_jax = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.validate_request = staticmethod(validate_request)
