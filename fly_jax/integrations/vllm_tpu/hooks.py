"""The parts of vLLM on TPU that the plugin needs, under its name of today and the one to come.

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

# By the name to import: the packages of the engine, and of the vLLM that is made for it.
PACKAGES = {
    "tpu_inference": ("tpu-inference", "vllm-tpu"),
    "vllm_jax": ("vllm-jax-core", "vllm-jax"),
}
TRIED = "tpu-inference 0.32.0 and vllm-tpu 0.32.0"
PLATFORM = "platforms.tpu_platform"

# The names that are overridden, called or read, by module.
HOOKS = {
    PLATFORM: "TpuPlatform.check_and_update_config TpuPlatform.validate_request",
    "worker.tpu_worker": "TPUWorker.init_device TPUModelRunner",
    "runner.tpu_runner": "TPUModelRunner._init_speculative_decoding "
    "TPUModelRunner.load_model TPUModelRunner.get_kv_cache_spec TPUModelRunner.capture_model",
    "runner.speculative_decoding_manager": "SpeculativeDecodingManager.get_spec_decode_metadata "
    "SpeculativeDecodingManager.propose_draft_token_ids "
    "SpeculativeDecodingManager.propose_eagle3_draft_token_ids "
    "SpeculativeDecodingManager.take_draft_token_ids",
    "runner.utils": "host_extract_sampled_tokens",
    "layers.jax.sample.rejection_sampler": "RejectionSampler.__call__",
    "layers.common.attention_metadata": "AttentionMetadata",
    "layers.common.sharding": "ShardingAxisName.ATTN_DATA ShardingAxisName.ATTN_HEAD",
    "models.common.model_loader": "get_flax_model",
    "models.jax.llama3": "LlamaModel.get_eagle3_aux_hidden_state_layers",
    "models.jax.llama_eagle3": "EagleLlama3WeightLoader.load_weights",
    "spec_decode.jax.eagle3": "Eagle3Proposer.prepare_inputs Eagle3Proposer.propose",
    "utils": "get_padded_num_heads get_padded_head_dim get_mesh_shape_product",
    "envs": "SKIP_JAX_PRECOMPILE",
}


def root() -> str | None:
    """The engine's package: that of the platform vLLM has imported, or the first installed."""
    names = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    return min(names, key=lambda name: f"{name}.{PLATFORM}" not in sys.modules, default=None)


def versions() -> str:
    """The engine's packages with their versions, such as `TRIED`."""
    found = []
    for name in PACKAGES[root() or "tpu_inference"]:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:  # built from source under another name
            found.append(f"{name} of no known version")
    return " and ".join(found)


def hook(path: str) -> Any:
    """The object at "module:name" of `HOOKS` in the engine; FlyJaxError where there is none."""
    engine = root() or "tpu_inference"
    try:
        return pkgutil.resolve_name(f"{engine}.{path}")
    except (ImportError, AttributeError) as error:
        raise FlyJaxError(
            f"{engine} ({versions()}) has no {path}, which fly_jax needs; install {TRIED}."
        ) from error


def checked_hooks(*, any_version: bool) -> str:
    """A sentence on what was found and what was not; FlyJaxError for what will not do."""
    others = " or ".join(name for name in PACKAGES if name != root())
    said = f"vLLM on TPU was found as {root()} ({versions()}), not as {others}"
    if versions() != TRIED and not any_version:
        raise FlyJaxError(
            f"{said}, and fly_jax was tried with {TRIED}; install those, or try this one with "
            '"any_version": true in additional_config["fly_jax"] (FLY_JAX_ANY_VERSION=true).'
        )
    if versions() != TRIED:  # those have all, and importing it takes seconds
        for module, names in HOOKS.items():
            for name in names.split():
                hook(f"{module}:{name}")
    return f"{said}, with all that fly_jax needs; it was tried with {TRIED}."
