"""The parts of vLLM on TPU that the plugin needs, under its name of today and the one to come.

tpu-inference is being renamed vLLM JAX. Of `vllm-jax` and `vllm-jax-core` only empty packages are
published: that `vllm_jax` is what will be imported follows from their names alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def head_as_written(fields: object) -> Iterator[None]:
    """Within it the engine takes the files of an EAGLE-3 head as speculators writes them.

    Its loader knows the head's layer as "midlayer" alone, which speculators calls "layers.0"; and
    its Llama gives the features of three layers of its own choice. `fields` are a head's
    `config.json`, as vLLM has it, or that of any other draft, or None.
    """
    llama: Any = hook("models.jax.llama3:LlamaModel")
    loader: Any = hook("models.jax.llama_eagle3:EagleLlama3WeightLoader")
    choose, load = llama.get_eagle3_aux_hidden_state_layers, loader.load_weights
    # As in vLLM on GPUs: the layers whose inputs are features.
    named = getattr(fields, "eagle_aux_hidden_state_layer_ids", None)

    def load_either(self: Any, model: Any, mappings: dict[str, str]) -> None:
        other = {
            name.replace("midlayer", "layers.*"): place.replace("layers.0", "layers.*")
            for name, place in mappings.items()
        }
        load(self, model, mappings | other)

    loader.load_weights = load_either
    if named:
        llama.get_eagle3_aux_hidden_state_layers = lambda _: tuple(named)
    try:
        yield
    finally:
        llama.get_eagle3_aux_hidden_state_layers, loader.load_weights = choose, load
