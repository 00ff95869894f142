"""The passes of heads: `head_config.py` says what these are."""

from __future__ import annotations

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fly_jax.models.architectures import scale_of
from fly_jax.models.attention import Ahead, Windows, rotation
from fly_jax.models.cache import KVCache, NewEntries
from fly_jax.models.head_config import Block, Eagle3
from fly_jax.models.llama import Added, Attend, Llama, Matmul, zero_after
from fly_jax.shapes import Features, Hidden, Index, Logits, RowInts, Tokens


class Head(Llama):
    """A head of any kind."""

    @classmethod
    def on(cls, head: Llama, target: Llama) -> Self:
        """The head for this target, whose tables it shares if it has none of its own."""
        own, theirs, given = head.config.head, target.parameters(), head.parameters()
        assert own is not None
        is_tied = target.config.tied_embeddings and not own.has_unembedding
        turns = not own.has_unembedding and target.is_unstacked != head.is_unstacked
        if turns and "unembedding" in theirs:
            theirs |= {"unembedding": theirs["unembedding"].T}
        tables = [("embedding", own.has_embedding), ("unembedding", own.has_unembedding or is_tied)]
        for table in (name for name, is_own in tables if not is_own):
            names = (table, scale_of(table))
            given |= {name: theirs[name] for name in names if name in theirs}
        layers = own.layers_of(target.config.num_layers)
        whole = dataclasses.replace(own, layers=layers, has_embedding=True, has_unembedding=True)
        config = dataclasses.replace(head.config, head=whole, tied_embeddings=is_tied)
        return cls(config, given, head.layout)

    def fused(self, features: Features, matmul: Matmul | None = None) -> Hidden:
        """Fuses the target's features of each position into one, as wide as the head."""
        features = features.astype(self.dtype)
        product = self._products(self._outer_weights(), matmul)
        return self._constrain(product("btf,fd->btd", features, "fusion"))


class Eagle3Head(Head):
    """An EAGLE-3 head: slot i has the feature of position i and token i + 1, and predicts i + 2."""

    def fused(self, features: Features, matmul: Matmul | None = None) -> Hidden:
        """Fuses the target's features of each position; the head may normalise them first."""
        head, outer = self._own, self._outer_weights()
        if head.feature_norms == "each":
            parts = enumerate(jnp.split(features.astype(self.dtype), head.num_features, axis=-1))
            normed = [self._norm(part, outer[f"feature_norm_{at}"]) for at, part in parts]
            features = jnp.concatenate(normed, axis=-1)
        elif head.feature_norms == "all":
            features = self._norm(features.astype(self.dtype), outer["features_norm"])
        return super().fused(features, matmul)

    def run(self, tokens: Tokens, fed: Hidden, cache: KVCache) -> tuple[Hidden, Hidden, NewEntries]:
        """Runs slots from each row's length on; the tokens follow the slots' positions.

        `fed` are features of these positions, or what an earlier pass feeds on. Returns hidden
        states for `logits`, what is fed to the slot after each one, and what they add to the cache.
        """
        tokens = self._constrain(tokens, ("rows", None))
        cache = cache.with_length(self._constrain(cache.length, ("rows",)))
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        hidden, fed, new = self.run_with(tokens, fed, positions, self._attending(cache))
        new = NewEntries(*(one[None] + zero_after(fed) for one in (new.keys, new.values)))
        return hidden, fed, new

    def entries(self, tokens: Tokens, fed: Hidden, cache: KVCache) -> NewEntries:
        """Makes what `run` adds to the cache, alone: that needs nothing else of the layer."""
        tokens = self._constrain(tokens, ("rows", None))
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        new = self.run_with(tokens, fed, positions, self._attending(cache))[2]
        return NewEntries(*(one[None] for one in (new.keys, new.values)))

    def run_with(
        self, tokens: Tokens, fed: Hidden, positions: Tokens, attend: Attend[Added],
        matmul: Matmul | None = None,
    ) -> tuple[Hidden, Hidden, Added]:  # fmt: skip
        """Runs as `run`, with an attention of any kind; also returns what that adds."""
        weights = {name: arrays[0] for name, arrays in self._layer_weights().items()}
        normed = self._norm(fed, weights["hidden_norm"])
        beside = self._norm(self._embedded(tokens), weights["attention_norm"])
        own = self._layer(weights, rotation(self.config, positions), matmul)
        both = jnp.concatenate((beside, normed), axis=-1)
        residual = normed if self._own.residual_is_normed else fed
        x, rest, added = own.run(residual, both, functools.partial(attend, jnp.int32(0)))
        x = self._constrain(x + rest)
        hidden = self._norm(x, self.final_norm[...])
        return hidden, hidden if self._own.feeds_normed else x, added

    @property
    def _own(self) -> Eagle3:
        assert isinstance(self.config.head, Eagle3)
        return self.config.head


