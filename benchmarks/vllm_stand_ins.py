"""Stand-ins for what vLLM (vllm-tpu and tpu-inference 0.32.0) needs of a TPU, on a CPU.

`install()` before `import vllm`. It stands in for chip records, memory figures, copies to a device
and the attention kernel, in that process alone, and is no part of the package: what is tried out is
the engine's scheduler, paged cache, models and speculative decoding, and the plugin in them.
`decoded` runs it so.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The mesh is made without chip coordinates, and the cache is small.
ENGINE = {
    "block_size": 16,
    "num_gpu_blocks_override": 640,
    "max_model_len": 512,
    "dtype": "float32",
}
SHARDING = {"sharding": {"sharding_strategy": {"device_indexes": [0]}}}


def versions(*packages: str) -> dict[str, str]:
    """Of these packages; a script ends here where the engine is not installed."""
    if importlib.util.find_spec("tpu_inference") is None:
        sys.exit("vllm-tpu is not installed; see the first lines of the script.")
    return {name: importlib.metadata.version(name) for name in packages}


def decoded(
    target: str, requests: Sequence[Mapping[str, Any]], *, fly_jax: Mapping[str, Any] | None = None,
    ranks: int = 1, **arguments: Any,
) -> dict[str, Any]:  # fmt: skip
    """Has the engine answer requests, in a process of its own.

    Args:
      target: folder of the model.
      requests: each with `prompt`, `limit` and perhaps `extra_args`.
      fly_jax: of `additional_config`; None for an engine without the plugin.
      ranks: of data parallel attention, a device each.
      **arguments: of `vllm.LLM`.

    Returns:
      `tokens` of each request, the engine's counters of speculative decoding as `metrics`, and
      `passes` of a draft model in each step.
    """
    sharding = {"sharding_strategy": {"device_indexes": list(range(ranks))}}
    config = {"sharding": sharding} | ({} if fly_jax is None else {"fly_jax": fly_jax})
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "data_parallel_size": ranks}
    arguments = ENGINE | sizes | {"model": target, "additional_config": config} | arguments
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.json"), Path(folder, "output.json")
        job.write_text(json.dumps({"arguments": arguments, "requests": requests}))
        command = [sys.executable, __file__, str(job), str(output)]
        devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"}
        done = subprocess.run(command, env=os.environ | devices, capture_output=True, text=True)
        if not output.exists():
            raise SystemExit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return json.loads(output.read_text())


def _decode(job: Path, output: Path) -> None:
    """The process that `decoded` starts."""
    install()
    from vllm import LLM, SamplingParams, TokensPrompt

    given = json.loads(job.read_text())
    arguments, requests = given["arguments"], given["requests"]
    engine = LLM(disable_log_stats=False, **arguments)
    speculative = arguments.get("speculative_config") or {}
    passes = _counted_passes() if speculative.get("method") == "draft_model" else []
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=one["prompt"]) for one in requests],
        [
            SamplingParams(
                temperature=0, max_tokens=one["limit"], extra_args=one.get("extra_args"),
                detokenize=not arguments.get("skip_tokenizer_init"),
            )
            for one in requests
        ],
    )  # fmt: skip
    prefix = "vllm:spec_decode_num_"
    metrics = {
        one.name.removeprefix(prefix): one.value
        for one in engine.get_metrics()
        if one.name.startswith(prefix) and hasattr(one, "value")
    }
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    output.write_text(json.dumps({"tokens": tokens, "metrics": metrics, "passes": passes}))


def _counted_passes() -> list[int]:
    """Of the draft model, one number for each of the engine's steps from now on."""
    from fly_jax.integrations.vllm_tpu.draft_model import DraftModelProposer

    propose, passes = DraftModelProposer.propose, []

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        proposed = propose(self, *args, **kwargs)
        passes.append(int(self.num_passes))
        return proposed

    DraftModelProposer.propose = counted
    return passes


def install() -> None:
    """Puts the stand-ins in place; a second time it does nothing."""
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "MODEL_IMPL_TYPE": "flax_nnx",
        "DRAFT_MODEL_IMPL_TYPE": "flax_nnx",
        "SKIP_JAX_PRECOMPILE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    import jax

    if getattr(jax.jit, "is_stand_in", False):
        return
    _drop_compiler_options()
    _copy_what_is_put()
    from jax._src import tpu_info

    tpu_info.registry["cpu"] = lambda: tpu_info.registry["TPU v5 lite"]()
    import tpu_inference.utils
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

    tpu_inference.utils.hbm_usage_bytes = lambda devices: [(1 << 30, 16 << 30)] * len(devices)
    kernel.ragged_paged_attention = _attention
    kernel_hd64.ragged_paged_attention_hd64 = _attention
    from tpu_inference.layers.common import attention_interface

    attention_interface.ragged_paged_attention = _attention
    attention_interface.ragged_paged_attention_hd64 = _attention
    _heads_in_float32()


