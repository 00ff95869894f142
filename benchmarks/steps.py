"""The time of one pass of a model, stacked or not, against its floor.

    python benchmarks/steps.py [--target MODEL]

The floor is the pass's matrix products alone. Without --target the models are the embedded pair's;
with it the model has that one's shape, in float32, and the results are in results/steps_target.json
and not in results/steps.json. All variants are timed in turns; the minimum and the median of each
are kept. Takes two minutes; run nothing else meanwhile.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import machine
from absl import flags

from fly_jax.models.architectures import LlamaConfig, parameter_specs
from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.checkpoints.load import open_checkpoint
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR, resolve
from fly_jax.models.llama import Llama, Parameters, in_front

_TARGET = flags.DEFINE_string("target", None, "a model: folder, GGUF file or hub id")
CAPACITY = 192
PASSES = 10
TURNS = 15
WIDTHS = {"target": (1, 8, 12, 16), "draft": (1, 2, 7)}


def _passes(config: LlamaConfig, width: int, unstacked: bool) -> Callable[[], float]:
    """A function that runs some passes in one dispatch and returns the milliseconds of each."""
    model = Llama.random(config, jax.random.key(0))
    parameters = (model.unstacked() if unstacked else model).parameters()

    @functools.partial(jax.jit, donate_argnames=("cache",))
    def run(parameters: Parameters, cache: KVCache, tokens: jax.Array) -> tuple[KVCache, jax.Array]:
        model = Llama(config, parameters)

        def one(_: int, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, tokens = carry
            hidden, cache = model.extend(tokens, cache)
            chosen = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
            return cache.with_length((cache.length + width) % (CAPACITY - width)), chosen

        return jax.lax.fori_loop(0, PASSES, one, (cache, tokens))

    cache = empty_cache(config, 1, CAPACITY, jnp.dtype("float32"))
    state = [jax.block_until_ready(run(parameters, cache, jnp.ones((1, width), jnp.int32)))]

    def timed() -> float:
        start = time.perf_counter()
        state[0] = jax.block_until_ready(run(parameters, *state[0]))
        return (time.perf_counter() - start) / PASSES * 1e3

    return timed


def _products(config: LlamaConfig, width: int) -> Callable[[], float]:
    """The same of the matrix products alone, each of which waits for the one before it."""
    parameters = Llama.random(config, jax.random.key(0)).unstacked().parameters()
    inputs = {
        name: math.prod(
            size for axis, size in zip(spec.axes, spec.shape, strict=True) if axis in spec.inputs
        )
        for name, spec in parameter_specs(config).items()
        if spec.inputs and (config.tied_embeddings or name != "embedding")
    }

    @jax.jit
    def run(parameters: Parameters) -> jax.Array:
        def one(_: int, last: jax.Array) -> jax.Array:
            for name, count in inputs.items():
                for matrix in jax.tree.leaves(parameters[name]):
                    given = jnp.full((1, width, count), 1.0) + last
                    product = in_front("bti,oi->bto", given, matrix.reshape(-1, count))
                    last = jnp.max(product) * 1e-9
            return last

        return jax.lax.fori_loop(0, PASSES, one, jnp.float32(0))

    jax.block_until_ready(run(parameters))

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(parameters))
        return (time.perf_counter() - start) / PASSES * 1e3

    return timed


def main() -> None:
    folders, result, given = dict(zip(WIDTHS, EMBEDDED_PAIR, strict=True)), "steps", ""
    if _TARGET.value is not None:
        folders = {"target": resolve(_TARGET.value)}
        result, given = "steps_target", f" --target {_TARGET.value.rpartition('/')[2]}"
    variants = {}
    for model, folder in folders.items():
        config = open_checkpoint(folder).config
        for width in WIDTHS[model]:
            said = f"{model}, {width} tokens"
            variants[f"{said}, products alone"] = _products(config, width)
            variants[f"{said}, scan"] = _passes(config, width, False)
            variants[f"{said}, one array per layer"] = _passes(config, width, True)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(TURNS):
        for name, timed in variants.items():
            times[name].append(timed())
    milliseconds = {
        name: {"min": min(values), "median": statistics.median(values)}
        for name, values in times.items()
    }
    for name, row in milliseconds.items():
        print(f"{name:45} min {row['min']:.3f} ms  median {row['median']:.3f} ms")
    command = f"python benchmarks/steps.py{given}"
    print(machine.write(result, {"command": command, "milliseconds": milliseconds}))


if __name__ == "__main__":
    machine.run(main)
