"""Exchanges are read from HLO with the loops around them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fly_jax.planning.hlo import Exchange, exchanges
from fly_jax.sharding.mesh import create_mesh, parse_mesh

LAYERS = 7
PASSES = 3


def test_an_exchange_counts_as_often_as_the_loops_around_it_run() -> None:
    mesh = create_mesh(parse_mesh("2x4"))
    whole = PartitionSpec()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    def program(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(jax.lax.psum(x, ("x", "y"))), None

        def one_pass(_: jax.Array, x: jax.Array) -> jax.Array:
            x = jax.lax.scan(layer, x, None, length=LAYERS)[0]
            return jnp.cos(jax.lax.pmax(x, "y"))

        return jax.lax.fori_loop(0, PASSES, one_pass, x)

    hlo = program.lower(jnp.ones((4, 5))).compile().as_text()
    assert hlo is not None
    found = exchanges(hlo, 8)
    assert sorted((one.kind, one.group_size, one.count) for one in found) == [
        ("all-reduce", 4, PASSES),
        ("all-reduce", 8, PASSES * LAYERS),
    ]
    assert {one.num_bytes for one in found} == {4 * 5 * 4}


HLO = """\
HloModule jit_step, is_scheduled=true

%cond (p: (s32[], bf16[2,4])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[2,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %limit = s32[]{:T(128)} constant(126)
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%part.1 (p: bf16[2,4]) -> bf16[2,32] {
  %all-gather.1 = bf16[2,32]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={1}
}

%part.2 (p: bf16[2,4]) -> bf16[2,32] {
  %all-gather.2 = bf16[2,32]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={1}
}

%body (p: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %start = bf16[2,32]{1,0} fusion(%x), kind=kCustom, calls=%part.1
  %done = bf16[2,32]{1,0} fusion(%start), kind=kCustom, calls=%part.2
  %sum = bf16[2,4]{1,0} all-reduce(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add
  %state = (s32[]{:T(128)}, bf16[2,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[2,4]{1,0}) tuple(%next, %sum)
}

%one (p: f32[3]) -> f32[3] {
  %swap = f32[3]{0} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={0}
}

%other (p: f32[3]) -> f32[3] {
  ROOT %same = f32[3]{0} copy(%p)
}

ENTRY %main (p: bf16[2,4]) -> bf16[2,4] {
  %loop = (s32[]{:T(128)}, bf16[2,4]{1,0}) while(%init), condition=%cond, body=%body
  %either = f32[3]{0} conditional(%flag, %a, %b), branch_computations={%one, %other}
  %part = f32[5]{0} all-gather(%a), replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0', 'axis_1':(2)4}, dimensions={0}
  %pair = (f32[6]{0}, s32[6]{0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add
}
"""  # noqa: E501


def test_the_spellings_of_the_tpu_compiler() -> None:
    """Limits of loops in their condition, one exchange over several fusions, tuples, groups."""
    found = exchanges(HLO, 8)
    assert sorted(found, key=lambda one: (one.kind, one.count)) == [
        Exchange("all-gather", ((5,),), 5 * 4, 16, 1),
        Exchange("all-gather", ((2, 32),), 2 * 32 * 2, 2, 126),
        Exchange("all-reduce", ((6,), (6,)), 48, 4, 1),
        Exchange("all-reduce", ((2, 4),), 2 * 4 * 2, 4, 126),
        Exchange("all-to-all", ((3,),), 12, 2, 1),
    ]