class BlockHead(Head):
    """A DFlash or DSpark head: keys and values before the block are made of the target's features.

    The fused feature of a position stands in every layer's attention in place of a hidden state,
    and no layer changes it. The places of a pass (`hidden`) see each other.
    """

    def injected(self, features: Features, start: RowInts) -> NewEntries:
        """The keys and values of every layer for the positions from each row's `start` on."""
        config, outer = self.config, self._outer_weights()
        fused = self._norm(self.fused(features), outer["fused_norm"])
        steps = jnp.arange(fused.shape[1], dtype=jnp.int32)
        rope = rotation(config, start[:, None] + steps)
        layers = self._layer_weights().items()
        read = {name: weights for name, weights in layers if name.startswith(("key", "value"))}

        def of_layer(weights: dict[str, Array]) -> NewEntries:
            own = self._layer(weights, rope)
            made = (own.projected(fused, name) for name in ("key", "value"))
            return NewEntries(*(one.swapaxes(1, 2) for one in made))

        if not self.is_unstacked:
            return jax.lax.map(of_layer, read)
        each = [
            of_layer({name: weights[at] for name, weights in read.items()})
            for at in range(config.num_layers)
        ]
        return jax.tree.map(lambda *layers: jnp.stack(layers), *each)

    def bias(self, tokens: Tokens) -> Logits:
        """DSpark's bias on the logits behind each token."""
        return self._of_all_tokens(self.row_bias(tokens))

    def row_bias(self, tokens: Tokens) -> Float[Array, "rows time known"]:
        """The bias on the unembedding's rows."""
        product = self._products(self._outer_weights(), dtype=jnp.float32)
        rows = self._rows("markov_rows", tokens).astype(self.dtype)
        return product("btr,rv->btv", rows, "markov_bias")

    def probable(self, hidden: Hidden, before: Tokens) -> Float[Array, "rows time"]:
        """The probability that each token is accepted, from the block and the token before it."""
        outer = self._outer_weights()
        if self._own.confidence_reads_markov:
            rows = self._rows("markov_rows", before).astype(self.dtype)
            hidden = jnp.concatenate((hidden, rows), axis=-1)
        score = self._products(outer, dtype=jnp.float32)("btd,do->bto", hidden, "confidence")
        return jax.nn.sigmoid(score + outer["confidence_bias"])[..., 0]

    def _window(self, layer: Index, time: int) -> Windows | None:
        window = super()._window(layer, time)
        if window is None or not self._own.windows_from_block:
            return window
        return window + 1 + jnp.arange(time, dtype=jnp.int32)

    def _ahead(self, layer: Index, time: int) -> Ahead:
        windowed = self.config.windowed_layers
        if not (self._own.causal_windows and windowed):
            return time
        ahead = [0 if at in windowed else time for at in range(self.config.num_layers)]
        return jnp.asarray(ahead, jnp.int32)[layer]

    @property
    def _own(self) -> Block:
        assert isinstance(self.config.head, Block)
        return self.config.head
