"""A draft model in the engine: loaded by its loader, in pages of its cache."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Int32
from tpu_inference import utils
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.models.common.model_loader import get_flax_model
from tpu_inference.spec_decode.jax.eagle3 import Eagle3Proposer

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.integrations.vllm_tpu.drafting import SPLIT, Drafting, layer_name
from fly_jax.integrations.vllm_tpu.taken_in import Step, TakenIn, take_in
from fly_jax.integrations.vllm_tpu.texts import Texts


def draft_cache_shape(draft: Any, mesh: jax.sharding.Mesh) -> tuple[int, int]:
    """Key/value heads and their size, padded as the engine pads them."""
    shards = utils.get_mesh_shape_product(mesh, ShardingAxisName.ATTN_HEAD)
    heads = utils.get_padded_num_heads(draft.get_total_num_kv_heads(), shards)
    return heads, utils.get_padded_head_dim(draft.get_head_size())


class DraftModelProposer(Eagle3Proposer):  # type: ignore[misc]
    """Drafts greedily with a model of its own, in the place of the engine's EAGLE-3 head.

    A step has two programs. `prepare_inputs` makes of the target's step what the draft model has
    yet to take in: the tokens that the target kept, and the one that follows them. `propose` takes
    them in, and drafts; see `Drafting`.

    The draft model's layers are further layers of the engine's paged cache, with the target's
    pages. What it takes in of the tokens that it drafted itself it has taken in before; doing so
    again lets the pass be the same after a prompt, a cached prefix or a rejection.

    Attributes:
      layer_names: of its layers in the engine's cache.
      num_passes: of the model in the last step, on the device; None before the first.
    """

    def __init__(self, vllm_config: Any, runner: Any, lookup: Lookup | None) -> None:
        """As `Eagle3Proposer`, with a lookup that proposes to the model, or without."""
        super().__init__(vllm_config, runner)
        self.num_passes: Int32[Array, ""] | None = None
        self._lookup = lookup
        self._texts: Texts | None = None
        count = self.draft_model_config.get_num_layers(vllm_config.parallel_config)
        self.layer_names = [layer_name(index) for index in range(count)]

    def load_model(self, target_model: Any) -> None:
        """Loads it as the engine loads a target; `target_model` is not needed."""
        # The engine's models read "the" model's config.
        config = copy.copy(self.vllm_config)
        config.model_config = copy.copy(self.draft_model_config)
        config.speculative_config = None
        hf_config = copy.copy(config.model_config.hf_config)
        if hf_config.architectures == ["MistralForCausalLM"]:
            hf_config.architectures = ["LlamaForCausalLM"]  # see startup.DRAFTS
        config.model_config.hf_config = hf_config
        with jax.set_mesh(self.mesh):
            model = get_flax_model(config, self.rng_key, self.mesh)
        self.state, self.state_leaves = model.state, model.state_leaves
        drafting = Drafting(
            model.model.step_fn_no_options,  # inside another program it has no compiler options
            model.compute_logits_fn,
            len(self.layer_names),
            self.mesh,
            self.num_speculative_tokens,
            self.runner.max_model_len,
            self._lookup,
        )
        self._drafted = jax.jit(drafting.__call__, donate_argnums=(0, 1))
        if self._lookup is not None:
            self._texts = Texts(self.mesh, self.runner.max_num_reqs, self.runner.max_model_len)

    def begin(self, rows: Sequence[str | None], requests: Mapping[str, Any]) -> None:
        """Says whose the rows of the next step are; see `Texts.begin`."""
        if self._texts is not None:
            self._texts.begin(rows, requests)

    def prepare_inputs(
        self,
        attn_metadata: AttentionMetadata,
        input_ids: Int[Array, " tokens"],
        aux_hidden_states: Any,
        last_sampled_token_id: Int[Array, " requests"],
        next_prompt_token_id: Int[Array, " requests"],
        is_in_prefill: Int[Array, " requests"],
        num_rejected_tokens: Int[Array, " requests"],
        num_reqs_dp: Int[Array, " ranks"],
    ) -> tuple[None, Int32[Array, " more"], Int32[Array, " requests"], AttentionMetadata]:
        """As `Eagle3Proposer.prepare_inputs`, without hidden states.

        Each request may have one token more than the target's step; the programs are made for one
        more of each.
        """
        taken = _taken_in(
            Step(
                input_ids,
                attn_metadata.input_positions,
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                jnp.where(is_in_prefill, next_prompt_token_id, last_sampled_token_id),
                num_rejected_tokens,
                num_reqs_dp,
            ),
            mesh=self.mesh,
            max_length=self.runner.max_model_len,
        )
        metadata = dataclasses.replace(
            attn_metadata,
            input_positions=taken.positions,
            query_start_loc=taken.starts,
            seq_lens=taken.lengths,
            request_distribution=taken.distribution,
        )
        return None, taken.tokens, taken.last, metadata

    def propose(
        self,
        kv_caches: list[jax.Array],
        input_ids: Int[Array, " more"],
        attn_metadata: AttentionMetadata,
        last_token_indices: Int[Array, " requests"],
        target_hidden_states: None,
    ) -> tuple[list[jax.Array], Int32[Array, "requests K"]]:
        """As `Eagle3Proposer.propose`."""
        places = [self.runner.layer_name_to_kvcache_index[name] for name in self.layer_names]
        drafted = self._drafted(
            [kv_caches[place] for place in places],
            None if self._texts is None else self._texts.tokens,
            None if self._texts is None else self._texts.slots,
            self.state_leaves,
            input_ids,
            attn_metadata,
            last_token_indices,
        )
        for place, cache in zip(places, drafted.caches, strict=True):
            kv_caches[place] = cache
        if self._texts is not None:
            self._texts.tokens = drafted.texts
        self.num_passes = drafted.num_passes
        return kv_caches, drafted.tokens

    def warm_up(self) -> None:
        """Compiles the programs of every size that a step of the engine may have."""
        if self._texts is not None:
            self._texts.warm_up()
        runner, ranks = self.runner, self.runner.dp_size
        sharding = NamedSharding(self.mesh, SPLIT)

        def zeros(size: int) -> jax.Array:
            return jax.device_put(np.zeros(size, np.int32), sharding)

        requests = runner.max_num_reqs
        for num_tokens in runner.num_tokens_paddings:
            for padded in runner.attn_num_reqs_paddings:
                metadata = AttentionMetadata(
                    input_positions=zeros(num_tokens),
                    block_tables=zeros(requests * runner.max_num_blocks_per_req),
                    seq_lens=zeros(requests),
                    query_start_loc=zeros(requests + ranks),
                    request_distribution=zeros(3 * ranks),
                    padded_num_reqs=padded,
                )
                with jax.set_mesh(self.mesh):
                    _, tokens, last, metadata = self.prepare_inputs(
                        metadata, zeros(num_tokens), None, zeros(requests), zeros(requests),
                        zeros(requests), zeros(requests), zeros(ranks),
                    )  # fmt: skip
                    runner.kv_caches, _ = self.propose(
                        runner.kv_caches, tokens, metadata, last, None
                    )


@functools.partial(jax.jit, static_argnames=("mesh", "max_length"))
def _taken_in(step: Step, *, mesh: jax.sharding.Mesh, max_length: int) -> TakenIn:
    """`take_in` on each device's share of the requests."""
    return jax.shard_map(
        functools.partial(take_in, max_length=max_length),
        mesh=mesh,
        in_specs=SPLIT,
        out_specs=SPLIT,
    )(step)
