"""How often a loop runs: from its counter's start, limit and step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fly_jax.planning.hlo import frames, parse

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


def trips(hlo: str, **options: int) -> list[int]:
    return [frame.count for frame in frames(parse(hlo), **options) if frame.in_loop]


def loop(condition: str = PLAIN, start: str = "constant(0)", step: int = 1) -> str:
    filled = LOOP.replace("CONDITION", condition).replace("START", start)
    return filled.replace("STEP", str(step))


@pytest.mark.parametrize(
    ("condition", "start", "step", "expected"),
    [
        (PLAIN, "constant(0)", 1, 25),
        (PLAIN, "constant(1)", 1, 24),
        (PLAIN, "constant(0)", 2, 13),
        (PLAIN.replace("LT", "LE"), "constant(1)", 1, 25),
        (PLAIN.replace("LT", "NE"), "constant(5)", 1, 20),
        (PLAIN.replace("%i, %limit", "%limit, %i").replace("LT", "GT"), "constant(1)", 1, 24),
        (PLAIN.replace("LT", "GT"), "constant(30)", -1, 5),
        # The compiler moves the counter: it starts at 0 and is compared after a step.
        (PLAIN.replace("%i,", "%shifted,"), "constant(0)", 1, 24),
        # The limit is carried along, or the comparison is fused.
        (PLAIN.replace("%limit", "%n"), "constant(1)", 1, 7),
        (
            "  ROOT %f = pred[] fusion(%i, %limit), kind=kLoop, calls=%fused",
            "constant(1)",
            1,
            24,
        ),
        # Data may end it sooner, or start it later: these are bounds.
        (
            PLAIN.replace("ROOT ", "") + "\n  ROOT %both = pred[] and(%lt, %going)",
            "constant(1)",
            1,
            24,
        ),
        (PLAIN, "copy(%p)", 1, 25),
        (PLAIN, "constant(30)", 1, 0),
    ],
)
def test_trips_are_limit_minus_start(condition: str, start: str, step: int, expected: int) -> None:
    assert trips(loop(condition, start, step)) == ([expected] if expected else [])


def test_a_loop_that_only_data_ends_runs_as_often_as_is_said() -> None:
    hlo = loop("  ROOT %going.1 = pred[]{:T(512)} get-tuple-element(%s), index=2")
    assert trips(hlo) == [1]
    assert trips(hlo, unknown_trips=14) == [14]


def test_what_the_compiler_knows_goes_first() -> None:
    known = loop().replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    )
    assert trips(known) == [3]


def test_a_compiled_program_counts_its_nested_loops() -> None:
    """A draft of K tokens: one before a loop from 1 to K, layers inside, and a branch."""

    @jax.jit
    def program(x: jax.Array, wide: jax.Array) -> jax.Array:
        def one_pass(_: jax.Array, x: jax.Array) -> jax.Array:
            x = jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, None, length=7)[0]
            return jax.lax.cond(wide, lambda x: jnp.cos(x @ x), lambda x: jnp.tan(x @ x), x)

        return jax.lax.fori_loop(1, 9, one_pass, one_pass(jnp.int32(0), x))

    hlo = program.lower(jnp.ones((16, 16)), jnp.bool(True)).compile().as_text()
    assert hlo is not None
    found = [(frame.count, frame.in_branch) for frame in frames(parse(hlo)) if frame.in_loop]
    assert sorted(set(found)) == [(7, False), (8, False), (8, True), (56, False)]
