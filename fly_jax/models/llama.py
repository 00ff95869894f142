"""Llama, and its kin, in Flax NNX: layers stacked on a leading axis and run by one scan."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as InMemory
from jax.sharding import AbstractMesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from fly_jax.models.architectures import INT8, LlamaConfig, ParameterSpec, parameter_specs, scale_of
from fly_jax.models.attention import (
    Ahead,
    Part,
    Windows,
    attend_alone,
    attend_cached,
    attention,
    each_alone,
    rotate,
    rotation,
)
from fly_jax.models.cache import KVCache, NewEntries
from fly_jax.models.integers import (
    behind,
    multiplies_unsigned,
    of_integers,
    rows_by_tiles,
    signed,
    unsigned,
)
from fly_jax.shapes import Hidden, Index, Inputs, Logits, Tokens
from fly_jax.sharding.rules import Layout

# An equation of `einsum`, activations [batch, time, *in], and a matrix.
Matmul = Callable[[str, Array, Array], Array]

# Up to so many tokens, a CPU is faster with the matrix in front of them, unless its caches hold
# most of the layers: those of so many bytes.
_FEW_TOKENS = 128
_CACHED_BYTES = 2**26
_STEPS = (1, 4, 8)  # in which their number grows
# Beyond this many layers the compile time of separate layers outweighs what they save on a CPU.
_MOST_UNSTACKED_LAYERS = 32
_LANES = 128  # of a TPU's memory: smaller heads would be padded to them
# Weights of so many bytes make a model large: its programs compile long and its rounds take long.
LARGE_BYTES = 2**30


def matmul(
    equation: str, x: Array, matrix: Array, dtype: DTypeLike | None = None, *,
    is_alone: bool = False, rounds: bool = False,
) -> Array:  # fmt: skip
    """Multiplies activations by a matrix; the result has `dtype`, or the activations' type.

    A TPU multiplies its token twice where that `is_alone`: a single vector goes to the vector unit,
    by the compiler's estimate for two to four times as long. With `rounds` TPUs multiply integers.
    """

    def widened(x: Array, matrix: Array) -> Array:
        return jnp.einsum(equation, x, matrix.astype(x.dtype), preferred_element_type=dtype)

    def on_tpu(x: Array, matrix: Array) -> Array:
        given = jnp.concatenate([x, x], axis=1) if is_alone else x
        found = widened(given, matrix) if not rounds else behind(equation, given, matrix, dtype)
        return found[:, :1] if is_alone else found

    if not (is_alone or rounds):
        return widened(x, matrix)
    return cast(Array, jax.lax.platform_dependent(x, matrix, tpu=on_tpu, default=widened))


def turns_layers(config: LlamaConfig, dtype: DTypeLike, *, has_integers: bool) -> bool:
    """Tells whether the layers' matrices of an unstacked model lie [*out, *in].

    Those of integers do, and those that are read from memory (`in_front`). Small ones are packed in
    the cache that holds them, where products of uneven numbers of tokens are faster behind them.
    """
    specs = parameter_specs(config).values()
    numbers = sum(math.prod(spec.shape) for spec in specs if spec.axes[0] == "layers")
    return has_integers or numbers * jnp.dtype(dtype).itemsize > _CACHED_BYTES


def is_grouped(matrix: Any, scale: Any) -> bool:
    """Tells whether groups of a matrix's inputs have scales of their own, not its outputs alone."""
    # Of an unstacked model each is a tuple of one array per layer.
    one, other = (found[0] if isinstance(found, tuple) else found for found in (matrix, scale))
    return other is not None and other.ndim == one.ndim


