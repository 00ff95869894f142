"""Llama in Flax NNX: layers stacked on a leading axis and run by one scan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from fly_jax.models.attention import attend_cached, attention
from fly_jax.models.cache import KVCache
from fly_jax.models.config import LlamaConfig
from fly_jax.models.rope import rotate, rotation
from fly_jax.sharding.rules import Layout


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """Shape of one parameter and the logical name of each of its axes."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]


def parameter_specs(config: LlamaConfig) -> dict[str, ParameterSpec]:
    """Every parameter of a Llama, by its attribute name. Matrices are stored [in, out]."""
    layers, embed, ffw = config.num_layers, config.embed_size, config.ffw_size
    heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_size
    specs = {
        "embedding": ParameterSpec((config.vocab_size, embed), ("vocab", "embed")),
        "attention_norm": ParameterSpec((layers, embed), ("layers", "embed")),
        "query": ParameterSpec(
            (layers, embed, heads, head), ("layers", "embed", "q_heads", "head")
        ),
        "key": ParameterSpec(
            (layers, embed, kv_heads, head), ("layers", "embed", "kv_heads", "head")
        ),
        "value": ParameterSpec(
            (layers, embed, kv_heads, head), ("layers", "embed", "kv_heads", "head")
        ),
        "output": ParameterSpec(
            (layers, heads, head, embed), ("layers", "q_heads", "head", "embed")
        ),
        "mlp_norm": ParameterSpec((layers, embed), ("layers", "embed")),
        "gate": ParameterSpec((layers, embed, ffw), ("layers", "embed", "ffw")),
        "up": ParameterSpec((layers, embed, ffw), ("layers", "embed", "ffw")),
        "down": ParameterSpec((layers, ffw, embed), ("layers", "ffw", "embed")),
        "final_norm": ParameterSpec((embed,), ("embed",)),
    }
    if not config.tied_embeddings:
        specs["unembedding"] = ParameterSpec((embed, config.vocab_size), ("embed", "vocab"))
    return specs


LAYER_PARAMETERS = (
    "attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down",
)  # fmt: skip

Attend = Callable[..., Float[Array, "batch time kv_heads group head"]]
Matmul = Callable[[str, Array, Array], Array]
# Arrays by name; those of the layers stacked, or tuples of one array per layer.
Parameters = dict[str, Any]
Carry = TypeVar("Carry")


