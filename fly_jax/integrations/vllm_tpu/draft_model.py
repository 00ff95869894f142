"""A draft model in the engine: loaded by its loader, in pages of its cache."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Int32

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.integrations.vllm_tpu import draft_inputs
from fly_jax.integrations.vllm_tpu.hooks import hook
from fly_jax.integrations.vllm_tpu.row_rules import RequestPlaces

Eagle3Proposer: Any = hook("spec_decode.jax.eagle3:Eagle3Proposer")
Axis: Any = hook("layers.common.sharding:ShardingAxisName")
SPLIT = PartitionSpec(Axis.ATTN_DATA)
Caches = list[jax.Array]


class Texts:
    """The tokens of each request that the draft model has taken in; a prompt once it is known.

    A request without a slot here is drafted without a lookup, with the same tokens.
    """

    tokens: Int32[Array, "slots capacity"]  # on every device whole
    slots: Int32[Array, " requests"]  # of the step's rows; the number of slots for padding

    def __init__(self, mesh: jax.sharding.Mesh, num_requests: int, capacity: int) -> None:
        self._mesh = mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, SPLIT)
        self._slots = RequestPlaces(num_requests)
        self.tokens = jax.device_put(np.zeros((num_requests, capacity), np.int32), self._everywhere)
        self.begin([None] * num_requests, {})

    def begin(self, rows: Sequence[str | None], requests: Mapping[str, Any]) -> None:
        """Assigns the next step's rows to requests, by the ids of those that are alive."""
        slots, is_new = self._slots.step(rows, requests)
        for name, slot, comes in zip(rows, slots, is_new, strict=True):
            if name is not None and comes and slot < self._slots.num:
                one = requests[name]
                self._put(slot, [*one.prompt_token_ids, *(one.output_token_ids or ())])
        self.slots = jax.device_put(slots, self._split)

    def warm_up(self) -> None:
        """Compiles its program."""
        self._put(np.int32(0), [])

    def _put(self, slot: np.int32, text: list[int]) -> None:
        whole = np.zeros(self.tokens.shape[1], np.int32)
        known = text[: len(whole)]
        whole[: len(known)] = np.maximum(known, 0)  # what is to come is -1
        with jax.set_mesh(self._mesh):  # another one around it would be another program
            self.tokens = _put(self.tokens, *jax.device_put((slot, whole), self._everywhere))


@functools.partial(jax.jit, donate_argnums=0)
def _put(
    tokens: Int32[Array, "slots capacity"], slot: Int32[Array, ""], text: Int32[Array, " capacity"]
) -> Int32[Array, "slots capacity"]:
    return tokens.at[slot].set(text)


class Drafted(NamedTuple):
    """The results of a step: the draft model's caches, the texts of a lookup, the greedy drafts."""

    caches: Caches
    texts: Int32[Array, "slots capacity"] | None
    tokens: Int32[Array, "requests K"]
    num_passes: Int32[Array, ""]


def _laid_out(metadata: Any, given: draft_inputs.Context | draft_inputs.Pass, **others: Any) -> Any:
    at = {"input_positions": given.positions, "query_start_loc": given.starts}
    return dataclasses.replace(metadata, seq_lens=given.lengths, **at, **others)


