"""One dispatch: so many rounds, one after the other, before their tokens leave the device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.round import decode_round
from fly_jax.decoding.spec import RoundStructure
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs
from fly_jax.models.llama import Llama


def decode_rounds(
    structure: RoundStructure,
    target: Llama,
    drafter: Drafter | None,
    state: DecodeState,
    inputs: RuleInputs,
) -> tuple[DecodeState, RoundOutput]:
    """Runs up to `rounds_per_dispatch` rounds, none once every row is finished.

    With `RuleInputs.seated` it ends with the first row that is done: another is to have its place.

    A single round runs without a loop around it. Within one, the TPU compiler gives matrices that
    are split finely another order in memory than they arrive in, and copies them whole: a 405B
    target would not fit (docs/planner.md). The price is the round that the host has dispatched
    ahead when the last row finishes: it runs, and changes nothing.
    """
    # Jitted to be traced once, for its shapes and for the loop.
    one_round = jax.jit(
        functools.partial(decode_round, structure, target, drafter, inputs=inputs), inline=True
    )
    if structure.rounds_per_dispatch == 1:
        return one_round(state)
    shapes = jax.eval_shape(one_round, state)[1]
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((structure.rounds_per_dispatch, *leaf.shape[1:]), leaf.dtype), shapes
    )

    def run(
        carry: tuple[Array, DecodeState, RoundOutput],
    ) -> tuple[Array, DecodeState, RoundOutput]:
        index, state, outputs = carry
        state, output = one_round(state)
        outputs = jax.tree.map(
            lambda rounds, one: jax.lax.dynamic_update_slice_in_dim(rounds, one, index, 0),
            outputs,
            output,
        )
        return index + 1, state, outputs

    def unfinished(carry: tuple[Array, DecodeState, RoundOutput]) -> Bool[Array, ""]:
        index, state, _ = carry
        goes_on = (index < structure.rounds_per_dispatch) & ~jnp.all(state.finished)
        if inputs.seated is not None:
            goes_on &= jnp.all(state.finished == ~inputs.seated)
        return goes_on

    _, state, outputs = jax.lax.while_loop(unfinished, run, (jnp.int32(0), state, empty))
    return state, outputs
