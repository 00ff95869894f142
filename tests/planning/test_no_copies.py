"""No round copies a cache or a stack of matrices: what the CPU compiles, for one device and 8."""

from __future__ import annotations

import math
from typing import cast

import jax
import jax.numpy as jnp
import pytest
from fly_jax.decoding.decoder import Decoder
from jax.stages import Traced
from rounds import KINDS, compiled_text, copied, on_mesh, on_one_device, repeated, round_hlo

from fly_jax.decoding import programs
from fly_jax.models.architectures import LlamaConfig
from fly_jax.planning.hlo import exchanges
from fly_jax.planning.plan_steps import abstract_state
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


@pytest.mark.parametrize("rules", [None, "tensor_whole", "tensor"])
def test_rows_come_and_go_without_a_copy_of_the_others(rules: str | None) -> None:
    """In an engine's slots; "tensor" splits the rows, of which a device then has two."""
    rows, float32 = 8, jnp.dtype(jnp.float32)
    layout = None if rules is None else Layout(create_mesh(parse_mesh("2x4")), RULES[rules])
    models = [
        on_one_device(config, float32) if layout is None else on_mesh(config, layout, float32)
        for config in TINY[:2]
    ]
    decoders = [
        Decoder(models[0], models[1:], KINDS["fly"].spec(5), capacity=256, batch_size=number)
        for number in (rows, 1)
    ]
    many, one = (
        abstract_state(decoder, [layout, layout], decoder.trace_prefill(20)) for decoder in decoders
    )
    sharding = None if layout is None else layout.sharding((), ())
    at = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    of = decoders[0]._programs
    inserted = programs._insert.lower(False, many, one, at).compile().as_text()
    released = programs._release.lower(many, at).compile().as_text()
    assert not copied(inserted, models, rows, 256)
    assert not copied(released, models, rows, 256)
    if layout is None:  # rounds may be made for the first rows alone
        few = cast(Traced, of.run(many, decoders[0]._inputs, 2))
        text = compiled_text(few, models[0])
        assert not repeated(copied(text, models, rows, 256) + copied(text, models, 2, 256))
    taken = programs._copy_row.lower(of._shapes, of._drafter, one, many, at).compile().as_text()
    row = max(math.prod(one.target.keys.shape), math.prod(one.drafter.cache.keys.shape))
    number = 1 if layout is None else layout.mesh.size
    for text in (inserted, released, taken):
        for exchange in exchanges(text, number):
            assert exchange.count == 1
            assert all(math.prod(shape) <= row for shape in exchange.shapes), exchange
