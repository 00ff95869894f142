"""What the plugin needs of vLLM on TPU, looked for under the name that it has and the one to come.

tpu-inference is being renamed vLLM JAX. Of `vllm-jax` and `vllm-jax-core` only empty packages are
published: that `vllm_jax` is what will be imported follows from their names alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import sys
from typing import Any

from fly_jax.errors import FlyJaxError

# The names to import, each with the packages that hold the engine and the vLLM that is made for it.
PACKAGES = {
    "tpu_inference": ("tpu-inference", "vllm-tpu"),
    "vllm_jax": ("vllm-jax-core", "vllm-jax"),
}
TRIED = "tpu-inference 0.32.0 and vllm-tpu 0.32.0"

# The module of each, and what of it is overridden, called or read.
HOOKS = {
    "TpuPlatform": ("platforms.tpu_platform", "check_and_update_config validate_request"),
    "TPUWorker": ("worker.tpu_worker", "init_device"),
    "TPUModelRunner": (
        "runner.tpu_runner",
        "_init_speculative_decoding get_kv_cache_spec capture_model",
    ),
    "SpeculativeDecodingManager": (
        "runner.speculative_decoding_manager",
        "get_spec_decode_metadata propose_draft_token_ids take_draft_token_ids"
        " propose_eagle3_draft_token_ids",
    ),
    "host_extract_sampled_tokens": ("runner.utils", ""),
    "RejectionSampler": ("layers.jax.sample.rejection_sampler", ""),
    "Eagle3Proposer": ("spec_decode.jax.eagle3", "load_model prepare_inputs propose"),
    "AttentionMetadata": ("layers.common.attention_metadata", ""),
    "ShardingAxisName": ("layers.common.sharding", "ATTN_DATA ATTN_HEAD"),
    "get_flax_model": ("models.common.model_loader", ""),
    "get_padded_num_heads": ("utils", ""),
    "get_padded_head_dim": ("utils", ""),
    "get_mesh_shape_product": ("utils", ""),
    "SKIP_JAX_PRECOMPILE": ("envs", ""),
}


def root() -> str | None:
    """The engine's name: that of the platform which vLLM has imported, or the first installed."""
    names = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    platform = HOOKS["TpuPlatform"][0]
    return min(names, key=lambda name: f"{name}.{platform}" not in sys.modules, default=None)


def versions() -> str:
    """The engine's packages with their versions, such as `TRIED`."""
    found = []
    for name in PACKAGES[root() or next(iter(PACKAGES))]:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:  # built from source under another name
            found.append(f"{name} of no known version")
    return " and ".join(found)


def hook(name: str) -> Any:
    """One of `HOOKS`, from the engine that is installed.

    Raises:
      FlyJaxError: the engine does not have it, or not all that is needed of it.
    """
    module, parts = HOOKS[name]
    engine = root() or next(iter(PACKAGES))
    try:
        found = pkgutil.resolve_name(f"{engine}.{module}:{name}")
        missing = [f"{name}.{part}" for part in parts.split() if not hasattr(found, part)]
    except (ImportError, AttributeError):
        missing = [name]
    if missing:
        raise FlyJaxError(
            f"{engine} ({versions()}) has no {', '.join(missing)} in {module}, which fly_jax "
            f"needs; install {TRIED}, with which it was tried."
        )
    return found


def checked_hooks(*, any_version: bool) -> str:
    """A sentence on what was found and what was not.

    Raises:
      FlyJaxError: versions that were never tried, unless any will do; then whatever is missing.
    """
    engine, found = root(), versions()
    others = " or ".join(name for name in PACKAGES if name != engine)
    said = f"vLLM on TPU was found as {engine} ({found}), not as {others}"
    if found == TRIED:
        return f"{said}; fly_jax was tried with it."
    if not any_version:
        raise FlyJaxError(
            f"{said}, and fly_jax was tried with {TRIED}; install those, or try this one with "
            '"any_version": true in additional_config["fly_jax"] (FLY_JAX_ANY_VERSION=true).'
        )
    for name in HOOKS:
        hook(name)
    return f"{said}; fly_jax was tried with {TRIED}, but all of its {len(HOOKS)} hooks are there."
