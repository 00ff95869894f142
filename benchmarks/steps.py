"""The time of one pass of a model, as its layers and numbers may lie, against its floor.

    python benchmarks/steps.py [--target MODEL]

The floor is the pass's matrix products alone. Without --target the models are the embedded pair's.
With it the results are in results/steps_target.json.
All variants are timed in turns; the minimum and the median of each are kept. Takes two minutes; run
nothing else meanwhile.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import machine
from absl import flags
from gpu_pass import passes

from fly_jax.models.architectures import LlamaConfig, parameter_specs
from fly_jax.models.cache import empty_cache
from fly_jax.models.checkpoints.load import load_llama
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR, resolve
from fly_jax.models.llama import Llama, in_front, matmul, turns_layers

PRODUCTS = "products alone"
VARIANTS = (PRODUCTS, "scan", "one array per layer")
_TARGET = flags.DEFINE_string("target", None, "a model: folder, GGUF file or hub id")
_WIDTHS = flags.DEFINE_list("widths", ["1", "8", "12", "16"], "tokens of a pass of the target")
_TURNS = flags.DEFINE_integer("turns", 15, "how often each variant is timed", lower_bound=1)
CAPACITY = 192
PASSES = 10
DRAFT_WIDTHS = (1, 2, 7)


@functools.cache
def _model(folder: Path, variant: str) -> Llama:
    return load_llama(folder, unstacked=variant != "scan", weights_cache=None)


def _passes(folder: Path, width: int, variant: str) -> Callable[[], float]:
    """A function that runs some passes in one dispatch and returns the milliseconds of each."""
    model = _model(folder, variant)
    run = functools.partial(passes, model.config, PASSES, model.parameters())
    cache = empty_cache(model.config, 1, CAPACITY, jnp.dtype("float32"))
    state = [jax.block_until_ready(run(cache, jnp.ones((1, width), jnp.int32)))]

    def timed() -> float:
        start = time.perf_counter()
        state[0] = jax.block_until_ready(run(*state[0]))
        return (time.perf_counter() - start) / PASSES * 1e3

    return timed


def _products(folder: Path, width: int, variant: str) -> Callable[[], float]:
    """The same of the matrix products alone, each of which waits for the one before it."""
    model = _model(folder, variant)
    parameters, inputs = model.parameters(), _inputs(model.config)
    turned = turns_layers(model.config, model.dtype, has_integers=False)

    @jax.jit
    def run(parameters: Parameters) -> jax.Array:
        def one(_: int, last: jax.Array) -> jax.Array:
            for name, count in inputs.items():
                for matrix in jax.tree.leaves(parameters[name]):
                    given = jnp.full((1, width, count), 1.0) + last
                    if turned or name in ("embedding", "unembedding"):
                        product = in_front("bti,oi->bto", given, matrix.reshape(-1, count))
                    else:
                        product = matmul("bti,io->bto", given, matrix.reshape(count, -1))
                    last = jnp.max(product) * 1e-9
            return last

        return jax.lax.fori_loop(0, PASSES, one, jnp.float32(0))

    jax.block_until_ready(run(parameters))

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(parameters))
        return (time.perf_counter() - start) / PASSES * 1e3

    return timed


def _inputs(config: LlamaConfig) -> dict[str, int]:
    """How many inputs each matrix has that a pass multiplies by."""
    return {
        name: math.prod(
            size for axis, size in zip(spec.axes, spec.shape, strict=True) if axis in spec.inputs
        )
        for name, spec in parameter_specs(config).items()
        if spec.inputs and (config.tied_embeddings or name != "embedding")
    }


def main() -> None:
    widths = [int(one) for one in _WIDTHS.value]
    target, draft = EMBEDDED_PAIR
    models = {"target": (target, widths), "draft": (draft, DRAFT_WIDTHS)}
    result, given = "steps", ""
    if _TARGET.value is not None:
        models = {"target": (resolve(_TARGET.value), widths)}
        result, given = "steps_target", f" --target {_TARGET.value.rpartition('/')[2]}"
    variants = {}
    for model, (folder, some) in models.items():
        for width in some:
            for variant in VARIANTS:
                made = _products if variant == PRODUCTS else _passes
                variants[f"{model}, {width} tokens, {variant}"] = made(folder, width, variant)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(_TURNS.value):
        for name, timed in variants.items():
            times[name].append(timed())
    milliseconds = {
        name: {"min": min(values), "median": statistics.median(values)}
        for name, values in times.items()
    }
    for name, row in milliseconds.items():
        print(f"{name:45} min {row['min']:.3f} ms  median {row['median']:.3f} ms")
    command = f"python benchmarks/steps.py{given} --widths {','.join(_WIDTHS.value)}"
    command += f" --turns {_TURNS.value}"
    print(machine.write(result, {"command": command, "milliseconds": milliseconds}))


if __name__ == "__main__":
    machine.run(main)
