"""What int8 matrices cost a model in perplexity, and how often they choose another token.

    python benchmarks/perplexity.py --target FILE ...

Reads Python's json package in pieces of 512 tokens, in float32 and in int8, where one CPU device
also rounds activations. Caches are float32 in both. Writes results/perplexity.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
from absl import flags

from fly_jax.decoding.pair import load_pair
from fly_jax.models.cache import empty_cache
from fly_jax.models.llama import Llama

_TARGETS = flags.DEFINE_multi_string("target", None, "a model, once or more")
_PIECES = flags.DEFINE_integer("pieces", 4, "of 512 tokens")
_SIZE, _WIDTH = 512, 64


def read(model: Llama, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nats of each next token, and the tokens found most probable; both [pieces, size - 1]."""

    @jax.jit
    def run(parameters: Any, cache: Any, tokens: Any) -> Any:
        own = Llama(model.config, parameters)
        hidden, cache = own.extend(tokens, cache)
        return cache.with_length(cache.length + _WIDTH), jax.nn.log_softmax(own.logits(hidden))[0]

    nats, best = [], []
    for piece in pieces:
        cache = empty_cache(model.config, 1, _SIZE, jnp.dtype("float32"))
        found = np.empty((_SIZE, model.config.vocab_size), np.float32)
        for start in range(0, _SIZE, _WIDTH):
            part = slice(start, start + _WIDTH)
            cache, found[part] = run(model.parameters(), cache, piece[None, part])
        nats.append(-found[np.arange(_SIZE - 1), piece[1:]])
        best.append(found[:-1].argmax(axis=1))
    return np.stack(nats), np.stack(best)


def main() -> None:
    text = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    result: dict[str, Any] = {}
    for name in _TARGETS.value:
        nats, best = {}, {}
        for dtype in ("float32", "int8"):
            pair = load_pair(name, dtype=dtype, weights_cache="off")
            ids = pair.tokenizer.encode(text)[: _PIECES.value * _SIZE]
            pieces = np.asarray(ids, np.int32)[: len(ids) // _SIZE * _SIZE].reshape(-1, _SIZE)
            nats[dtype], best[dtype] = read(pair.target, pieces)
        more = {dtype: float(np.exp(one.mean())) for dtype, one in nats.items()}
        same = float(np.mean(best["float32"] == best["int8"]))
        result[Path(name).name] = {"tokens": nats["int8"].size, "perplexity": more, "same": same}
        print(machine.write("perplexity", result), result, flush=True)


if __name__ == "__main__":
    flags.mark_flag_as_required("target")
    machine.run(main)
