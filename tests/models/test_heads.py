"""What a head reads of its target, and the files that heads are published in."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import random_pairs as pairs

from fly_jax.models.cache import empty_cache
from fly_jax.models.llama import Llama

DEEP = dataclasses.replace(pairs.CONFIG, num_layers=4)


@pytest.mark.parametrize("unstacked", [False, True])
def test_inputs_are_of_the_layers_that_are_named(unstacked: bool) -> None:
    """Each is what a model without that layer and those above it ends with, before its norm."""
    whole, ones = pairs.random_target(1, DEEP), jnp.ones(DEEP.embed_size)
    model = whole.unstacked() if unstacked else whole
    tokens = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    cache = empty_cache(DEEP, *tokens.shape, jnp.dtype("float32"))
    hidden, _, seen = model.hidden_and_inputs(tokens, cache, (3, 1))
    np.testing.assert_array_equal(hidden, model.hidden(tokens, cache)[0])
    for depth, found in zip((3, 1), jnp.split(seen, 2, axis=-1), strict=True):
        below = {
            name: value[:depth] if value.ndim and len(value) == DEEP.num_layers else value
            for name, value in whole.parameters().items()
        }
        config = dataclasses.replace(DEEP, num_layers=depth)
        few = empty_cache(config, *tokens.shape, jnp.dtype("float32"))
        cut = Llama(config, below | {"final_norm": ones}).hidden(tokens, few)[0]
        size = jnp.sqrt(jnp.mean(found**2, axis=-1, keepdims=True) + config.norm_epsilon)
        np.testing.assert_allclose(found / size, cut, atol=1e-5)
