"""Llama in Flax NNX: layers stacked on a leading axis and run by one scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fly_jax.models.cache import CACHE_AXES, KVCache, write
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


class Llama(nnx.Module):
    """A Llama 2 or 3 decoder.

    Attributes:
      config: its shape.
      layout: how its arrays lie on a mesh; None on one device.
      parameters named in `parameter_specs`, those of the layers stacked on axis 0.
    """

    def __init__(
        self, config: LlamaConfig, parameters: dict[str, Array], layout: Layout | None = None
    ) -> None:
        """Takes parameters as arrays (or abstract shapes), named as in `parameter_specs`."""
        self.config = config
        self.layout = layout
        for name in parameter_specs(config):
            setattr(self, name, nnx.Param(parameters[name]))

    @classmethod
    def random(
        cls, config: LlamaConfig, key: Array, dtype: jnp.dtype = jnp.float32
    ) -> Llama:
        """Normal weights scaled by the square root of the fan-in; norms are ones."""
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
        return cls(config, parameters)

    def hidden(
        self, tokens: Int[Array, "batch time"], cache: KVCache
    ) -> tuple[Float[Array, "batch time embed"], KVCache]:
        """Feeds tokens at each row's length: final hidden states, and the cache with their keys.

        The returned cache keeps the old lengths: how many of the fed tokens become valid is the
        caller's decision (`KVCache.with_length`).
        """
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = cache.length[:, None] + steps
        visible = jnp.arange(cache.capacity, dtype=jnp.int32) <= positions[:, :, None]
        turn = rotation(self.config, positions)

        def layer(
            carry: tuple[Array, Array, Array], inputs: tuple[Array, dict[str, Array]]
        ) -> tuple[tuple[Array, Array, Array], None]:
            x, keys, values = carry
            index, weights = inputs

            def attend(query: Array, key: Array, value: Array) -> Array:
                nonlocal keys, values
                keys = write(keys, index, key, cache.length)
                values = write(values, index, value, cache.length)
                layer_keys = jax.lax.dynamic_index_in_dim(keys, index, keepdims=False)
                layer_values = jax.lax.dynamic_index_in_dim(values, index, keepdims=False)
                return _attention(query, layer_keys, layer_values, visible, _matmul)

            x = self._constrain(_layer(self.config, x, weights, turn, attend, _matmul))
            return (x, keys, values), None

        x = self._constrain(self.embedding[...][tokens])
        (x, keys, values), _ = jax.lax.scan(
            layer,
            (x, cache.keys, cache.values),
            (jnp.arange(self.config.num_layers, dtype=jnp.int32), self._layer_weights()),
        )
        x = _rms_norm(x, self.final_norm[...], self.config.norm_epsilon)
        keys, values = (self._constrain(entries, CACHE_AXES) for entries in (keys, values))
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
            return _attention(query, key, value, visible, _matmul)

        def layer(x: Array, weights: dict[str, Array]) -> tuple[Array, None]:
            return _layer(self.config, x, weights, turn, attend, product), None

        x, _ = jax.lax.scan(layer, self.embedding[...][tokens], self._layer_weights())
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

    def parameters(self) -> dict[str, Array]:
        """The parameters by name, as plain arrays: what checkpoints hold and `jit` takes fast."""
        return {name: getattr(self, name)[...] for name in parameter_specs(self.config)}

    def _constrain(
        self, x: Array, axes: tuple[str | None, ...] = ("rows", None, "embed")
    ) -> Array:
        return x if self.layout is None else self.layout.constrain(x, axes)

    def _layer_weights(self) -> dict[str, Array]:
        return {name: getattr(self, name)[...] for name in LAYER_PARAMETERS}


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


def _attention(
    query: Float[Array, "batch time kv_heads group head"],
    key: Float[Array, "batch kv_heads length head"],
    value: Float[Array, "batch kv_heads length head"],
    visible: Bool[Array, "batch time length"],
    matmul: Matmul,
) -> Float[Array, "batch time kv_heads group head"]:
    """Grouped-query attention with the softmax in float32.

    The queries of a group are stacked as rows, so that both products are plain batched ones.
    """
    batch, time, kv_heads, group, head = query.shape
    stacked = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * time, head)
    scores = matmul("bkqh,bksh->bkqs", stacked * head**-0.5, key).astype(jnp.float32)
    scores = scores.reshape(batch, kv_heads, group, time, key.shape[2])
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights.reshape(batch, kv_heads, group * time, key.shape[2])
    mixed = matmul("bkqs,bksh->bkqh", weights, value)
    return mixed.reshape(batch, kv_heads, group, time, head).transpose(0, 3, 1, 2, 4)


def _rms_norm(
    x: Float[Array, "*batch embed"], scale: Float[Array, " embed"], epsilon: float
) -> Float[Array, "*batch embed"]:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def _matmul(equation: str, x: Array, weights: Array) -> Array:
    return jnp.einsum(equation, x, weights.astype(x.dtype))
