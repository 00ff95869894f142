"""No round copies a cache or a stack of matrices, and its exchanges are those that it needs.

Programs are compiled from shapes: on the CPU for one device and for 8, and for slices of TPUs that
are not there.
"""

from __future__ import annotations

import functools
import importlib.util

import jax.numpy as jnp
import pytest
from rounds import KINDS, copied, on_mesh, on_one_device, round_hlo

from fly_jax.models.config import LlamaConfig
from fly_jax.models.presets import preset
from fly_jax.planning.copies import Copy
from fly_jax.planning.hlo import Exchange, exchanges
from fly_jax.planning.topology import slice_mesh
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed; the extras [tpu] and [test] have it",
)


def tiny(num_layers: int, embed_size: int, ffw_size: int) -> LlamaConfig:
    # No product of these sizes and of those below is a cache's or a matrix's by accident.
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


TINY = (tiny(3, 144, 320), tiny(2, 72, 192), tiny(2, 40, 96))
K = 15
Compiled = tuple[list[Copy], list[Exchange]]


@functools.cache
def on_cpu(name: str, mesh: str | None) -> Compiled:
    """Copies and exchanges of a kind of round of tiny models: on one device, or on a mesh."""
    kind = KINDS[name]
    configs, float32 = TINY[: 1 + kind.num_drafts], jnp.dtype(jnp.float32)
    if mesh is None:
        models = [on_one_device(config, float32) for config in configs]
    else:
        layout = Layout(create_mesh(parse_mesh(mesh)), RULES["tensor_whole"])
        models = [on_mesh(config, layout, float32) for config in configs]
    hlo, capacity = round_hlo(kind, models, rows=3, context=100, k=5, prompt=20)
    return copied(hlo, models, 3, capacity), exchanges(hlo, 1 if mesh is None else 8)


@functools.cache
def on_tpu(name: str, pair: tuple[str, str], mesh: str, chip: str = "v5e") -> Compiled:
    """The same for a pair of presets in bfloat16 on a slice; one row of 8192 tokens."""
    kind, bfloat16 = KINDS[name], jnp.dtype(jnp.bfloat16)
    layout = Layout(slice_mesh(CHIPS[chip], parse_mesh(mesh)), RULES["tensor_whole"])
    names = (*pair, "llama-3.2-1b")[: 1 + kind.num_drafts]
    models = [on_mesh(preset(one), layout, bfloat16) for one in names]
    hlo, capacity = round_hlo(kind, models, rows=1, context=8192, k=K, prompt=1024)
    return copied(hlo, models, 1, capacity), exchanges(hlo, layout.mesh.size)


def repeated(found: list[Copy]) -> list[str]:
    """What a loop or a branch copies, in few words."""
    return [f"{one.operation} {one.shape} x {one.count}" for one in found if one.is_repeated]


LARGE, MIDDLE, SMALL, TINIEST = (
    "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b", "llama-3.2-1b",
)  # fmt: skip


@pytest.mark.parametrize("mesh", [None, "2x4"], ids=["1 device", "8 devices"])
@pytest.mark.parametrize("name", KINDS)
def test_no_round_copies_a_cache_or_a_stack_of_matrices(name: str, mesh: str | None) -> None:
    found, _ = on_cpu(name, mesh)
    assert not repeated(found)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "pair", "mesh"),
    [
        *((name, (LARGE, SMALL), "8x8") for name in (
            "exact", "sampled", "lookup", "auto", "stop", "defer",
        )),
        ("fly", (MIDDLE, SMALL), "4x4"),
        ("levels", (MIDDLE, SMALL), "4x4"),
        ("lookup", (MIDDLE, SMALL), "2x8"),
        ("fly | margin", (SMALL, TINIEST), "1x1"),
        ("lookup", (SMALL, TINIEST), "1x1"),
        ("auto", (SMALL, TINIEST), "1x1"),
    ],
    ids=str,
)  # fmt: skip
def test_no_round_on_a_slice_copies_either(name: str, pair: tuple[str, str], mesh: str) -> None:
    # Two of these on one v5e chip need more than its memory; they are of interest all the same.
    found, _ = on_tpu(name, pair, mesh, "v6e" if mesh == "1x1" else "v5e")
    assert not repeated(found)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "target", "mesh", "chip"),
    [
        ("exact", LARGE, "8x8", "v5e"),
        ("fly", MIDDLE, "4x4", "v5e"),
        ("lookup", MIDDLE, "2x8", "v5e"),
        ("autoregressive", MIDDLE, "4x8", "v5e"),
        ("autoregressive", MIDDLE, "2x4", "v6e"),  # it takes more than the memory of 8 v5e
        ("autoregressive", SMALL, "8x8", "v5e"),
    ],
    ids=str,
)
def test_a_layer_of_the_target_sums_twice_and_no_more(
    name: str, target: str, mesh: str, chip: str
) -> None:
    _, found = on_tpu(name, (target, SMALL), mesh, chip)
    layers = preset(target).num_layers
    in_layers = [one.kind for one in found if one.count == layers]
    assert in_layers == ["all-reduce", "all-reduce"]


@needs_libtpu
def test_sampling_costs_a_draft_pass_four_exchanges_at_most() -> None:
    greedy, sampled = (
        sum(one.count for one in on_tpu(name, (LARGE, SMALL), "8x8")[1])
        for name in ("exact", "sampled")
    )
    # The target's pass samples once, too.
    assert sampled - greedy <= 4 * (K + 1)
