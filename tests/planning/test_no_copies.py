"""No round copies a cache or a stack of matrices: what the CPU compiles, for one device and 8."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from rounds import KINDS, copied, on_mesh, on_one_device, repeated, round_hlo

from fly_jax.models.config import LlamaConfig
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout


def tiny(num_layers: int, embed_size: int, ffw_size: int) -> LlamaConfig:
    """A model none of whose other arrays has a cache's or a stack's size by accident."""
    return LlamaConfig(
        vocab_size=512,
        embed_size=embed_size,
        ffw_size=ffw_size,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=4,
        head_size=16,
        max_context=256,
    )


TINY = (tiny(2, 144, 320), tiny(2, 72, 192), tiny(2, 40, 96))
ROWS = 3


@pytest.mark.parametrize("mesh", [None, "2x4"], ids=["1 device", "8 devices"])
@pytest.mark.parametrize("name", KINDS)
def test_no_round_copies_a_cache_or_a_stack_of_matrices(name: str, mesh: str | None) -> None:
    kind = KINDS[name]
    # In bfloat16 the CPU's programs widen whole arrays, which accelerators do not.
    configs, float32 = TINY[: 1 + kind.num_drafts], jnp.dtype(jnp.float32)
    if mesh is None:
        models = [on_one_device(config, float32) for config in configs]
    else:
        layout = Layout(create_mesh(parse_mesh(mesh)), RULES["tensor_whole"])
        models = [on_mesh(config, layout, float32) for config in configs]
    hlo, capacity = round_hlo(kind, models, rows=ROWS, context=100, k=5, prompt=20)
    assert not repeated(copied(hlo, models, ROWS, capacity))
