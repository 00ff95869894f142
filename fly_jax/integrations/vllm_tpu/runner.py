"""The engine's runner with the rule and the draft model: all that is overridden of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tpu_inference import envs
from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
from tpu_inference.runner.speculative_decoding_manager import SpeculativeDecodingManager
from tpu_inference.runner.tpu_runner import TPUModelRunner
from tpu_inference.runner.utils import host_extract_sampled_tokens

from fly_jax.decoding.config import DecodingConfig
from fly_jax.integrations.vllm_tpu.metrics import RescueCounter
from fly_jax.integrations.vllm_tpu.proposer import DraftModelProposer, draft_cache_shape
from fly_jax.integrations.vllm_tpu.rows import RowRules
from fly_jax.integrations.vllm_tpu.sampler import LoosenedSampler
from fly_jax.integrations.vllm_tpu.settings import KEY, decoding_config
from fly_jax.integrations.vllm_tpu.startup import target_tokenizer
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory


class Runner(TPUModelRunner):  # type: ignore[misc]
    """tpu-inference's, with a sampler and a drafter of fly_jax where they were asked for.

    Attributes:
      rescues: the counter of rescued tokens; None with a lossless rule, where the engine's sampler
        stays in its place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `TPUModelRunner`."""
        self.rescues: RescueCounter | None = None
        super().__init__(*args, **kwargs)
        if self.is_last_rank:
            self.speculative_decoding_manager = _Manager(self)

    def _init_speculative_decoding(self) -> None:
        k = self.speculative_config.num_speculative_tokens
        config = decoding_config(self.vllm_config.additional_config[KEY], k)
        if self.speculative_config.method == "draft_model":
            self.drafter = DraftModelProposer(self.vllm_config, self, config.to_lookup())
            self.rejection_sampler = RejectionSampler(self.mesh)
        else:
            super()._init_speculative_decoding()
        if config.is_loosened:
            self.rejection_sampler = self._loosened_sampler(config, k)
            self.rescues = RescueCounter(
                self.model_config.served_model_name,
                self.vllm_config.parallel_config.data_parallel_index,
            )

    def _loosened_sampler(self, config: DecodingConfig, k: int) -> LoosenedSampler:
        tokenizer = target_tokenizer(self.model_config)
        memory = None
        if config.memory is not None:
            memory = load_memory(
                Path(config.memory), tokenizer.digest, min_count=config.csd_min_count
            )
        elif config.to_rule().uses_memory:
            memory = CorrectionMemory(tokenizer.digest)
        protected = np.zeros(self.vocab_size, bool)
        ids = [*tokenizer.control_token_ids, *tokenizer.matching(config.protect)]
        protected[[token for token in ids if token < self.vocab_size]] = True
        return LoosenedSampler(
            self.mesh,
            # Requests that were preempted keep their budgets.
            RowRules(config, 2 * self.max_num_reqs),
            max_drafted=k,
            protected=protected,
            memory=None if memory is None else memory.keys(),
        )

    def get_kv_cache_spec(self) -> Any:
        """As `TPUModelRunner.get_kv_cache_spec`, and the layers of the draft model."""
        spec = super().get_kv_cache_spec()
        if isinstance(self.drafter, DraftModelProposer):
            shape = draft_cache_shape(self.speculative_config.draft_model_config, self.mesh)
            for name in self.drafter.layer_names:
                spec[name] = self.kv_cache_manager._create_attention_spec(self.block_size, *shape)
        return spec

    def capture_model(self) -> None:
        """As `TPUModelRunner.capture_model`, and the programs of the draft model."""
        super().capture_model()
        skips = envs.SKIP_JAX_PRECOMPILE or self.model_config.enforce_eager
        if isinstance(self.drafter, DraftModelProposer) and not skips:
            self.drafter.warm_up()


class _Manager(SpeculativeDecodingManager):  # type: ignore[misc]
    """tpu-inference's, which tells the sampler whose rows are next, and drafts with a model."""

    def get_spec_decode_metadata(self, **kwargs: Any) -> Any:
        """As its base: the first of a step."""
        metadata = super().get_spec_decode_metadata(**kwargs)
        sampler, requests = self.runner.rejection_sampler, self.runner.requests
        of_ranks = [metadata.req_ids_dp[rank] for rank in range(kwargs["dp_size"])]
        if isinstance(sampler, LoosenedSampler):
            rows = _padded(of_ranks, kwargs["padded_num_reqs_per_dp_rank"])
            sampler.begin(rows, requests, lambda name: requests[name].sampling_params)
        if isinstance(self.runner.drafter, DraftModelProposer):
            self.runner.drafter.begin(
                _padded(of_ranks, kwargs["max_num_reqs_per_dp_rank"]), requests
            )
        return metadata

    def propose_draft_token_ids(
        self,
        sampled_output: Any,
        logits_indices_selector: Any,
        last_sampled_token_id: Any,
        num_rejected_tokens: Any,
        discard_sampled_tokens_req_indices: list[int],
        aux_hidden_states: Any,
        attn_metadata: Any,
        async_scheduling: bool,
        spec_decode_metadata: Any,
        scheduler_output: Any = None,
        input_ids: Any = None,
        hidden_states: Any = None,
    ) -> None:
        """As its base: the last of a step."""
        runner, batch = self.runner, self.runner.input_batch
        if runner.rescues is not None:
            runner.rescues.wait_for(runner.rejection_sampler.num_rescued)
        if isinstance(runner.drafter, DraftModelProposer):
            # It has the interface of the EAGLE-3 head, so that the engine drives it as that.
            self._draft_token_ids = self.propose_eagle3_draft_token_ids(
                spec_decode_metadata,
                last_sampled_token_id,
                num_rejected_tokens,
                discard_sampled_tokens_req_indices,
                aux_hidden_states,
                attn_metadata,
                scheduler_output,
                input_ids,
                async_scheduling,
                hidden_states,
            )
            self._req_indices_dp = spec_decode_metadata.req_indices_dp
            return
        if runner.speculative_config.method == "ngram":
            # The engine looks up before the step's tokens stand in its text, and so drafts what
            # would have followed one step ago. Here they do; it then writes them once more.
            sampled = host_extract_sampled_tokens(
                runner, spec_decode_metadata, sampled_output, logits_indices_selector,
                discard_sampled_tokens_req_indices, batch.num_reqs,
            )  # fmt: skip
            lengths = batch.num_tokens_no_spec.copy()
            for row, tokens in enumerate(sampled):
                batch.token_ids_cpu[row, lengths[row] : lengths[row] + len(tokens)] = tokens
                lengths[row] += len(tokens)
            k = runner.speculative_config.num_speculative_tokens
            self._draft_token_ids = runner.drafter.propose(k, sampled, lengths, batch.token_ids_cpu)
            return
        super().propose_draft_token_ids(
            sampled_output,
            logits_indices_selector,
            last_sampled_token_id,
            num_rejected_tokens,
            discard_sampled_tokens_req_indices,
            aux_hidden_states,
            attn_metadata,
            async_scheduling,
            spec_decode_metadata,
            scheduler_output,
            input_ids,
            hidden_states,
        )

    def take_draft_token_ids(self) -> Any:
        """As its base, once the step's tokens have been read."""
        if self.runner.rescues is not None:
            self.runner.rescues.flush()
        return super().take_draft_token_ids()


def _padded(of_ranks: list[list[str]], length: int) -> list[str | None]:
    """The rows of a step: those of one rank after the other, each as many."""
    return [name for names in of_ranks for name in [*names, *[None] * (length - len(names))]]
