"""The time of one pass of a model on a GPU, as its layers may lie, and what the compiler copies.

    python benchmarks/gpu_pass.py                  # on a GPU: results/gpu_pass.json
    python benchmarks/gpu_pass.py --compile_only   # without one: what an H200's program writes

The model has the shape of Qwen2.5-Coder-1.5B and random weights in bfloat16. Both variants are
compiled, then timed one after the other. Without a GPU the compiler needs the packages
`jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`, and JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import machine
from absl import flags
from jax.experimental import topologies

from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.llama import Llama, Parameters

_COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "compile for an H200 that is not there")
CONFIG = LlamaConfig(
    vocab_size=151936, embed_size=1536, ffw_size=8960, num_layers=28, num_heads=12,
    num_kv_heads=2, head_size=128, max_context=4096, tied_embeddings=True,
    attention_biases=True, architecture="qwen2",
)  # fmt: skip
WIDTHS, CAPACITY, PASSES, TURNS = (1, 5, 16), 1024, 16, 5
VARIANTS = "scan", "one array per layer"
# As XLA's `GpuTargetConfigProto` has it.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 150000000000  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1}


def _parameters(variant: str) -> Parameters:
    model = Llama.random(CONFIG, jax.random.key(0), jnp.bfloat16)
    return (model if variant == "scan" else model.unstacked()).parameters()


def _cache() -> KVCache:
    return empty_cache(CONFIG, 1, CAPACITY, jnp.dtype(jnp.bfloat16))


@functools.partial(jax.jit, static_argnames=("config", "number"), donate_argnames=("cache",))
def passes(
    config: LlamaConfig, number: int, parameters: Parameters, cache: KVCache, tokens: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Some passes in one dispatch, each over the tokens that the one before it chose."""
    model, width, capacity = Llama(config, parameters), tokens.shape[1], cache.keys.shape[3]

    def one(_: int, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        cache, tokens = carry
        hidden, cache = model.extend(tokens, cache)
        chosen = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
        return cache.with_length((cache.length + width) % (capacity - width)), chosen

    return jax.lax.fori_loop(0, number, one, (cache, tokens))


def _timed(variant: str) -> dict[str, Any]:
    """Milliseconds of a pass, the best of some turns."""
    parameters, found = _parameters(variant), {}
    for width in WIDTHS:
        tokens, times = jnp.ones((1, width), jnp.int32), []
        state = jax.block_until_ready(passes(CONFIG, PASSES, parameters, _cache(), tokens))
        for _ in range(TURNS):
            start = time.perf_counter()
            state = jax.block_until_ready(passes(CONFIG, PASSES, parameters, *state))
            times.append((time.perf_counter() - start) / PASSES * 1e3)
        found[f"{width} tokens, ms"] = min(times)
    return found


def _compiled(variant: str) -> dict[str, Any]:
    """Kernels of a pass, and megabytes of what they write where an array has a megabyte or more."""
    topology = topologies.get_topology_desc("", "cuda", target_config=_H200, topology="1x1x1")
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])
    found = {}
    jax.default_backend = lambda: "gpu"  # which a program for a backend that is not there asks
    shapes = jax.eval_shape(lambda: (_parameters(variant), _cache()))
    for width in WIDTHS:
        tokens = jax.ShapeDtypeStruct((1, width), jnp.int32)
        given = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place),
            (*shapes, tokens),
        )
        text = passes.lower(CONFIG, PASSES, *given).compile().as_text()
        for body in re.split(r"\n(?=(?:%|ENTRY)[^\n]*\{\n)", text):
            name = body.split(maxsplit=1)[0]
            written = re.findall(r" = (\S.*?) (?:fusion|copy|fusion-done)\(", body)
            if name.startswith("%region") and len(written) > 4:
                size = sum(one for one in map(_size, written) if one >= 1e6)
                found[f"{width} tokens, {name}"] = {
                    "kernels": len(written),
                    "megabytes of large arrays": size / 1e6,
                }
    return found


def _size(shape: str) -> int:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(
        _BYTES.get(kind, 4) * math.prod(int(one) for one in sizes.split(",") if one)
        for kind, sizes in arrays
    )


def main() -> None:
    measure = _compiled if _COMPILE_ONLY.value else _timed
    found = {variant: measure(variant) for variant in VARIANTS}
    print(json.dumps(found, indent=2))
    if not _COMPILE_ONLY.value:
        machine.write("gpu_pass", {"model": "Qwen2.5-Coder-1.5B, bfloat16", "passes": found})


if __name__ == "__main__":
    machine.run(main)
