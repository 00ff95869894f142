"""Copies of large arrays are told from what is changed where it lies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fly_jax.planning.hlo import copies

HLO = """\
HloModule jit_step

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

%cond (s: (s32[], bf16[4,1,8,64])) -> pred[] {
  %s = (s32[], bf16[4,1,8,64]{3,2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%left (d: bf16[4,1,8,64]) -> bf16[4,1,8,64] {
  %d = bf16[4,1,8,64]{3,2,1,0} parameter(0)
  ROOT %moved = bf16[4,1,8,64]{3,1,2,0} copy(%d)
}

%right (e: bf16[4,1,8,64]) -> bf16[4,1,8,64] {
  ROOT %e = bf16[4,1,8,64]{3,2,1,0} parameter(0)
}

%body (t: (s32[], bf16[4,1,8,64])) -> (s32[], bf16[4,1,8,64]) {
  %t = (s32[], bf16[4,1,8,64]{3,2,1,0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %cache = bf16[4,1,8,64]{3,2,1,0} get-tuple-element(%t), index=1
  %turned = bf16[64,4,8]{0,2,1} transpose(%cache), dimensions={3,0,2}
  %float = f32[4,8,64]{2,1,0} fusion(%cache), kind=kLoop, calls=%widened
  %fetched = (bf16[4,1,8,64]{3,2,1,0:S(1)}, bf16[4,1,8,64]{3,2,1,0}, u32[]) copy-start(%cache)
  %there = bf16[4,1,8,64]{3,2,1,0:S(1)} copy-done(%fetched)
  %entry = bf16[4,1,1,64]{3,2,1,0} slice(%cache), slice={[0:4], [0:1], [0:1], [0:64]}
  %written = bf16[4,1,8,64]{3,2,1,0} fusion(%cache, %entry), kind=kLoop, calls=%in_place
  ROOT %out = (s32[], bf16[4,1,8,64]{3,2,1,0}) tuple(%next, %written)
}

ENTRY %main (p: bf16[4,1,8,64], q: pred[]) -> bf16[4,1,8,64] {
  %p = bf16[4,1,8,64]{3,2,1,0} parameter(0)
  %q = pred[] parameter(1)
  %zero = s32[] constant(0)
  %nothing = bf16[] constant(0)
  %empty = bf16[4,1,8,64]{3,2,1,0} broadcast(%nothing), dimensions={}
  %begun = (bf16[4,1,8,64]{3,2,1,0}, bf16[4,1,8,64]{3,2,1,0}, u32[]) copy-start(%p)
  %done = bf16[4,1,8,64]{3,2,1,0} copy-done(%begun)
  %either = bf16[4,1,8,64]{3,2,1,0} conditional(%q, %done, %empty), branch_computations={%left, %right}
  %init = (s32[], bf16[4,1,8,64]{3,2,1,0}) tuple(%zero, %either)
  %loop = (s32[], bf16[4,1,8,64]{3,2,1,0}) while(%init), condition=%cond, body=%body
  ROOT %result = bf16[4,1,8,64]{3,2,1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_copies_are_found_with_where_and_how_often_they_run() -> None:
    found = copies(HLO, [(1, 4, 8, 64)])
    assert sorted((one.name, one.count, one.in_loop, one.in_branch) for one in found) == [
        ("begun", 1, False, False),
        ("float", 7, True, False),
        ("moved", 1, False, True),
        ("turned", 7, True, False),
    ]
    sizes = {one.name: (one.operation, one.num_bytes) for one in found}
    assert sizes["turned"] == ("transpose", 4 * 8 * 64 * 2)
    assert sizes["float"] == ("fusion", 4 * 8 * 64 * 4)
    assert {one.name for one in found if one.is_repeated} == {"float", "moved", "turned"}
    assert copies(HLO, [(4, 8, 63)]) == []


@pytest.mark.parametrize("returned", [False, True])
def test_a_branch_that_returns_a_cache_copies_it_and_one_that_reads_it_does_not(
    returned: bool,
) -> None:
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

    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    hlo = jax.jit(program, donate_argnums=0).lower(*arguments).compile().as_text()
    assert hlo is not None
    assert any(one.is_repeated for one in copies(hlo, [shape])) == returned
