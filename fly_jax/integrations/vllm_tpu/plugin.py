"""The entry point: what vLLM calls in each of its processes, and what is put in whose place.

| of the engine | in its place |
| --- | --- |
| `TpuPlatform.check_and_update_config` | itself, then `startup.prepare` if anything is asked for, |
|   | which checks that and names the worker class |
| `TpuPlatform.validate_request` | `startup.check_request` if the request has a rule, then itself |
| `tpu_worker.TPUModelRunner` | its subclass `runner.Runner`, by `runner.Worker`, while it starts |

`Runner` overrides `_init_speculative_decoding`, `get_kv_cache_spec` and `capture_model`, and its
manager of drafts three methods more. Tried with the versions in `startup.TRIED`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any


def register() -> None:
    """Called by vLLM as `vllm.general_plugins` says, before settings are known: cheap, silent."""
    if importlib.util.find_spec("tpu_inference") is None:
        return
    # vLLM has imported it by now.
    platform = importlib.import_module("tpu_inference.platforms.tpu_platform").TpuPlatform
    if hasattr(platform.check_and_update_config, "by_fly_jax"):
        return
    update, validate = platform.check_and_update_config, platform.validate_request

    @functools.wraps(update)
    def check_and_update_config(vllm_config: Any) -> None:
        update(vllm_config)
        if _is_wanted(vllm_config):
            from fly_jax.errors import FlyJaxError
            from fly_jax.integrations.vllm_tpu.startup import prepare, refuse

            try:
                prepare(vllm_config)
            except FlyJaxError as error:
                refuse(error)

    @functools.wraps(validate)
    def validate_request(processed_inputs: Any, params: Any) -> None:
        if "fly_jax" in (getattr(params, "extra_args", None) or {}):
            from vllm.exceptions import VLLMValidationError

            from fly_jax.errors import FlyJaxError
            from fly_jax.integrations.vllm_tpu.startup import check_request

            try:
                check_request(params)
            except FlyJaxError as error:  # which the server would call its own fault
                raise VLLMValidationError(str(error)) from error
        validate(processed_inputs, params)

    check_and_update_config.by_fly_jax = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.validate_request = staticmethod(validate_request)


def _is_wanted(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return (
        "fly_jax" in (vllm_config.additional_config or {})
        or "FLY_JAX_RULE" in os.environ
        or (speculative is not None and speculative.method == "draft_model")
    )
