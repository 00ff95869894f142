"""The passes of an EAGLE-3 head: `eagle3.py` says what one is."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fly_jax.models.architectures import scale_name
from fly_jax.models.attention import rotation
from fly_jax.models.cache import KVCache, NewEntries
from fly_jax.models.eagle3 import Eagle3
from fly_jax.models.llama import Llama, run_layer, zero_after


class Head(Llama):
    """A head: slot i has the feature of position i and token i + 1, and predicts token i + 2."""

    @classmethod
    def on(cls, head: Llama, target: Llama) -> Head:
        """The head as one of this target, whose embedding it shares if it has none."""
        config, parameters = head.config, head.parameters()
        assert config.head is not None
        layers = config.head.layers_of(target.config.num_layers)
        own = dataclasses.replace(config.head, layers=layers, has_embedding=True)
        if not config.head.has_embedding:
            theirs = target.parameters()
            names = ("embedding", scale_name("embedding"))
            parameters |= {name: theirs[name] for name in names if name in theirs}
        return cls(dataclasses.replace(config, head=own), parameters, head.layout)

    def fused(
        self, features: Float[Array, "batch time features"]
    ) -> Float[Array, "batch time embed"]:
        """The target's features of each position as one, as wide as the head."""
        head = self._own
        features = features.astype(self.dtype)
        outer = self._outer_weights()
        if head.feature_norms == "each":
            parts = enumerate(jnp.split(features, head.num_features, axis=-1))
            normed = [self._norm(part, outer[f"feature_norm_{at}"]) for at, part in parts]
            features = jnp.concatenate(normed, axis=-1)
        elif head.feature_norms == "all":
            features = self._norm(features, outer["features_norm"])
        product = self._products(outer)
        return self._constrain(product("btf,fd->btd", features, "fusion"))

    def run(
        self,
        tokens: Int[Array, "batch time"],
        fed: Float[Array, "batch time embed"],
        cache: KVCache,
    ) -> tuple[Float[Array, "batch time embed"], Float[Array, "batch time embed"], NewEntries]:
        """Runs slots from each row's length on.

        Args:
          tokens: that follow the slots' positions.
          fed: features of these positions, or what an earlier pass feeds on.

        Returns:
          Hidden states for `logits`, what is fed to the slot after each one, and what they add to
          the cache.
        """
        tokens = self._constrain(tokens, ("rows", None))
        cache = cache.with_length(self._constrain(cache.length, ("rows",)))
        weights = {name: arrays[0] for name, arrays in self._layer_weights().items()}
        normed = self._norm(fed, weights["hidden_norm"])
        beside = self._norm(self._embedded(tokens), weights["attention_norm"])
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        rope, attend = rotation(self.config, positions), self._attending(cache)
        x, new = run_layer(
            self.config,
            normed if self._own.residual_is_normed else fed,
            jnp.concatenate((beside, normed), axis=-1),
            weights,
            rope,
            lambda *given: attend(jnp.int32(0), *given),
            self._products(weights),
            self._norm,
        )
        x = self._constrain(x)
        hidden = self._norm(x, self.final_norm[...])
        new = NewEntries(*(one[None] + zero_after(x) for one in (new.keys, new.values)))
        return hidden, hidden if self._own.feeds_normed else x, new

    @property
    def _own(self) -> Eagle3:
        assert self.config.head is not None
        return self.config.head
