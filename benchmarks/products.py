"""A matrix product and the best token of a vocabulary, in the ways that a CPU can do them.

    python benchmarks/products.py

Milliseconds, minima over turns in which each way comes once, of one of several matrices that are
multiplied in turn. Writes results/products.json in three minutes; nothing else should run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import machine
from jaxtyping import Array
from tqdm import tqdm

from fly_jax.models.integers import of_integers, unsigned
from fly_jax.models.llama import in_front, matmul
from fly_jax.verification.reductions import vocab_argmax

TURNS = 40
TOKENS = (1, 2, 4, 5, 8, 10, 16, 64)
# Outputs, inputs, copies: of the embedded target, which a cache holds, of Qwen2.5 1.5B and 0.5B.
MATRICES = ((1280, 384, 12), (8960, 1536, 6), (1536, 8960, 6), (4864, 896, 24))
VOCABULARIES = ((2048, 10), (49_152, 1), (151_936, 1), (151_936, 5))

Way = Callable[[], Any]


def milliseconds(ways: dict[str, Way], copies: int) -> dict[str, float]:
    found = {name: float("inf") for name in ways}
    for turn in range(TURNS + 1):  # the first compiles
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way())
            if turn:
                found[name] = min(found[name], (time.perf_counter() - start) * 1000 / copies)
    return {name: round(value, 4) for name, value in found.items()}


def of_matrices(outputs: int, inputs: int, copies: int, tokens: int) -> dict[str, Way]:
    keys = jax.random.split(jax.random.key(0), copies + 1)
    turned = [jax.random.normal(key, (outputs, inputs)) for key in keys[1:]]
    plain = [one.T.copy() for one in turned]
    rounded = [(one * 40).astype(jnp.int8) for one in turned]
    x, scale = jax.random.normal(keys[0], (1, tokens, inputs)), jnp.ones(outputs)
    fours = ((0, 0), (0, -tokens % 4), (0, 0))  # all tokens padded, as one and two are not

    def every(multiply: Callable[[Array, Array], Array], matrices: list[Array]) -> Way:
        run = jax.jit(lambda x, matrices: [multiply(x, one) for one in matrices])
        return lambda: run(x, matrices)

    return {
        "float32, in front": every(lambda x, one: in_front("bti,oi->bto", x, one), turned),
        "float32, behind": every(lambda x, one: matmul("bti,io->bto", x, one), plain),
        "int8": every(lambda x, one: of_integers(x, one, scale), rounded),
        "uint8": every(lambda x, one: of_integers(x, one, scale), [*map(unsigned, rounded)]),
        "int8, fours": every(
            lambda x, one: of_integers(jnp.pad(x, fours), one, scale)[:, :tokens], rounded
        ),
    }


def of_vocabulary(size: int, rows: int) -> dict[str, Way]:
    logits = jax.random.normal(jax.random.key(0), (rows, size))
    whole, passes = jax.jit(lambda x: jnp.argmax(x, axis=-1)), jax.jit(vocab_argmax)
    return {"argmax": lambda: whole(logits), "two passes": lambda: passes(logits)}


def main() -> None:
    result: dict[str, dict[str, float]] = {}
    for outputs, inputs, copies in MATRICES:
        for tokens in tqdm(TOKENS, f"{outputs} x {inputs}"):
            ways = of_matrices(outputs, inputs, copies, tokens)
            result[f"{outputs} x {inputs}, {tokens} tokens"] = milliseconds(ways, copies)
    for size, rows in VOCABULARIES:
        result[f"best of {size}, {rows} rows"] = milliseconds(of_vocabulary(size, rows), 1)
    print(machine.write("products", {"milliseconds": result}))


if __name__ == "__main__":
    machine.run(main)
