"""An empty cache, as a library's user makes one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from random_pairs import CONFIG

from fly_jax.models.cache import KVCache, empty_cache


def test_it_may_be_donated_whole() -> None:
    def ones(cache: KVCache) -> KVCache:
        return jax.tree.map(lambda leaf: leaf + 1, cache)

    cache = jax.jit(ones, donate_argnums=0)(empty_cache(CONFIG, 2, 8, jnp.dtype("float32")))
    assert float(cache.keys.sum()) == float(cache.values.sum()) == cache.keys.size