def product(equation: str, x: Array, matrix: Array, scale: Array | None, multiply: Matmul) -> Array:
    """Multiplies activations by a matrix; the outputs of integers are scaled, in float32.

    Where groups of inputs have scales of their own, the matrix is scaled as it is read.
    """
    if scale is None or not is_grouped(matrix, scale):
        outputs = multiply(equation, x, matrix)
        return outputs if scale is None else (outputs * scale).astype(outputs.dtype)
    for axis, (size, groups) in enumerate(zip(matrix.shape, scale.shape, strict=True)):
        scale = jnp.repeat(scale, size // groups, axis=axis) if groups != size else scale
    return multiply(equation, x, matrix.astype(x.dtype) * scale.astype(x.dtype))


def turned_equation(equation: str) -> str:
    """The equation of a product with a matrix that lies [*out, *in], by that for [*in, *out]."""
    letters, rest = equation.split(",")
    stored, result = rest.split("->")
    turned = sorted(stored, key=lambda letter: letter in letters)  # outputs, then inputs
    return f"{letters},{''.join(turned)}->{result}"


def in_front(equation: str, x: Array, matrix: Array, dtype: DTypeLike | None = None) -> Array:
    """Multiplies by a matrix that lies [*out, *in], as XLA's CPU compiler does it fastest.

    Behind a few tokens it would pack the whole matrix before each product; in front of them it
    packs the tokens, best in fours or eights. Without the barrier it turns the product round again.
    """
    inputs, tokens = x.shape[2:], x.shape[0] * x.shape[1]
    if tokens > _FEW_TOKENS:
        return matmul(equation, x, matrix, dtype)
    step = next(one for one in _STEPS if tokens <= one or one == _STEPS[-1])
    flat = jnp.pad(x.reshape(tokens, -1), ((0, -tokens % step), (0, 0)))
    rows = matrix.astype(x.dtype).reshape(-1, flat.shape[1])
    outputs = jnp.matmul(rows, flat.T, preferred_element_type=dtype)
    outputs = jax.lax.optimization_barrier(outputs)[:, :tokens]
    return outputs.T.reshape(*x.shape[:2], *matrix.shape[: matrix.ndim - len(inputs)])


Product = Callable[[str, Array, str], Array]
# Arrays by name; those of the layers stacked, or tuples of one array per layer.
Parameters = dict[str, Any]
Read = Float[Array, "rows time read"]  # of attention: an EAGLE-3 head's is twice as wide
Added = TypeVar("Added")
# Attention of a layer, by its index, its queries, keys and values; also returns what it adds.
Attend = Callable[[Index, Array, Array, Array], tuple[Array, Added]]
Arrays = tuple[Array, ...]
Carry = tuple[Hidden, Hidden, Arrays, Index]


class Layer(NamedTuple):
    """A layer to run: how its products and norms are taken, and the angles of its positions."""

    config: LlamaConfig
    weights: Parameters
    rope: tuple[Array, Array]
    product: Product
    norm: Callable[[Array, Array], Array]

    def run(
        self, x: Hidden, normed: Read, attend: Callable[[Array, Array, Array], tuple[Array, Added]]
    ) -> tuple[Hidden, Hidden, Added]:
        """The layer's output as two summands, and what `attend` adds.

        Attention reads `normed` and adds to `x`. The next layer takes the sum, fused with its norm.
        """
        query, key, value = (self.projected(normed, name) for name in ("query", "key", "value"))
        mixed, added = attend(query, key, value)
        x = x + self.product("bthk,hkd->btd", mixed, "output")
        normed = self.norm(x, self.weights["mlp_norm"])
        gated = jax.nn.silu(self.product("btd,df->btf", normed, "gate"))
        gated = gated * self.product("btd,df->btf", normed, "up")
        return x, self.product("btf,fd->btd", gated, "down"), added

    def projected(self, normed: Read, name: str) -> Float[Array, "rows time heads head"]:
        """The queries, keys or values, by name; the first two normalised (if so) and rotated."""
        found = self.product("btd,dhk->bthk", normed, name)
        if self.config.attention_biases:
            found = found + self.weights[f"{name}_bias"]
        if name == "value":
            return found
        if self.config.head_norms:
            found = self.norm(found, self.weights[f"{name}_norm"])
        return rotate(found, *self.rope)


class Llama(nnx.Module):
    """A Llama decoder, or one of its kin in `ARCHITECTURES`.

    Attributes:
      layout: how its arrays lie on a mesh; None on one device.
      embedding, final_norm, unembedding, token_rows, fusion: the parameters outside the layers.
      layers: those of the layers by name, each stacked on axis 0 and run by a scan, or, after
        `unstacked`, one array per layer, its matrices as `turns_layers` says.

    Matrices of integers stay so on the device: a product widens them as it reads them, or, on a
    TPU and `unstacked`, rounds the activations (`of_integers`). Unstacked they may be `unsigned`.
    """

    embedding: nnx.Param
    final_norm: nnx.Param
    unembedding: nnx.Param
    token_rows: nnx.Param
    fusion: nnx.Param
    layers: nnx.Dict

    def __init__(
        self, config: LlamaConfig, parameters: Parameters, layout: Layout | None = None
    ) -> None:
        """Takes parameters as arrays (or abstract shapes), named as in `parameter_specs`."""
        self.config = config
        self.layout = layout
        layers: dict[str, nnx.Param] = {}
        for name, spec in parameter_specs(config, INT8).items():
            if name not in parameters and name.endswith("_scale"):
                continue
            if spec.axes[0] == "layers":
                layers[name] = nnx.Param(parameters[name])
            else:
                setattr(self, name, nnx.Param(parameters[name]))
        self.layers = nnx.Dict(layers)

    @classmethod
    def random(cls, config: LlamaConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Llama:
        """A model of normal weights over the root of the fan-in; norms and biases are ones."""
        return cls(config, _random_parameters(config, key, jnp.dtype(dtype)))

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the activations, and of every parameter that has no type of its own."""
        return self.final_norm.get_value().dtype

    def hidden(self, tokens: Tokens, cache: KVCache) -> tuple[Hidden, NewEntries]:
        """Feeds tokens at each row's length; returns final hidden states, and entries to write."""
        return self.hidden_and_inputs(tokens, cache)[:2]

    def hidden_and_inputs(
        self, tokens: Tokens, cache: KVCache, layers: Sequence[int] = (),
        matmul: Matmul | None = None,
    ) -> tuple[Hidden, NewEntries, Inputs]:  # fmt: skip
        """Runs as `hidden`; adds the inputs of `layers` side by side, or the hidden states."""
        # So a layer has fewer operations than if each product doubled its own, as a head's do.
        if self.config.head is None and self._is_alone(tokens) and _platform(self) == "tpu":
            twice = jnp.concatenate([tokens, tokens], axis=1)
            hidden, new, inputs = self.hidden_and_inputs(twice, cache, layers, matmul)
            first = NewEntries(*(one[..., :1, :] for one in (new.keys, new.values)))
            return hidden[:, :1], first, inputs[:, :1]
        # Else the compiler would carry over the rows of another model's cache, and gather caches.
        tokens = self._constrain(tokens, ("rows", None))
        cache = cache.with_length(self._constrain(cache.length, ("rows",)))
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return self.run_layers(tokens, positions, self._attending(cache), matmul, layers)

    def _is_alone(self, x: Array) -> bool:
        """Tells whether each device has one token of `x`, [rows, time, ...]."""
        rows, layout = x.shape[0], self.layout
        if layout is not None:
            rows //= layout.devices(layout.axes_of("rows", rows))
        return bool(rows * x.shape[1] == 1)

    def _attending(self, cache: KVCache) -> Attend[NewEntries]:
        """The attention of a layer to the cache and the pass's own tokens; returns new entries."""

        def attend(
            layer: Index, query: Array, key: Array, value: Array
        ) -> tuple[Array, NewEntries]:
            ahead = self._ahead(layer, query.shape[1])
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
            new = NewEntries(*(one.astype(cache.keys.dtype) for one in (key, value)))
            window = self._window(layer, query.shape[1])
            if self._computes_alone:
                return attend_alone(query, key, value, cache, layer, window, ahead), new
            return attend_cached(query, key, value, cache, layer, self.layout, window, ahead), new

        return attend

    def _ahead(self, layer: Index, time: int) -> Ahead:
        """The tokens behind its own that a query sees, in a pass over `time` tokens."""
        return 0

    def extend(self, tokens: Tokens, cache: KVCache) -> tuple[Hidden, KVCache]:
        """Runs as `hidden`, and writes the entries; the lengths stay, for the caller to set."""
        hidden, new = self.hidden(tokens, cache)
        return hidden, cache.written(new, self.layout)

    def uncached_and_inputs(
        self, tokens: Tokens, positions: Tokens, visible: Bool[Array, "rows time time"],
        matmul: Matmul | None = None, layers: Sequence[int] = (),
    ) -> tuple[Hidden, Inputs]:  # fmt: skip
        """Runs whole sequences as `hidden_and_inputs`, without a cache: training and golden logits.

        `visible` is [query, key]; `matmul` replaces the product of activations and weights.
        """
        kv_heads, group = self.config.num_kv_heads, self.config.queries_per_kv_head
        distance = positions[:, :, None] - positions[:, None, :]

        def attend(layer: Index, query: Array, key: Array, value: Array) -> tuple[Array, None]:
            grouped = query.reshape(*query.shape[:2], kv_heads, group, query.shape[3])
            window = self._window(layer, query.shape[1])
            seen = visible if window is None else visible & (distance < window)
            part = Part(key.swapaxes(1, 2), value.swapaxes(1, 2), seen)
            return attention(grouped, [part]).reshape(query.shape), None

        hidden, _, inputs = self.run_layers(tokens, positions, attend, matmul, layers)
        return hidden, inputs

    def logits(self, hidden: Hidden, matmul: Matmul | None = None) -> Logits:
        """Scores of every token of the vocabulary, in float32; -inf of those without a row."""
        return self._of_all_tokens(self.row_logits(hidden, matmul))

    def row_logits(
        self, hidden: Hidden, matmul: Matmul | None = None
    ) -> Float[Array, "rows time known"]:
        """Scores of the unembedding's rows, in float32."""
        # A product rounded to bfloat16 would make ties of close logits, and wrong gaps.
        product = self._products(self._outer_weights(), matmul, jnp.float32)
        name, equation = "unembedding", "btd,dv->btv"
        if self.config.tied_embeddings:
            name, equation = "embedding", "btd,vd->btv"
        return product(equation, hidden, name).astype(jnp.float32)

    def _of_all_tokens(self, scores: Float[Array, "rows time known"]) -> Logits:
        """The scores of every token, where only some have rows."""
        if self.config.draft_vocab_size is not None:
            rows = self.token_rows[...]
            scores = jnp.where(rows == self.config.unknown_row, -jnp.inf, scores[..., rows])
        return self._constrain(scores, ("rows", None, "vocab"))

    def parameters(self) -> Parameters:
        """The parameters by name, as plain arrays, which lie as the model's own (see `stacked`)."""
        return self._outer_weights() | self._layer_weights()

    @property
    def is_unstacked(self) -> bool:
        """Tells whether each layer has arrays of its own, its matrices as `turns_layers` says."""
        return isinstance(self._layer_weights()["query"], tuple)

    @property
    def is_large(self) -> bool:
        """Tells whether the weights take a gibibyte or more in float32, whatever they are in."""
        return 4 * sum(one.size for one in jax.tree.leaves(self.parameters())) >= LARGE_BYTES

    @property
    def has_integers(self) -> bool:
        """Tells whether the matrices of its layers are integers with scales."""
        return scale_of("query") in self.layers

    @property
    def _computes_alone(self) -> bool:
        """Tells whether activations are rounded to int8: another last bit, another integer."""
        if not (self.is_unstacked and self.has_integers):
            return False
        return not is_grouped(*map(self._layer_weights().get, ("query", scale_of("query"))))

    def unstacked(self) -> Llama:
        """A model with the same weights, as programs on a CPU take it best if its layers are few.

        It has one array per layer, as `layers` says; docs/performance.md has the figures.
        """
        if self.is_unstacked:
            return self
        other = Llama(self.config, self.parameters(), self.layout)
        other.unstack()
        return other

    def unstack(self, owner: Llama | None = None) -> None:
        """Makes this model `unstacked`, a stack at a time: no more than one is in memory twice.

        With an `owner`, an unstacked model, it shares its unembedding, before and afterwards.
        """
        if self.is_unstacked:
            return
        becomes_unsigned = lies_on_cpu(self) and multiplies_unsigned()
        for name, stack in self.layers.items():
            axes = self._turned_axes(name)
            stack.set_value(_one_by_one(stack.get_value(), axes, becomes_unsigned))
        for name in self._turned_outer:
            shared = owner if name == "unembedding" else None
            own = getattr(self, name).get_value().T if shared is None else shared.unembedding[...]
            getattr(self, name).set_value(own)
        for table in map(functools.partial(getattr, self), self._outer_weights()):
            if becomes_unsigned and table.get_value().dtype == jnp.int8:
                table.set_value(jax.jit(unsigned)(table.get_value()))

    def stacked(self) -> Llama:
        """A model with the same weights, which lie as in `parameter_specs`, before `unstacked`."""
        if not self.is_unstacked:
            return self
        outer = {name: signed(weights) for name, weights in self.outer_parameters().items()}
        parameters = outer | {name: self.stack(name) for name in self.layers}
        return Llama(self.config, parameters, self.layout)

    def outer_parameters(self) -> Parameters:
        """Those outside the layers, as in `parameter_specs`, but integers perhaps `unsigned`."""
        turned = self._turned_outer if self.is_unstacked else ()
        return {name: w.T if name in turned else w for name, w in self._outer_weights().items()}

    def stack(self, name: str, layers: Sequence[int] | None = None) -> Array:
        """A parameter of the layers, or of some of them, stacked as in `parameter_specs`."""
        arrays = self.layers[name].get_value()
        if not self.is_unstacked:
            return arrays if layers is None else arrays[np.array(layers)]
        axes = self._turned_axes(name)
        back = None if axes is None else np.argsort(axes).tolist()
        some = arrays if layers is None else [arrays[at] for at in layers]
        return jnp.stack([_turned(signed(one), back) for one in some])

    @property
    def _turned_outer(self) -> list[str]:
        """The matrices outside the layers that `parameter_specs` has as [in, out]."""
        outer = self._outer_weights()
        specs = parameter_specs(self.config).items()
        return [name for name, spec in specs if name in outer and spec.axes[0] in spec.inputs]

    def _turned_axes(self, name: str) -> tuple[int, ...] | None:
        """The axes of a layer's matrix, outputs first; None if it lies as in `parameter_specs`."""
        if not turns_layers(self.config, self.dtype, has_integers=self.has_integers):
            return None
        spec, weights = parameter_specs(self.config, INT8)[name], self._layer_weights()
        scales = weights.get(scale_of(name))
        if not spec.inputs or is_grouped(weights[name], scales):
            return None
        axes = spec.axes[1:]
        return tuple(sorted(range(len(axes)), key=lambda index: axes[index] in spec.inputs))

    def _products(
        self, weights: Parameters, multiply: Matmul | None = None, dtype: DTypeLike | None = None,
        layer: Index | None = None,
    ) -> Product:  # fmt: skip
        """Products with parameters, by equations for matrices that lie [*in, *out].

        With a `layer` the weights have the integer matrices of all layers.
        """
        turned = turns_layers(self.config, self.dtype, has_integers=self.has_integers)

        def of(equation: str, x: Array, name: str) -> Array:
            matrix, scale = weights[name], weights.get(scale_of(name))
            if layer is not None:
                return of_integers(x, matrix, scale, dtype, layer)
            is_turned = self.is_unstacked and (turned or name not in self.layers)
            if not is_turned or is_grouped(matrix, scale):
                spec, layout = parameter_specs(self.config)[name], self.layout
                # In float32 the last bit depends on a pass's width, and would change integers.
                rounds = scale is not None and not is_grouped(matrix, scale)
                rounds = rounds and x.dtype == jnp.bfloat16
                if layout is not None:  # what to round by would be one more exchange
                    rounds = rounds and not layout.splits_inputs(spec)
                fastest = functools.partial(matmul, is_alone=self._is_alone(x), rounds=rounds)
                chosen = multiply or functools.partial(fastest, dtype=dtype)
                return product(equation, x, signed(matrix), scale, chosen)
            if scale is not None:
                return of_integers(x, matrix, scale, dtype)
            of_floats = in_front if lies_on_cpu(self) else matmul
            chosen = multiply or functools.partial(of_floats, dtype=dtype)
            return chosen(turned_equation(equation), x, matrix)

        return of

    def _layer(
        self, weights: Parameters, rope: tuple[Array, Array], multiply: Matmul | None = None,
        index: Index | None = None,
    ) -> Layer:  # fmt: skip
        products = self._products(weights, multiply, layer=index)
        return Layer(self.config, weights, rope, products, self._norm)

    def run_layers(
        self, tokens: Tokens, positions: Tokens, attend: Attend[Added],
        multiply: Matmul | None = None, layers: Sequence[int] = (),
    ) -> tuple[Hidden, Added, Inputs]:  # fmt: skip
        """Runs the layers; returns hidden states, what `attend` adds, stacked, and the inputs.

        The inputs are those of `hidden_and_inputs`.
        """
        # Else a TPU takes cosines and sines anew in each layer.
        rope = jax.lax.optimization_barrier(rotation(self.config, positions))

        def layer(x: Array, index: Index, weights: Parameters) -> tuple[Array, Array, Added]:
            chosen = index if integers else None
            own = self._layer(weights | integers, self._layer_rope(rope, index), multiply, chosen)
            normed = self._norm(x, weights["attention_norm"])
            return own.run(x, normed, functools.partial(attend, index))

        x, weights = self._constrain(self._embedded(tokens)), self._layer_weights()
        integers: Parameters = {}
        if self._computes_alone:
            # All but the products is compiled once: attention and norms by loops are most of a
            # layer's program, and chosen matrices are not copied, as those of a stack would be.
            matrices = [name for name in weights if scale_of(name) in weights]
            both = (*matrices, *map(scale_of, matrices))
            integers = {name: weights.pop(name) for name in both}
            weights = {name: jnp.stack(arrays) for name, arrays in weights.items()}
        # Kept while the layers run: a scan's stacked output would have all layers.
        kept = (jnp.zeros_like(x),) * len(layers)
        if self.is_unstacked and not integers:
            layer = jax.jit(layer)  # so that it is traced once, not for each layer
            each: list[Any] = []
            for index in range(self.config.num_layers):
                own = {name: arrays[index] for name, arrays in weights.items()}
                kept = _kept(layers, index, x, kept)
                x, rest, one = layer(x, jnp.int32(index), own)
                x = self._constrain(x + rest)
                each.append(one)
            zero = zero_after(x)
            added = jax.tree.map(lambda *layers: jnp.stack(layers) + zero, *each)
        else:

            def step(carry: Carry, own: Parameters) -> tuple[Carry, Added]:
                x, rest, kept, index = carry  # an index that is scanned over is sliced
                x = self._constrain(x + rest)
                kept = _kept(layers, index, x, kept)
                x, rest, added = layer(x, index, own)
                return (x, rest, kept, index + 1), added

            begin = x, jnp.zeros_like(x), kept, jnp.int32(0)
            (x, rest, kept, _), added = jax.lax.scan(step, begin, weights)
            x = self._constrain(x + rest)
        hidden = self._norm(x, self.final_norm[...])
        return hidden, added, self._constrain(jnp.concatenate(kept, axis=-1)) if layers else hidden

    def _norm(
        self, x: Float[Array, "rows time *size"], scale: Float[Array, " embed"]
    ) -> Float[Array, "rows time *size"]:
        of_some = functools.partial(_rms_norm, scale=scale, epsilon=self.config.norm_epsilon)
        if not self._computes_alone:
            return of_some(x)
        return each_alone(of_some, x.reshape(-1, *x.shape[2:])).reshape(x.shape)

    def _window(self, layer: Index, time: int) -> Windows | None:
        """The newest tokens that a layer sees from each of `time`; None if all layers see all."""
        window, windowed = self.config.sliding_window, self.config.windowed_layers
        if window is None:
            return None
        everything = 2**30
        sizes = [window if one in windowed else everything for one in range(self.config.num_layers)]
        return jnp.asarray(sizes, jnp.int32)[layer]

    def _layer_rope(self, rope: tuple[Array, Array], layer: Index) -> tuple[Array, Array]:
        """The cosines and sines of a layer: those of position 0 if it has no rotary positions."""
        if not self.config.unrotated_layers:
            return rope
        unrotated = [one in self.config.unrotated_layers for one in range(self.config.num_layers)]
        still = jnp.asarray(unrotated)[layer]
        cosines, sines = rope
        return jnp.where(still, 1, cosines), jnp.where(still, 0, sines)

    def _constrain(self, x: Array, axes: tuple[str | None, ...] = ("rows", None, "embed")) -> Array:
        return x if self.layout is None else self.layout.constrain(x, axes)

    def _embedded(self, tokens: Tokens) -> Hidden:
        if self.config.draft_vocab_size is not None and self.config.head is None:
            tokens = self.token_rows[...][tokens]
        return self._rows("embedding", tokens)

    def _rows(self, table: str, tokens: Tokens) -> Float[Array, "rows time row"]:
        """The rows that tokens have in a table."""
        weights = self._outer_weights()
        matrix, scale = weights[table], weights.get(scale_of(table))
        if scale is None:
            return matrix[tokens]
        one_by_one = not self.is_unstacked and (self.layout is None or self.layout.mesh.size == 1)
        on_tpu = rows_by_tiles if one_by_one else operator.getitem
        rows = jax.lax.platform_dependent(matrix, tokens, tpu=on_tpu, default=operator.getitem)
        return (signed(rows) * scale[tokens][..., None]).astype(self.dtype)

    def _outer_weights(self) -> Parameters:
        # In their own order: the difference of two sets of names would change from run to run.
        return {
            name: getattr(self, name).get_value()
            for name, spec in parameter_specs(self.config, INT8).items()
            if spec.axes[0] != "layers" and hasattr(self, name)
        }

    def _layer_weights(self) -> Parameters:
        return {name: value.get_value() for name, value in self.layers.items()}


@functools.partial(jax.jit, static_argnames=("axes", "becomes_unsigned"))
def _one_by_one(stack: Array, axes: tuple[int, ...] | None, becomes_unsigned: bool) -> Arrays:
    becomes_unsigned &= axes is not None and stack.dtype == jnp.int8
    return tuple(_turned(unsigned(one) if becomes_unsigned else one, axes) for one in stack)


def _turned(layer: Array, axes: Sequence[int] | None) -> Array:
    return layer if axes is None else layer.transpose(axes)


def _kept(layers: Sequence[int], index: int | Index, x: Array, kept: Arrays) -> Arrays:
    """The inputs of the layers that are asked for, updated by `x`, the input of one."""
    pairs = zip(layers, kept, strict=True)
    if isinstance(index, int):
        return tuple(x if index == layer else old for layer, old in pairs)
    return tuple(jnp.where(index == layer, x, old) for layer, old in pairs)


def zero_after(x: Hidden) -> Array:
    """A zero that is known once `x` is.

    What a pass adds to the cache does not depend on its last layer's attention. Without this zero
    the compiler could write to the cache before it has been read, and copies it to be safe. A scan
    gives both at once, and needs no such thing.
    """
    bits = jax.lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.int32)
    return jnp.minimum(bits & 1, 0).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _random_parameters(config: LlamaConfig, key: Array, dtype: jnp.dtype) -> dict[str, Array]:
    parameters: dict[str, Array] = {}
    for index, (name, spec) in enumerate(parameter_specs(config).items()):
        if name == "token_rows":  # the first tokens have rows
            rows = jnp.arange(config.vocab_size, dtype=spec.dtype)
            parameters[name] = jnp.minimum(rows, config.unknown_row)
            continue
        if not spec.inputs:
            parameters[name] = jnp.ones(spec.shape, dtype)
            continue
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        inputs = math.prod(sizes[axis] for axis in spec.inputs)
        noise = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32)
        parameters[name] = (noise * inputs**-0.5).astype(dtype)
    return parameters