class DraftModelProposer(Eagle3Proposer):  # type: ignore[misc]
    """Drafts greedily with a separate model, in place of the engine's EAGLE-3 head.

    A step has two programs. `prepare_inputs` selects what the draft model has yet to take in: the
    tokens that the target kept, and the one that follows them. `propose` takes them in, and drafts.
    The draft model's layers are further layers of the engine's paged cache, with the target's
    pages. It takes in again the tokens that it drafted itself, so that the pass is the same after a
    prompt, a cached prefix or a rejection.
    """

    def __init__(self, vllm_config: Any, runner: Any, lookup: Lookup | None) -> None:
        super().__init__(vllm_config, runner)
        self.num_passes: Int32[Array, ""] | None = None  # of the last step, on the device
        self._lookup = lookup
        self._texts: Texts | None = None
        count = self.draft_model_config.get_num_layers(vllm_config.parallel_config)
        self.layer_names = [f"draft_layer.{index}" for index in range(count)]

    def load_model(self, target_model: Any) -> None:
        """Loads the draft model as the engine loads a target; `target_model` is not needed."""
        # The engine's models read "the" model's config.
        config = copy.copy(self.vllm_config)
        config.model_config = copy.copy(self.draft_model_config)
        config.speculative_config = None
        hf_config = copy.copy(config.model_config.hf_config)
        if hf_config.architectures == ["MistralForCausalLM"]:
            hf_config.architectures = ["LlamaForCausalLM"]  # see startup.DRAFTS
        config.model_config.hf_config = hf_config
        with jax.set_mesh(self.mesh):
            load = hook("models.common.model_loader:get_flax_model")
            model = load(config, self.rng_key, self.mesh)
        self.state, self.state_leaves = model.state, model.state_leaves
        # Inside another program it has no compiler options.
        self.model_fn = model.model.step_fn_no_options
        self.compute_logits_fn = model.compute_logits_fn
        self._drafted = jax.jit(self._draft, donate_argnums=(0, 1))
        context_of = self._on_each(draft_inputs.context_of, max_length=self.runner.max_model_len)
        self._context_of = jax.jit(context_of)
        if self._lookup is not None:
            self._texts = Texts(self.mesh, self.runner.max_num_reqs, self.runner.max_model_len)

    def begin(self, rows: Sequence[str | None], requests: Mapping[str, Any]) -> None:
        """Assigns the next step's rows to requests; see `Texts.begin`."""
        if self._texts is not None:
            self._texts.begin(rows, requests)

    def prepare_inputs(
        self, attn_metadata: Any, input_ids: Int[Array, " tokens"], aux_hidden_states: Any,
        last_sampled_token_id: Int[Array, " requests"],
        next_prompt_token_id: Int[Array, " requests"], is_in_prefill: Int[Array, " requests"],
        num_rejected_tokens: Int[Array, " requests"], num_reqs_dp: Int[Array, " ranks"],
    ) -> tuple[None, Int32[Array, " more"], Int32[Array, " requests"], Any]:  # fmt: skip
        """Prepares inputs as its base does, without hidden states, and one more token of each."""
        step = draft_inputs.TargetStep(
            input_ids, attn_metadata.input_positions, attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            jnp.where(is_in_prefill, next_prompt_token_id, last_sampled_token_id),
            num_rejected_tokens, num_reqs_dp,
        )  # fmt: skip
        context = self._context_of(step)
        metadata = _laid_out(attn_metadata, context, request_distribution=context.distribution)
        return None, context.tokens, context.last, metadata

    def propose(
        self, kv_caches: list[jax.Array], input_ids: Int[Array, " more"], attn_metadata: Any,
        last_token_indices: Int[Array, " requests"], target_hidden_states: None,
    ) -> tuple[list[jax.Array], Int32[Array, "requests K"]]:  # fmt: skip
        """Proposes K tokens of each request; see `Eagle3Proposer.propose`."""
        places = [self.runner.layer_name_to_kvcache_index[name] for name in self.layer_names]
        texts = self._texts
        drafted = self._drafted(
            [kv_caches[place] for place in places],
            *((None, None) if texts is None else (texts.tokens, texts.slots)), self.state_leaves,
            input_ids, attn_metadata, last_token_indices,
        )  # fmt: skip
        for place, cache in zip(places, drafted.caches, strict=True):
            kv_caches[place] = cache
        if texts is not None:
            texts.tokens = drafted.texts
        self.num_passes = drafted.num_passes
        return kv_caches, drafted.tokens

    def _draft(
        self, caches: Caches, texts: Int32[Array, "slots capacity"] | None,
        slots: Int32[Array, " requests"] | None, leaves: Any, tokens: Int[Array, " more"],
        metadata: Any, last: Int[Array, " requests"],
    ) -> Drafted:  # fmt: skip
        """Runs all passes of a step over a `Context`; without a lookup there are no texts."""
        # 1) The new tokens of each request, whose last one gives the first draft token.
        caches, hidden = self._passed(caches, leaves, tokens, metadata)
        hidden, positions, starts, distribution = self._on_each(draft_inputs.decoding_step)(
            hidden, metadata.input_positions, last, metadata.request_distribution
        )
        first = self._greedy(leaves, hidden)
        if texts is not None and slots is not None:
            # 2) The texts, with the new tokens, and each request's; zeros for one without a slot.
            find = self._on_each(draft_inputs.slots_of_tokens)
            where = find(slots, metadata.query_start_loc, tokens)
            texts = texts.at[where, metadata.input_positions].set(tokens, mode="drop")
            rows = texts.at[slots].get(mode="fill", fill_value=0)
            begin = self._counting(draft_inputs.begin)
            begun = begin(rows, positions + 1, first, metadata.request_distribution)
            # 3) Each pass gives the looked-up tokens that the model would draft, and one more.
            return self._with_lookup(caches, leaves, metadata, begun)._replace(texts=texts)
        # 2) One token after the other.
        one_each = {"query_start_loc": starts, "request_distribution": distribution}
        most = self.runner.max_model_len

        def step(carry: Any, index: Array) -> tuple[Any, Array]:
            caches, token = carry
            at = jnp.minimum(positions + 1 + index, most - 1)
            lengths = jnp.minimum(metadata.seq_lens + 1 + index, most)
            here = dataclasses.replace(metadata, input_positions=at, seq_lens=lengths, **one_each)
            caches, hidden = self._passed(caches, leaves, token, here)
            token = self._greedy(leaves, hidden)
            return (caches, token), token

        steps = jnp.arange(self.num_speculative_tokens - 1, dtype=jnp.int32)
        (caches, _), rest = jax.lax.scan(step, (caches, first), steps)
        tokens = jnp.concatenate([first[None], rest]).T
        return Drafted(caches, None, tokens, jnp.int32(self.num_speculative_tokens))

    def _with_lookup(
        self, caches: Caches, leaves: Any, metadata: Any, begun: draft_inputs.Progress
    ) -> Drafted:
        k, most = self.num_speculative_tokens, self.runner.max_model_len
        feeding = self._counting(draft_inputs.feed, lookup=self._lookup, max_length=most)

        def step(carry: Any) -> Any:
            caches, progress, num_passes = carry
            fed = feeding(progress)
            caches, hidden = self._passed(caches, leaves, fed.tokens, _laid_out(metadata, fed))
            chosen = self._greedy(leaves, hidden)
            progress = self._counting(draft_inputs.extended)(progress, fed, chosen)
            return caches, progress, num_passes + 1

        caches, progress, num_passes = jax.lax.while_loop(
            lambda carry: jnp.any(carry[1].num_drafted < k), step, (caches, begun, jnp.int32(1))
        )
        return Drafted(caches, None, self._counting(draft_inputs.drafted)(progress), num_passes)

    def _passed(
        self, caches: Caches, leaves: Any, tokens: Array, metadata: Any
    ) -> tuple[Caches, Float[Array, "tokens size"]]:
        caches, hidden, *_ = self.model_fn(
            leaves, list(caches), tokens, metadata, None, metadata.input_positions,
            tuple((name, index) for index, name in enumerate(self.layer_names)),
            None, None, True, True,
        )  # fmt: skip
        return caches, hidden

    def _greedy(self, leaves: Any, hidden: Float[Array, "tokens size"]) -> Int32[Array, " tokens"]:
        best = jnp.argmax(self.compute_logits_fn(leaves, hidden, None), axis=-1).astype(jnp.int32)
        return jax.lax.with_sharding_constraint(best, NamedSharding(self.mesh, SPLIT))

    def _on_each(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Maps a function over the devices, each with its share of the requests."""
        given = functools.partial(function, **static)
        return jax.shard_map(given, mesh=self.mesh, in_specs=SPLIT, out_specs=SPLIT)

    def _counting(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        return self._on_each(function, num_speculative_tokens=self.num_speculative_tokens, **static)

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
                metadata = hook("layers.common.attention_metadata:AttentionMetadata")(
                    input_positions=zeros(num_tokens),
                    block_tables=zeros(requests * runner.max_num_blocks_per_req),
                    seq_lens=zeros(requests), query_start_loc=zeros(requests + ranks),
                    request_distribution=zeros(3 * ranks), padded_num_reqs=padded,
                )  # fmt: skip
                with jax.set_mesh(self.mesh):
                    _, tokens, last, metadata = self.prepare_inputs(
                        metadata, zeros(num_tokens), None, zeros(requests), zeros(requests),
                        zeros(requests), zeros(requests), zeros(ranks),
                    )  # fmt: skip
                    caches, _ = self.propose(runner.kv_caches, tokens, metadata, last, None)
                    runner.kv_caches = caches
