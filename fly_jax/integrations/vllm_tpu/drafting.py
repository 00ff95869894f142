"""The draft model's passes of a step, in one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Int32
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.integrations.vllm_tpu.looked_up import (
    Progress,
    begin,
    drafted,
    extended,
    feed,
    slots_of_tokens,
)
from fly_jax.integrations.vllm_tpu.taken_in import decoding_step

SPLIT = PartitionSpec(ShardingAxisName.ATTN_DATA)
Caches = list[jax.Array]


class Drafted(NamedTuple):
    """What a step of the draft model gives.

    Attributes:
      caches: the model's layers.
      texts: with what was taken in; None without a lookup.
      tokens: K of each request, greedy.
      num_passes: of the model.
    """

    caches: Caches
    texts: Int32[Array, "slots capacity"] | None
    tokens: Int32[Array, "requests K"]
    num_passes: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A draft model's functions, as the engine's loader gives them, and how to draft with them.

    Attributes:
      model_fn: a pass.
      logits_fn: of hidden states.
      num_layers: of its layers, named as `layer_name` says.
      mesh: the engine's.
      num_tokens: K.
      max_length: of a request's text.
      lookup: what proposes to the model; None for nothing.
    """

    model_fn: Callable[..., Any]
    logits_fn: Callable[..., Any]
    num_layers: int
    mesh: Mesh
    num_tokens: int
    max_length: int
    lookup: Lookup | None

    def __call__(
        self,
        caches: Caches,
        texts: Int32[Array, "slots capacity"] | None,
        slots: Int32[Array, " requests"] | None,
        leaves: Any,
        tokens: Int[Array, " more"],
        metadata: AttentionMetadata,
        last: Int[Array, " requests"],
    ) -> Drafted:
        """All passes of a step.

        Args:
          caches: the model's layers.
          texts: see `Texts`; None without a lookup.
          slots: see `Texts`; None without a lookup.
          leaves: the model's parameters.
          tokens: see `TakenIn`.
          metadata: of these tokens.
          last: see `TakenIn`.
        """
        # 1) What is new of each request; its last token gives the first draft token.
        caches, hidden = self._passed(caches, leaves, tokens, metadata)
        hidden, positions, starts, distribution = self._on_each(decoding_step)(
            hidden, metadata.input_positions, last, metadata.request_distribution
        )
        first = self._greedy(leaves, hidden)
        if texts is not None and slots is not None:
            # 2) The texts, with what is new, and each request's own; zeros for one without a place.
            where = self._on_each(slots_of_tokens)(slots, metadata.query_start_loc, tokens)
            texts = texts.at[where, metadata.input_positions].set(tokens, mode="drop")
            rows = texts.at[slots].get(mode="fill", fill_value=0)
            begun = self._on_each(begin, k=self.num_tokens)(
                rows, positions + 1, first, metadata.request_distribution
            )
            # 3) In a pass as many tokens as are found and would have been drafted, and one more.
            return self._with_lookup(caches, leaves, metadata, begun)._replace(texts=texts)
        # 2) One token after the other.
        one_each = dataclasses.replace(
            metadata, query_start_loc=starts, request_distribution=distribution
        )
        return self._one_by_one(caches, leaves, one_each, positions, first)

    def _one_by_one(
        self,
        caches: Caches,
        leaves: Any,
        metadata: AttentionMetadata,
        positions: Int32[Array, " requests"],
        first: Int32[Array, " requests"],
    ) -> Drafted:
        def step(carry: Any, index: Array) -> tuple[Any, Array]:
            caches, token = carry
            here = dataclasses.replace(
                metadata,
                input_positions=jnp.minimum(positions + 1 + index, self.max_length - 1),
                seq_lens=jnp.minimum(metadata.seq_lens + 1 + index, self.max_length),
            )
            caches, hidden = self._passed(caches, leaves, token, here)
            token = self._greedy(leaves, hidden)
            return (caches, token), token

        steps = jnp.arange(self.num_tokens - 1, dtype=jnp.int32)
        (caches, _), rest = jax.lax.scan(step, (caches, first), steps)
        tokens = jnp.concatenate([first[None], rest]).T
        return Drafted(caches, None, tokens, jnp.int32(self.num_tokens))

    def _with_lookup(
        self, caches: Caches, leaves: Any, metadata: AttentionMetadata, begun: Progress
    ) -> Drafted:
        k = self.num_tokens

        def step(carry: Any) -> Any:
            caches, progress, num_passes = carry
            fed = self._on_each(feed, lookup=self.lookup, k=k, max_length=self.max_length)(progress)
            here = dataclasses.replace(
                metadata,
                input_positions=fed.positions,
                seq_lens=fed.lengths,
                query_start_loc=fed.starts,
            )
            caches, hidden = self._passed(caches, leaves, fed.tokens, here)
            chosen = self._greedy(leaves, hidden)
            return caches, self._on_each(extended, k=k)(progress, fed, chosen), num_passes + 1

        caches, progress, num_passes = jax.lax.while_loop(
            lambda carry: jnp.any(carry[1].num_drafted < k), step, (caches, begun, jnp.int32(1))
        )
        return Drafted(caches, None, self._on_each(drafted, k=k)(progress), num_passes)

    def _passed(
        self, caches: Caches, leaves: Any, tokens: Array, metadata: AttentionMetadata
    ) -> tuple[Caches, Float[Array, "tokens size"]]:
        caches, hidden, *_ = self.model_fn(
            leaves, list(caches), tokens, metadata, None, metadata.input_positions,
            tuple((layer_name(index), index) for index in range(self.num_layers)),
            None, None, True, True,
        )  # fmt: skip
        return caches, hidden

    def _greedy(self, leaves: Any, hidden: Float[Array, "tokens size"]) -> Int32[Array, " tokens"]:
        best = jnp.argmax(self.logits_fn(leaves, hidden, None), axis=-1).astype(jnp.int32)
        return jax.lax.with_sharding_constraint(best, NamedSharding(self.mesh, SPLIT))

    def _on_each(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """On each device's share of the requests."""
        return jax.shard_map(
            functools.partial(function, **static), mesh=self.mesh, in_specs=SPLIT, out_specs=SPLIT
        )


def layer_name(index: int) -> str:
    """Of a layer of the draft model in the engine's cache."""
    return f"draft_layer.{index}"