def _rms_norm(
    x: Float[Array, "*batch embed"], scale: Float[Array, " embed"], epsilon: float
) -> Float[Array, "*batch embed"]:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def parameter_sharding(layout: Layout | None, spec: ParameterSpec) -> Sharding | Format:
    """The place of a parameter: as the layout says, or on the first device.

    In a TPU's memory heads come before inputs: a pass would copy each layer's matrix to have it so.
    """
    where: Sharding
    if layout is not None:
        where = layout.sharding(spec.axes, spec.shape)
    else:
        where = SingleDeviceSharding(jax.devices()[0])
    ahead = ("layers", "q_heads", "kv_heads")
    order = sorted(range(len(spec.axes)), key=lambda at: spec.axes[at] not in ahead)
    if order == sorted(order) or spec.shape[-1] % _LANES or _platform_of(where) != "tpu":
        return where
    return Format(InMemory(tuple(order)), where)


def for_backend(model: Llama) -> Llama:
    """The model with its layers as programs on this backend take them best."""
    return model.unstacked() if runs_unstacked(model) else model


def runs_unstacked(model: Llama) -> bool:
    """Tells whether programs take one array per layer where this model lies.

    Those on a CPU do, and on a GPU those whose matrices are floats: a scan would copy most of a
    layer's matrices before their products. TPUs read them in place.
    """
    if not separates_layers(model.config, model.layout, has_integers=model.has_integers):
        return False
    platform = _platform(model)
    return platform == "cpu" or (platform != "tpu" and not model.has_integers)


def separates_layers(config: LlamaConfig, layout: Layout | None, *, has_integers: bool) -> bool:
    """Tells whether programs may take an array per layer of such a model, as integers ask."""
    return layout is None and (has_integers or config.num_layers <= _MOST_UNSTACKED_LAYERS)


def lies_on_cpu(model: Llama) -> bool:
    """Tells whether CPUs hold the model, or would by JAX's default where it is traced."""
    return _platform(model) == "cpu"


def _platform(model: Llama) -> str:
    if model.layout is not None:
        return _platform_of(model.layout.sharding((), ()))
    norm = model.final_norm.get_value()  # which every model has
    sharding = None if isinstance(norm, jax.core.Tracer) else norm.sharding
    return jax.default_backend() if sharding is None else _platform_of(sharding)


def _platform_of(where: Sharding) -> str:
    if isinstance(getattr(where, "mesh", None), AbstractMesh):
        return ""  # nobody's devices
    devices: set[Any] = where.device_set
    return str(next(iter(devices)).platform)
