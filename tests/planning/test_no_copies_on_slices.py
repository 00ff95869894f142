"""No round copies a cache or a stack of matrices, and its exchanges are those that it needs.

The TPU compiler says so of slices that are not there.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from rounds import BY_LIBTPU, KINDS, copied, on_chip, repeated, round_hlo

from fly_jax.models.presets import preset
from fly_jax.planning.hlo import Copy, Exchange, exchanges
from fly_jax.planning.plan_spec import slice_mesh
from fly_jax.planning.plan_steps import abstract_model
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

pytestmark = BY_LIBTPU

LARGE, MIDDLE, SMALL = (f"llama-3.1-{size}" for size in ("405b", "70b", "8b"))
LITTLE, AT_ONCE = "llama-3.2-3b", "pard-llama-3.2-1b"
WITH_HEAD = f"{SMALL} eagle3-{SMALL}"


@functools.cache
def compiled(
    name: str, target: str, draft: str, mesh: str, chip: str
) -> tuple[list[Copy], list[Exchange]]:
    """Copies and exchanges of a kind of round of presets in bfloat16, with one row."""
    kind, context = KINDS[name], 8192
    devices = slice_mesh(CHIPS[chip], parse_mesh(mesh))
    configs = [preset(one) for one in (target, *draft.split())[: 1 + kind.num_drafts]]
    if devices.size == 1:
        one, bfloat16 = devices.devices.flat[0], jnp.dtype(jnp.bfloat16)
        models = [on_chip(config, bfloat16, one) for config in configs]
        # The compiler takes longest here: with the fewest widths that a lookup chooses from.
        fewest = kind.spec.with_static(num_speculative_tokens=2)
        kind, context = dataclasses.replace(kind, spec=fewest), 4096
    else:
        layout = Layout(devices, RULES["tensor_whole"])
        models = [abstract_model(config, layout) for config in configs]
    hlo, capacity = round_hlo(kind, models, rows=1, context=context)
    return copied(hlo, models, 1, capacity), exchanges(hlo, devices.size)


@pytest.mark.parametrize(
    ("name", "target", "draft", "mesh"),
    [
        *((name, LARGE, SMALL, "8x8") for name in ("exact", "sampled", "lookup", "auto", "defer")),
        ("exact", LARGE, AT_ONCE, "8x8"),
        ("defer", "qwen-3-8b", "dspark-qwen-3-8b", "2x2"),
        ("head below", LARGE, WITH_HEAD, "8x8"),
        ("fly", MIDDLE, SMALL, "2x8"),
        # Two models that one chip holds: 8B and 1B in bfloat16 are more than that.
        ("lookup", LITTLE, LITTLE, "1x1"),
    ],
)
def test_no_round_copies_a_cache_or_a_stack_of_matrices(
    name: str, target: str, draft: str, mesh: str
) -> None:
    assert not repeated(compiled(name, target, draft, mesh, "v5e")[0])


@pytest.mark.parametrize(
    ("name", "target", "mesh", "chip"),
    [
        ("exact", LARGE, "8x8", "v5e"),
        ("fly", MIDDLE, "2x8", "v5e"),
        ("autoregressive", MIDDLE, "4x8", "v5e"),
        ("autoregressive", MIDDLE, "2x4", "v6e"),  # it takes more than the memory of 8 v5e
        ("autoregressive", SMALL, "8x8", "v5e"),
    ],
)
def test_a_layer_of_the_target_sums_twice_and_no_more(
    name: str, target: str, mesh: str, chip: str
) -> None:
    _, found = compiled(name, target, SMALL, mesh, chip)
    layers = preset(target).num_layers
    assert [one.kind for one in found if one.count == layers] == ["all-reduce", "all-reduce"]


def test_sampling_costs_a_pass_four_exchanges_at_most() -> None:
    greedy, sampled = (
        sum(one.count for one in compiled(name, LARGE, SMALL, "8x8", "v5e")[1])
        for name in ("exact", "sampled")
    )
    # 5 passes of the draft, and the target's, whose rejection of draft tokens takes one more.
    assert sampled - greedy <= 4 * (5 + 1) + 1
