"""What one pass of the embedded pair's models costs, stacked or not, against its floor.

    python benchmarks/steps.py

All variants are timed in turns; the minimum and the median of each are written to
results/steps.json. Takes a minute; run nothing else meanwhile.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import machine
from absl import app

from fly_jax.models.cache import KVCache, empty_cache
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama, Parameters
from fly_jax.training.pair import DRAFT, TARGET

CAPACITY = 192
PASSES = 30
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
            hidden, cache = model.hidden(tokens, cache)
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


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"'{argv[1]}' is not understood; this script takes no arguments.")
    configs = {"target": TARGET.config, "draft": DRAFT.config}
    variants = {
        f"{name}, {width} tokens, {'one array per layer' if unstacked else 'scan'}": _passes(
            configs[name], width, unstacked
        )
        for name, widths in WIDTHS.items()
        for width in widths
        for unstacked in (False, True)
    }
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
    command = "python benchmarks/steps.py"
    print(machine.write("steps", {"command": command, "milliseconds": milliseconds}))


if __name__ == "__main__":
    app.run(main)