def _drop_compiler_options() -> None:
    """The options that the engine compiles with name flags that only a TPU's compiler knows."""
    import jax

    compile_ = jax.jit

    @functools.wraps(compile_)
    def jit(*args: Any, compiler_options: Any = None, **kwargs: Any) -> Any:
        del compiler_options
        return compile_(*args, **kwargs)

    jit.is_stand_in = True  # type: ignore[attr-defined]
    jax.jit = jit


def _heads_in_float32() -> None:
    """The engine computes heads in bfloat16, whatever is asked for, where close drafts change."""
    import jax.numpy as jnp
    from tpu_inference.models.jax import dflash, llama_eagle3
    from tpu_inference.spec_decode.jax import dflash as dflash_proposer

    wide = types.ModuleType("jax.numpy")
    wide.__dict__.update(vars(jnp) | {"bfloat16": jnp.float32})
    for module in (dflash, llama_eagle3, dflash_proposer):
        module.jnp = wide


def _copy_what_is_put() -> None:
    """The engine writes into the host's arrays again, which on a CPU are the device's."""
    import jax
    import numpy as np

    put = jax.device_put

    @functools.wraps(put)
    def device_put(tree: Any, *args: Any, **kwargs: Any) -> Any:
        copied = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)
        return put(copied, *args, **kwargs)

    jax.device_put = device_put


def _attention(
    queries: Any,
    keys: Any,
    values: Any,
    cache: Any,
    lengths: Any,
    pages: Any,
    query_starts: Any,
    distribution: Any,
    *,
    sm_scale: float = 1.0,
    use_causal_mask: bool = True,
    **unused: Any,
) -> tuple[Any, Any]:
    """The kernel's function in plain JAX, over pages, all requests one after the other.

    Args:
      queries: [tokens, heads, size].
      keys: [tokens, kv heads, size].
      values: as keys.
      cache: [pages, page size, ...]; keys and values of a token in one vector.
      lengths: tokens of each request with this pass's.
      pages: the pages of each request, one request after the other.
      query_starts: [requests + 1].
      distribution: the last of its three numbers is how many requests there are.
      sm_scale: factor of the scores.
      use_causal_mask: a token sees what is not after it; else all of its request.
      **unused: what tunes the kernel.
    """
    import jax
    import jax.numpy as jnp

    tokens, heads, size = queries.shape
    kv_heads, page_size, num_requests = keys.shape[1], cache.shape[1], lengths.shape[0]
    pages = pages.reshape(num_requests, -1)
    flat = jnp.arange(tokens)
    ends = jnp.where(jnp.arange(num_requests) < distribution[2], query_starts[1:], tokens)
    request = jnp.searchsorted(ends, flat, side="right")
    live = request < distribution[2]
    request = jnp.minimum(request, num_requests - 1)
    position = lengths[request] - query_starts[request + 1] + flat
    # 1) Keys and values go to their pages; what is padding goes nowhere.
    store = cache.reshape(cache.shape[0], page_size, -1)
    width = 2 * kv_heads * size
    merged = jnp.concatenate([keys, values], axis=1).reshape(tokens, width).astype(cache.dtype)
    page = jnp.where(live, pages[request, position // page_size], cache.shape[0])
    store = store.at[page, position % page_size, :width].set(merged, mode="drop")
    # 2) Each token's scores over what it sees of its request's pages.
    held = store[pages][..., :width].reshape(num_requests, -1, 2, kv_heads, size)
    here = held[request].astype(jnp.float32)  # [tokens, positions, 2, kv heads, size]
    grouped = queries.reshape(tokens, kv_heads, heads // kv_heads, size).astype(jnp.float32)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, here[:, :, 0]) * sm_scale
    last = position if use_causal_mask else lengths[request] - 1
    visible = jnp.arange(here.shape[1]) <= last[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    weights = jnp.where(live[:, None, None, None], weights, 0)
    output = jnp.einsum("tkgs,tskd->tkgd", weights, here[:, :, 1])
    return output.reshape(queries.shape).astype(queries.dtype), store.reshape(cache.shape)


if __name__ == "__main__":
    _decode(*map(Path, sys.argv[1:]))