class Llama(nnx.Module):
    """A Llama 2 or 3 decoder.

    Attributes:
      config: its shape.
      layout: how its arrays lie on a mesh; None on one device.
      embedding, final_norm, unembedding: the parameters outside the layers.
      layers: those of the layers by name, each stacked on axis 0 and run by a scan, or, after
        `unstacked`, one array per layer.
    """

    embedding: nnx.Param
    final_norm: nnx.Param
    unembedding: nnx.Param
    layers: nnx.Dict

    def __init__(
        self, config: LlamaConfig, parameters: Parameters, layout: Layout | None = None
    ) -> None:
        """Takes parameters as arrays (or abstract shapes), named as in `parameter_specs`."""
        self.config = config
        self.layout = layout
        for name in parameter_specs(config).keys() - set(LAYER_PARAMETERS):
            setattr(self, name, nnx.Param(parameters[name]))
        self.layers = nnx.Dict({name: nnx.Param(parameters[name]) for name in LAYER_PARAMETERS})

    @classmethod
    def random(cls, config: LlamaConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Llama:
        """Normal weights scaled by the square root of the fan-in; norms are ones."""
        return cls(config, _random_parameters(config, key, jnp.dtype(dtype)))

    def hidden(
        self, tokens: Int[Array, "batch time"], cache: KVCache
    ) -> tuple[Float[Array, "batch time embed"], KVCache]:
        """Feeds tokens at each row's length: final hidden states, and the cache with their keys.

        The returned cache keeps the old lengths: how many of the fed tokens become valid is the
        caller's decision (`KVCache.with_length`).
        """
        # Said for every input: otherwise the compiler carries the rows of another model's cache
        # over to this one, and gathers whole caches to undo it.
        tokens = self._constrain(tokens, ("rows", None))
        start = self._constrain(cache.length, ("rows",))
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = start[:, None] + steps
        turn = rotation(self.config, positions)

        def layer(
            carry: tuple[Array, Array, Array], index: Int[Array, ""], weights: dict[str, Array]
        ) -> tuple[Array, Array, Array]:
            x, keys, values = carry

            def attend(query: Array, key: Array, value: Array) -> Array:
                nonlocal keys, values
                mixed, keys, values = attend_cached(
                    query, key, value, keys, values, index, start, self.layout
                )
                return mixed

            x = self._constrain(_layer(self.config, x, weights, turn, attend, _matmul))
            return x, keys, values

        x = self._constrain(self.embedding[...][tokens])
        x, keys, values = self._run_layers(layer, (x, cache.keys, cache.values))
        x = _rms_norm(x, self.final_norm[...], self.config.norm_epsilon)
        return x, KVCache(keys, values, cache.length)

    def hidden_uncached(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        visible: Bool[Array, "batch time time"],
        matmul: Matmul | None = None,
    ) -> Float[Array, "batch time embed"]:
        """Final hidden states of whole sequences, without a cache: training and golden logits.

        Args:
          tokens: token ids.
          positions: rotary position of each token.
          visible: query t may look at key s.
          matmul: replaces the product of activations and weights (training runs it in bfloat16).
        """
        turn = rotation(self.config, positions)
        product = matmul or _matmul

        def attend(query: Array, key: Array, value: Array) -> Array:
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
            return attention(query, key, value, visible)

        def layer(x: Array, _: Int[Array, ""], weights: dict[str, Array]) -> Array:
            return _layer(self.config, x, weights, turn, attend, product)

        x = self._run_layers(layer, self.embedding[...][tokens])
        return _rms_norm(x, self.final_norm[...], self.config.norm_epsilon)

    def logits(
        self, hidden: Float[Array, "batch time embed"], matmul: Matmul | None = None
    ) -> Float[Array, "batch time vocab"]:
        """Scores of every token of the vocabulary, in float32."""
        product = matmul or _matmul
        if self.config.tied_embeddings:
            scores = product("btd,vd->btv", hidden, self.embedding[...])
        else:
            scores = product("btd,dv->btv", hidden, self.unembedding[...])
        return self._constrain(scores.astype(jnp.float32), ("rows", None, "vocab"))

    def parameters(self) -> Parameters:
        """The parameters by name, as plain arrays: what checkpoints hold and `jit` takes fast."""
        outer = parameter_specs(self.config).keys() - set(LAYER_PARAMETERS)
        return {name: getattr(self, name)[...] for name in outer} | self._layer_weights()

    def unstacked(self) -> Llama:
        """The same model with one array per layer, run one after the other without a scan.

        On a CPU a scan copies each layer's matrices out of the stack before every product; a few
        layers compile fast enough without it (docs/performance.md has the figures).
        """
        layers = {name: tuple(stack) for name, stack in self._layer_weights().items()}
        return Llama(self.config, self.parameters() | layers, self.layout)

    def _run_layers(
        self, layer: Callable[[Carry, Int[Array, ""], dict[str, Array]], Carry], carry: Carry
    ) -> Carry:
        weights = self._layer_weights()
        if isinstance(weights["query"], tuple):
            for index in range(self.config.num_layers):
                own = {name: arrays[index] for name, arrays in weights.items()}
                carry = layer(carry, jnp.int32(index), own)
            return carry
        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        return jax.lax.scan(
            lambda carry, inputs: (layer(carry, *inputs), None), carry, (indices, weights)
        )[0]

    def _constrain(self, x: Array, axes: tuple[str | None, ...] = ("rows", None, "embed")) -> Array:
        return x if self.layout is None else self.layout.constrain(x, axes)

    def _layer_weights(self) -> Parameters:
        return {name: self.layers[name].get_value() for name in LAYER_PARAMETERS}


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _random_parameters(config: LlamaConfig, key: Array, dtype: jnp.dtype) -> dict[str, Array]:
    parameters = {}
    for index, (name, spec) in enumerate(parameter_specs(config).items()):
        if name.endswith("norm"):
            parameters[name] = jnp.ones(spec.shape, dtype)
            continue
        inputs = spec.shape[1] if len(spec.shape) > 2 else spec.shape[0]
        if name == "output":
            inputs = spec.shape[1] * spec.shape[2]
        if name == "embedding":
            inputs = config.embed_size
        noise = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32)
        parameters[name] = (noise * inputs**-0.5).astype(dtype)
    return parameters


def _layer(
    config: LlamaConfig,
    x: Float[Array, "batch time embed"],
    weights: dict[str, Array],
    turn: tuple[Array, Array],
    attend: Attend,
    matmul: Matmul,
) -> Float[Array, "batch time embed"]:
    normed = _rms_norm(x, weights["attention_norm"], config.norm_epsilon)
    query = rotate(matmul("btd,dhk->bthk", normed, weights["query"]), *turn)
    key = rotate(matmul("btd,dhk->bthk", normed, weights["key"]), *turn)
    value = matmul("btd,dhk->bthk", normed, weights["value"])
    batch, time = x.shape[:2]
    grouped = query.reshape(
        batch, time, config.num_kv_heads, config.queries_per_kv_head, config.head_size
    )
    mixed = attend(grouped, key, value).reshape(query.shape)
    x = x + matmul("bthk,hkd->btd", mixed, weights["output"])
    normed = _rms_norm(x, weights["mlp_norm"], config.norm_epsilon)
    gated = jax.nn.silu(matmul("btd,df->btf", normed, weights["gate"]))
    gated = gated * matmul("btd,df->btf", normed, weights["up"])
    return x + matmul("btf,fd->btd", gated, weights["down"])


def _rms_norm(
    x: Float[Array, "*batch embed"], scale: Float[Array, " embed"], epsilon: float
) -> Float[Array, "*batch embed"]:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def _matmul(equation: str, x: Array, weights: Array) -> Array:
    return jnp.einsum(equation, x, weights.astype(x.dtype))
