"""The plugin's sampler beside vLLM's own, compiled for TPU v5e by libtpu: bytes, time, exchanges.

    pip install vllm-tpu==0.32.0 && pip install -e .
    python benchmarks/vllm_sampler.py

64 requests with K = 15, a vocabulary of 128,256, logits in bfloat16; 8 chips, of which the
attention splits the requests over 1 or 2, and the vocabulary is whole on each, as the engine hands
it over. No chip is needed. Bytes are what all operations read and write that are not fused, each as
often as its loop runs, so an upper bound; seconds are those bytes at the chip's memory rate, and
what the planner says of the exchanges.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import vllm_stand_ins
from machine import run, write

_K, _REQUESTS, _VOCAB = 15, 64, 128_256
_FREE = (
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional",
    "call", "after-all", "partition-id", "iota",
)  # fmt: skip


def _bytes(hlo: str) -> int:
    """Of operands and results of everything that runs and is not fused into something else."""
    from fly_jax.planning.hlo import ITEM_BYTES, frames, parse

    def size(one: Any) -> int:
        return sum(math.prod(a.shape) * ITEM_BYTES.get(a.kind, 0) for a in one.arrays)

    total = 0
    for frame in frames(parse(hlo), unknown_trips=1):
        known = frame.computation.instructions
        for one in known.values():
            if one.opcode not in _FREE:
                read = sum(size(known[name]) for name in one.operands if name in known)
                total += frame.count * (size(one) + read)
    return total


def _measured(step: Callable[..., Any], inputs: tuple[Any, ...], mesh: Any) -> dict[str, Any]:
    import jax

    from fly_jax.planning.hlo import exchanges
    from fly_jax.sharding.chips import CHIPS

    chip = CHIPS["v5e"]
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(*inputs).compile()
    hlo = compiled.as_text()
    found = exchanges(hlo, mesh.size)
    exchanged = sum(
        one.count * chip.exchange_seconds(one.kind, one.num_bytes, [one.group_size])
        for one in found
    )
    num_bytes = _bytes(hlo)
    return {
        "bytes": num_bytes,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": num_bytes / chip.memory_bandwidth + exchanged,
        "exchanges": sum(one.count for one in found),
        "exchanges_with_a_vocabulary": sum(
            one.count for one in found if any(max(s, default=0) >= _VOCAB // 8 for s in one.shapes)
        ),
    }


def main() -> None:
    versions = vllm_stand_ins.versions("tpu-inference", "libtpu")
    vllm_stand_ins.install()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tpu_inference.layers.common.sharding import ShardingAxisName
    from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
    from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

    from fly_jax.integrations.vllm_tpu.row_rules import RowRules
    from fly_jax.integrations.vllm_tpu.runner import kept_on
    from fly_jax.integrations.vllm_tpu.startup import decoding_config
    from fly_jax.planning.plan_spec import slice_mesh
    from fly_jax.sharding.chips import CHIPS
    from fly_jax.sharding.mesh import parse_mesh

    rows = RowRules(decoding_config({"rule": "fly"}, _K), 2 * _REQUESTS)
    tokens = _REQUESTS * (_K + 1)  # as the engine pads them
    chips = slice_mesh(CHIPS["v5e"], parse_mesh("2x4")).devices
    results = {}
    for data in (1, 2):
        mesh = Mesh(chips.reshape(data, -1), ("data", "model"))

        split = NamedSharding(mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))
        whole = NamedSharding(mesh, PartitionSpec())
        array = functools.partial(jax.ShapeDtypeStruct, sharding=split)
        everywhere = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
        of_requests = functools.partial(array, (_REQUESTS,))
        key = everywhere((), jax.random.key(0).dtype)
        shared = (
            array((tokens,), jnp.int32),
            of_requests(jnp.int32),
            None,
            array((tokens, _VOCAB), jnp.bfloat16),
            of_requests(jnp.int32),
        )
        types = jax.tree.map(lambda number: np.asarray(number).dtype, rows.padding(_REQUESTS))
        step = jax.tree.map(of_requests, types)
        budgets = everywhere((rows.num_slots,), jnp.float32)
        protected = everywhere((_VOCAB,), bool)
        stock = RejectionSampler(mesh)
        for is_sampled in (False, True):
            metadata = TPUSupportedSamplingMetadata(do_sampling=False)
            if is_sampled:
                metadata = TPUSupportedSamplingMetadata(
                    of_requests(jnp.float32), of_requests(jnp.int32), of_requests(jnp.float32),
                    do_sampling=True,
                )  # fmt: skip
            ours = functools.partial(kept_on, mesh=mesh, max_drafted=_K)
            name = f"data={data}, {'sampled' if is_sampled else 'greedy'}"
            results[name] = {
                "stock": _measured(stock.forward, (*shared, metadata, key), mesh),
                "fly": _measured(
                    ours, (step, budgets, *shared, metadata, key, protected, None), mesh
                ),
            }
            print(name, results[name], flush=True)
    print(write("vllm_sampler", {**versions, "k": _K, "requests": _REQUESTS, "steps": results}))


if __name__ == "__main__":
    run(main)
