"""One optimiser step: the loss, its gradient in bfloat16 products, and Muon with AdamW."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fly_jax.models.llama import Llama
from fly_jax.training.pair import Recipe


class TrainingState(NamedTuple):
    """What a checkpoint holds: parameters by name, the optimiser's state, steps done."""

    parameters: dict[str, Array]
    optimizer: optax.OptState
    step: Int[Array, ""]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bfloat16_matmul(equation: str, x: Array, weights: Array) -> Array:
    """A product with bfloat16 operands, summed in float32, in both directions.

    On CPUs with AVX-512 bfloat16 this doubles the rate of the large products; everything between
    them stays in float32, which the same CPUs do faster than bfloat16.
    """
    return _narrow_einsum(equation, x, weights)


def _narrow_einsum(equation: str, left: Array, right: Array) -> Array:
    narrow = jnp.bfloat16
    return jnp.einsum(
        equation, left.astype(narrow), right.astype(narrow), preferred_element_type=jnp.float32
    )


def _forward(equation: str, x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    narrow = x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16)
    return _narrow_einsum(equation, *narrow), narrow


def _backward(equation: str, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    x, weights = saved
    return (
        _narrow_einsum(f"{output},{right}->{left}", gradient, weights),
        _narrow_einsum(f"{left},{output}->{right}", x, gradient),
    )


bfloat16_matmul.defvjp(_forward, _backward)


def weighted_loss(
    model: Llama,
    tokens: Int[Array, "batch length+1"],
    weights: Float[Array, "batch length"],
    segments: Int[Array, "batch length+1"],
    positions: Int[Array, "batch length+1"],
    likely: Int[Array, "batch length few"] | None = None,
    shares: Float[Array, "batch length few"] | None = None,
) -> Float[Array, ""]:
    """Cross entropy of each next token, or of what a teacher expects, in nats, averaged by weight.

    A token sees only the tokens of its own segment.
    """
    length = weights.shape[1]
    segment = segments[:, :-1]
    visible = (segment[:, :, None] == segment[:, None, :]) & jnp.tril(
        jnp.ones((length, length), bool)
    )
    hidden = model.hidden_uncached(tokens[:, :-1], positions[:, :-1], visible, bfloat16_matmul)
    logits = model.logits(hidden, bfloat16_matmul)
    if likely is None or shares is None:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    else:
        log_mass = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        expected = jnp.take_along_axis(logits, likely, axis=-1) - log_mass
        losses = -jnp.sum(shares * expected, axis=-1)
    return jnp.sum(losses * weights) / jnp.sum(weights)


_DIMENSIONS = optax.contrib.MuonDimensionNumbers
_MATRICES = {
    "query": _DIMENSIONS((1,), (2, 3)),
    "key": _DIMENSIONS((1,), (2, 3)),
    "value": _DIMENSIONS((1,), (2, 3)),
    "output": _DIMENSIONS((1, 2), (3,)),
    "gate": _DIMENSIONS((1,), (2,)),
    "up": _DIMENSIONS((1,), (2,)),
    "down": _DIMENSIONS((1,), (2,)),
}


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for the rest.

    Muon's updates are scaled to the usual size of Adam's (Liu et al. 2025, 2502.16982), so that
    both share one learning rate: a linear rise, a plateau, a linear fall to 0.
    """
    decay = int(recipe.num_steps * recipe.decay_share)
    schedule = optax.join_schedules(
        (
            optax.linear_schedule(0.0, recipe.learning_rate, recipe.warmup_steps),
            optax.constant_schedule(recipe.learning_rate),
            optax.linear_schedule(recipe.learning_rate, 0.0, decay),
        ),
        (recipe.warmup_steps, recipe.num_steps - decay),
    )
    muon = optax.contrib.muon(
        schedule,
        weight_decay=0.1,
        consistent_rms=0.2,
        adam_b2=0.98,
        muon_weight_dimension_numbers=lambda parameters: {
            name: _MATRICES.get(name) for name in parameters
        },
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


@functools.partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def train_step(
    recipe: Recipe,
    state: TrainingState,
    tokens: Int[Array, "batch length+1"],
    weights: Float[Array, "batch length"],
    segments: Int[Array, "batch length+1"],
    positions: Int[Array, "batch length+1"],
    likely: Int[Array, "batch length few"] | None = None,
    shares: Float[Array, "batch length few"] | None = None,
) -> tuple[TrainingState, Float[Array, ""]]:
    """One step on one batch: the new state, and the loss before it."""

    def loss(parameters: dict[str, Array]) -> Float[Array, ""]:
        model = Llama(recipe.config, parameters)
        return weighted_loss(model, tokens, weights, segments, positions, likely, shares)

    value, gradients = jax.value_and_grad(loss)(state.parameters)
    updates, optimizer = make_optimizer(recipe).update(gradients, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    return TrainingState(parameters, optimizer, state.step + 1), value


def initial_state(recipe: Recipe, known: dict[str, Array] | None = None) -> TrainingState:
    """Random parameters in float32, but for those that are known, and an empty optimiser state."""
    model = Llama.random(recipe.config, jax.random.key(recipe.seed))
    parameters = model.parameters() | (known or {})
    return TrainingState(parameters, make_optimizer(recipe).init(parameters), jnp.int32(0))
