"""Compiled programs are read right: trips of loops, exchanges, copies of large arrays."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden import layout_on
from jax.sharding import PartitionSpec

from fly_jax.planning.hlo import Exchange, copies, exchanges, frames, parse

# The limit, the step and what the loop ends on are filled in; the counter starts at START.
LOOP = """\
HloModule jit_step

%fused (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %within = pred[] compare(%a, %b), direction=LT
}

%cond (s: (s32[], s32[], pred[])) -> pred[] {
  %s = (s32[]{:T(128)}, s32[]{:T(128)}, pred[]{:T(512)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %n = s32[]{:T(128)} get-tuple-element(%s), index=1
  %going = pred[]{:T(512)} get-tuple-element(%s), index=2
  %shift = s32[]{:T(128)} constant(1)
  %shifted = s32[]{:T(128)S(6)} add(%i, %shift)
  %limit = s32[]{:T(128)} constant(25)
CONDITION
}

%body (t: (s32[], s32[], pred[])) -> (s32[], s32[], pred[]) {
  %t = (s32[]{:T(128)}, s32[]{:T(128)}, pred[]{:T(512)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%t), index=0
  %same = s32[]{:T(128)} get-tuple-element(%t), index=1
  %any = pred[]{:T(512)} get-tuple-element(%t), index=2
  %step = s32[] constant(STEP)
  %next = s32[]{:T(128)} add(%j, %step)
  ROOT %out = (s32[]{:T(128)}, s32[]{:T(128)}, pred[]{:T(512)}) tuple(%next, %same, %any)
}

ENTRY %main (p: s32[], q: pred[]) -> s32[] {
  %p = s32[] parameter(0)
  %q = pred[] parameter(1)
  %first = s32[]{:T(128)} START
  %start = s32[]{:T(128)} copy(%first)
  %eight = s32[]{:T(128)} constant(8)
  %init = (s32[]{:T(128)}, s32[]{:T(128)}, pred[]{:T(512)}) tuple(%start, %eight, /*index=2*/%q)
  %loop = (s32[]{:T(128)}, s32[]{:T(128)}, pred[]) while(%init), condition=%cond, body=%body
  ROOT %result = s32[] get-tuple-element(%loop), index=0
}
"""
PLAIN = "  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT"
FUSED = "  ROOT %f = pred[] fusion(%i, %limit), kind=kLoop, calls=%fused"
BOTH = PLAIN.replace("ROOT ", "") + "\n  ROOT %both = pred[] and(%lt, %going)"


def trips(hlo: str, **options: int) -> list[int]:
    return [frame.count for frame in frames(parse(hlo), **options) if frame.in_loop]


def compiled(program: Callable[..., jax.Array], *arguments: Any, **options: Any) -> str:
    return jax.jit(program, **options).lower(*arguments).compile().as_text()


def loop(condition: str = PLAIN, start: int | str = 0, step: int = 1) -> str:
    filled = LOOP.replace("CONDITION", condition).replace("STEP", str(step))
    return filled.replace("START", f"constant({start})" if isinstance(start, int) else start)


@pytest.mark.parametrize(("expected", "given"), [
    (25, ()), (24, (PLAIN, 1)), (13, (PLAIN, 0, 2)), (25, (PLAIN.replace("LT", "LE"), 1)),
    (20, (PLAIN.replace("LT", "NE"), 5)),
    (24, (PLAIN.replace("%i, %limit", "%limit, %i").replace("LT", "GT"), 1)),
    (5, (PLAIN.replace("LT", "GT"), 30, -1)),
    # The compiler moves the counter: it starts at 0 and is compared after a step.
    (24, (PLAIN.replace("%i,", "%shifted,"),)),
    # The limit is carried along, or the comparison is fused.
    (7, (PLAIN.replace("%limit", "%n"), 1)), (24, (FUSED, 1)),
    # Data may end it sooner, or start it later: these are bounds.
    (24, (BOTH, 1)), (25, (PLAIN, "copy(%p)")), (0, (PLAIN, 30)),
])  # fmt: skip
def test_trips_are_limit_minus_start(expected: int, given: tuple[Any, ...]) -> None:
    assert trips(loop(*given)) == ([expected] if expected else [])


def test_a_loop_that_only_data_ends_runs_as_often_as_is_said() -> None:
    hlo = loop("  ROOT %going.1 = pred[]{:T(512)} get-tuple-element(%s), index=2")
    assert (trips(hlo), trips(hlo, unknown_trips=14)) == ([1], [14])
    known = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    assert trips(loop().replace("body=%body", known)) == [3]


def test_loops_and_exchanges_of_a_compiled_program_are_counted() -> None:
    """A draft of K tokens: one before a loop from 1 to K, layers inside, and a branch."""
    mesh, whole = layout_on("2x4").mesh, PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    def program(x: jax.Array, wide: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(jax.lax.psum(x, ("x", "y"))), None

        def one_pass(_: jax.Array, x: jax.Array) -> jax.Array:
            x = jax.lax.scan(layer, x, None, length=7)[0]
            x = jax.lax.cond(wide, lambda x: jnp.cos(x @ x), lambda x: jnp.tan(x @ x), x)
            return jax.lax.pmax(x, "y")

        return jax.lax.fori_loop(1, 9, one_pass, one_pass(jnp.int32(0), x))

    hlo = compiled(program, jnp.ones((16, 16)), jnp.bool(True))
    inside = {(frame.count, frame.in_branch) for frame in frames(parse(hlo)) if frame.in_loop}
    assert inside == {(7, False), (8, False), (8, True), (56, False)}
    assert sorted(exchanges(hlo, 8), key=lambda one: one.count) == [
        Exchange("all-reduce", ((16, 16),), 16 * 16 * 4, devices, times)
        for devices, times in ((4, 1), (8, 7), (4, 8), (8, 8 * 7))
    ]


CARRYING = """\
HloModule jit_step, is_scheduled=true

%part.1 (p: bf16[2,4]) -> bf16[2,32] {
  %all-gather.1 = bf16[2,32]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={1}
}

%part.2 (p: bf16[2,4]) -> bf16[2,32] {
  %all-gather.2 = bf16[2,32]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={1}
}

%in_place (a: bf16[4,1,8,64], b: bf16[4,1,1,64]) -> bf16[4,1,8,64] {
  %a = bf16[4,1,8,64]{3,2,1,0} parameter(0)
  %b = bf16[4,1,1,64]{3,2,1,0} parameter(1)
  %z = s32[] constant(0)
  ROOT %new = bf16[4,1,8,64]{3,2,1,0} dynamic-update-slice(%a, %b, %z, %z, %z, %z)
}

%widened (c: bf16[4,1,8,64]) -> f32[4,8,64] {
  %c = bf16[4,1,8,64]{3,2,1,0} parameter(0)
  %flat = bf16[4,8,64]{2,1,0} bitcast(%c)
  ROOT %wide = f32[4,8,64]{2,1,0} convert(%flat)
}

%left (d: bf16[4,1,8,64]) -> bf16[4,1,8,64] {
  %d = bf16[4,1,8,64]{3,2,1,0} parameter(0)
  %swap = f32[3]{0} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %moved = bf16[4,1,8,64]{3,1,2,0} copy(%d)
}

%right (e: bf16[4,1,8,64]) -> bf16[4,1,8,64] {
  ROOT %e = bf16[4,1,8,64]{3,2,1,0} parameter(0)
}

%body (t: (bf16[4,1,8,64])) -> (bf16[4,1,8,64]) {
  %t = (bf16[4,1,8,64]{3,2,1,0}) parameter(0)
  %cache = bf16[4,1,8,64]{3,2,1,0} get-tuple-element(%t), index=0
  %start = bf16[2,32]{1,0} fusion(%x), kind=kCustom, calls=%part.1
  %done = bf16[2,32]{1,0} fusion(%start), kind=kCustom, calls=%part.2
  %sum = bf16[2,4]{1,0} all-reduce(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%add
  %turned = bf16[64,4,8]{0,2,1} transpose(%cache), dimensions={3,0,2}
  %float = f32[4,8,64]{2,1,0} fusion(%cache), kind=kLoop, calls=%widened
  %fetched = (bf16[4,1,8,64]{3,2,1,0:S(1)}, bf16[4,1,8,64]{3,2,1,0}, u32[]) copy-start(%cache)
  %there = bf16[4,1,8,64]{3,2,1,0:S(1)} copy-done(%fetched)
  %entry = bf16[4,1,1,64]{3,2,1,0} slice(%cache), slice={[0:4], [0:1], [0:1], [0:64]}
  %written = bf16[4,1,8,64]{3,2,1,0} fusion(%cache, %entry), kind=kLoop, calls=%in_place
  ROOT %out = (bf16[4,1,8,64]{3,2,1,0}) tuple(%written)
}

ENTRY %main (p: bf16[4,1,8,64], q: pred[]) -> bf16[4,1,8,64] {
  %p = bf16[4,1,8,64]{3,2,1,0} parameter(0)
  %q = pred[] parameter(1)
  %nothing = bf16[] constant(0)
  %empty = bf16[4,1,8,64]{3,2,1,0} broadcast(%nothing), dimensions={}
  %begun = (bf16[4,1,8,64]{3,2,1,0}, bf16[4,1,8,64]{3,2,1,0}, u32[]) copy-start(%p)
  %done = bf16[4,1,8,64]{3,2,1,0} copy-done(%begun)
  %either = bf16[4,1,8,64]{3,2,1,0} conditional(%q, %done, %empty), branch_computations={%left, %right}
  %init = (bf16[4,1,8,64]{3,2,1,0}) tuple(%either)
  %loop = (bf16[4,1,8,64]{3,2,1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %part = f32[5]{0} all-gather(%a), replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0', 'axis_1':(2)4}, dimensions={0}
  %sent = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}
  %wide = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups={{0,1}}
  %both = (f32[6]{0}, f32[7]{0}) all-reduce-start(%a, %b), replica_groups=[2,4]<=[8]
  %pair = (f32[6]{0}, s32[6]{0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %result = bf16[4,1,8,64]{3,2,1,0} get-tuple-element(%loop), index=0
}
"""  # noqa: E501


def test_exchanges_are_found_in_the_spellings_of_the_tpu_compiler() -> None:
    """One exchange over several fusions, tuples, groups."""
    assert sorted(exchanges(CARRYING, 8), key=lambda one: (one.kind, one.count)) == [
        Exchange("all-gather", ((5,),), 5 * 4, 16, 1), Exchange("all-gather", ((8,),), 32, 2, 1),
        Exchange("all-gather", ((2, 32),), 2 * 32 * 2, 2, 7),
        Exchange("all-reduce", ((6,), (7,)), 52, 4, 1),
        Exchange("all-reduce", ((6,), (6,)), 48, 4, 1),
        Exchange("all-reduce", ((2, 4),), 2 * 4 * 2, 4, 7),
        Exchange("all-to-all", ((3,),), 12, 2, 1),
        Exchange("collective-permute", ((4,),), 16, 2, 1),
    ]  # fmt: skip


def test_copies_are_found_with_where_and_how_often_they_run() -> None:
    found = sorted(copies(CARRYING, [(1, 4, 8, 64)]), key=operator.attrgetter("name"))
    fields = operator.attrgetter("name", "operation", "num_bytes", "count", "in_loop", "in_branch")
    size = 4 * 8 * 64 * 2  # in bfloat16
    assert [fields(one) for one in found] == [
        ("begun", "copy-start", size, 1, False, False),
        ("float", "fusion", 2 * size, 7, True, False), ("moved", "copy", size, 1, False, True),
        ("turned", "transpose", size, 7, True, False),
    ]  # fmt: skip
    assert [one.name for one in found if one.is_repeated] == ["float", "moved", "turned"]
    assert copies(CARRYING, [(4, 8, 63)]) == []


@pytest.mark.parametrize("returned", [False, True])
def test_a_branch_copies_a_cache_that_it_returns_and_none_that_it_reads(returned: bool) -> None:
    shape = (6, 512, 16)

    def program(cache: jax.Array, times: jax.Array) -> jax.Array:
        def one_round(at: jax.Array, cache: jax.Array) -> jax.Array:
            def new(scale: float) -> jax.Array:
                return scale * jnp.sum(cache, axis=1, keepdims=True) + at

            def write(new: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice(cache, new, (0, at, 0))

            wide = jnp.sum(cache[0, 0]) > 0
            if returned:  # and read once more, so that no compiler writes it in place
                later = jax.lax.cond(wide, lambda: write(new(2.0)), lambda: write(new(0.5)))
                return later.at[0, 0].add(jnp.sum(cache[-1] * at))
            return write(jax.lax.cond(wide, lambda: new(2.0), lambda: new(0.5)))

        return jax.lax.fori_loop(0, times, one_round, cache)

    hlo = compiled(program, jnp.zeros(shape), jnp.int32(1), donate_argnums=0)
    assert any(one.is_repeated for one in copies(hlo, [shape])) == returned
