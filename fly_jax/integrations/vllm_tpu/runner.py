"""The engine's worker, runner and rejection sampler with a loosened rule in them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key
from prometheus_client import REGISTRY, Counter

from fly_jax.decoding.config import DecodingConfig
from fly_jax.integrations.vllm_tpu.draft_model import SPLIT, Axis, DraftModelProposer
from fly_jax.integrations.vllm_tpu.hooks import head_as_written, hook
from fly_jax.integrations.vllm_tpu.row_rules import RowRules, StepRows, sampling_of
from fly_jax.integrations.vllm_tpu.startup import KEY, decoding_config, target_tokenizer
from fly_jax.verification.correction_memory import load_memory
from fly_jax.verification.rules import Rule, RuleState
from fly_jax.verification.verify import verify_flat

RejectionSampler: Any = hook("layers.jax.sample.rejection_sampler:RejectionSampler")
Manager: Any = hook("runner.speculative_decoding_manager:SpeculativeDecodingManager")
TPUModelRunner: Any = hook("runner.tpu_runner:TPUModelRunner")
TPUWorker: Any = hook("worker.tpu_worker:TPUWorker")

_LOGGER = logging.getLogger("vllm.fly_jax")  # which vLLM shows
_SECONDS_BETWEEN_LINES = 10.0
# One in a process for all engines; vLLM unregisters its own counters when it starts.
_COUNTER = Counter(
    "vllm:spec_decode_num_rescued_tokens",
    "Accepted draft tokens that the target refused and the loosened rule kept.",
    ["model_name", "engine"], registry=None,
)  # fmt: skip


class RescueCounter:
    """A counter of the sampler's rescues, one step late so that no step waits for it."""

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = model_name, str(engine)
        self._waiting: Int32[Array, ""] | None = None
        self._is_registered = False
        self._since_line, self._last_line = 0, time.monotonic()

    def wait_for(self, num_rescued: Int32[Array, ""]) -> None:
        """Notes a step's number of rescues, which is still on the device."""
        self.flush()
        num_rescued.copy_to_host_async()
        self._waiting = num_rescued

    def flush(self) -> None:
        """Counts the noted number."""
        if self._waiting is None:
            return
        number, self._waiting = int(np.asarray(self._waiting)), None
        if not self._is_registered:
            with contextlib.suppress(ValueError):  # another engine's has been
                REGISTRY.register(_COUNTER)
            self._is_registered = True
        _COUNTER.labels(*self._labels).inc(number)
        self._since_line += number
        if time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES and self._since_line:
            _LOGGER.info("fly_jax: %d accepted draft tokens were rescues", self._since_line)
            self._since_line, self._last_line = 0, time.monotonic()


class LoosenedSampler(RejectionSampler):
    """The engine's sampler, which also keeps what a loosened rule rescues.

    It has the engine's layout: each device decides on its share of the requests, over a vocabulary
    that is whole where the stock sampler has it whole.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, rows: RowRules, *, max_drafted: int,
        protected: Bool[np.ndarray, " vocab"], memory: Int32[np.ndarray, "pairs 2"] | None,
    ) -> None:  # fmt: skip
        super().__init__(mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.num_rescued: Int32[Array, ""] | None = None  # of the last step, on the device
        self._max_drafted = max_drafted
        self._protected = jax.device_put(protected, everywhere)
        self._memory = None if memory is None else jax.device_put(memory, everywhere)
        self._rows = rows
        self._step: StepRows | None = None
        self._budgets = jax.device_put(np.zeros(rows.num_slots, np.float32), everywhere)

    def begin(
        self, rows: Sequence[str | None], live: Collection[str], parameters: Callable[[str], Any]
    ) -> None:
        """Assigns the next step's rows to requests; see `RowRules.step`."""
        self._step = self._rows.step(rows, live, parameters)

    def __call__(
        self, draft_token_ids: Int[Array, " tokens"], num_draft_tokens: Int[Array, " requests"],
        draft_probs: Float[Array, "tokens vocab"] | None,
        target_logits: Float[Array, "tokens vocab"], bonus_token_ids: Int[Array, " requests"],
        sampling_metadata: Any, key: Key[Array, ""] | None = None,
    ) -> Int32[Array, " emitted"]:  # fmt: skip
        """Emits tokens in the layout of `RejectionSampler.__call__`."""
        # The engine also calls to compile ahead, with no requests.
        step = self._step or self._rows.padding(num_draft_tokens.shape[0])
        tokens, self.num_rescued, self._budgets = kept_on(
            step, self._budgets, draft_token_ids, num_draft_tokens, draft_probs, target_logits,
            bonus_token_ids, sampling_metadata, key, self._protected, self._memory,
            mesh=self.mesh, max_drafted=self._max_drafted,
        )  # fmt: skip
        self._step = None
        return tokens


@functools.partial(jax.jit, static_argnames=("mesh", "max_drafted"))
def kept_on(
    step: StepRows, budgets: Float32[Array, " slots"], draft_tokens: Int[Array, " tokens"],
    num_drafted: Int[Array, " requests"], draft_probs: Float[Array, "tokens vocab"] | None,
    logits: Float[Array, "tokens vocab"], bonus_tokens: Int[Array, " requests"], metadata: Any,
    key: Key[Array, ""] | None, protected: Bool[Array, " vocab"],
    memory: Int32[Array, "pairs 2"] | None, *, mesh: jax.sharding.Mesh, max_drafted: int,
) -> tuple[Int32[Array, " emitted"], Int32[Array, ""], Float32[Array, " slots"]]:  # fmt: skip
    """Runs `verify_flat` on each device's requests; returns tokens, rescues, and budgets left."""
    sampling, budget = None, None
    if metadata.do_sampling:
        sampling = sampling_of(metadata.temperature, metadata.top_k, metadata.top_p)
    if step.rule.budget is not None:
        # A row without a slot has a budget of 0.
        before = budgets.at[step.slots].get(mode="fill", fill_value=0)
        is_new = step.is_new & (step.slots < budgets.shape[0])
        budget = jnp.where(is_new, step.rule.budget, before)
    rows: dict[str, Any] = {
        "logits": logits, "draft_tokens": draft_tokens, "num_drafted": num_drafted,
        "bonus_tokens": bonus_tokens, "draft_probs": draft_probs, "sampling": sampling,
        "state": RuleState(budget),
    }  # fmt: skip

    def of_a_device(
        rule: Rule, rows: dict[str, Any], whole: dict[str, Any]
    ) -> tuple[Array, Array, Array | None]:
        if whole["key"] is not None:
            rank = jax.lax.axis_index(Axis.ATTN_DATA)
            whole = whole | {"key": jax.random.fold_in(whole["key"], rank)}
        found = verify_flat(rule, **rows, **whole, max_drafted=max_drafted)
        left = rows["state"].after(found.verdict, found.verdict.num_accepted)
        return found.tokens, found.verdict.num_rescued, left.budget

    whole = PartitionSpec()
    tokens, num_rescued, left = jax.shard_map(
        of_a_device, mesh=mesh, in_specs=(SPLIT, SPLIT, whole), out_specs=SPLIT, check_vma=False
    )(step.rule, rows, {"key": key, "protected": protected, "memory": memory})
    if left is not None:
        budgets = budgets.at[step.slots].set(left, mode="drop")
    return tokens, jnp.sum(num_rescued), budgets


class Runner(TPUModelRunner):  # type: ignore[misc]
    """The runner of tpu-inference, with fly_jax's sampler (of a loosened rule) and drafter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
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
            self.rejection_sampler = self._loosened_sampler(config)
            index = self.vllm_config.parallel_config.data_parallel_index
            self.rescues = RescueCounter(self.model_config.served_model_name, index)

    def _loosened_sampler(self, config: DecodingConfig) -> LoosenedSampler:
        tokenizer, limits = target_tokenizer(self.model_config), config.limits
        keys = None
        if limits.memory is not None:
            least = limits.csd_min_count
            keys = load_memory(Path(limits.memory), tokenizer.digest, min_count=least).keys()
        ids = [*tokenizer.control_token_ids, *tokenizer.matching(limits.protect)]
        protected = np.isin(np.arange(self.vocab_size), ids)
        rows = RowRules(config, 2 * self.max_num_reqs)  # preempted requests keep their budgets
        k = self.speculative_config.num_speculative_tokens
        return LoosenedSampler(self.mesh, rows, max_drafted=k, protected=protected, memory=keys)

    def load_model(self) -> None:
        """Loads the models of `TPUModelRunner`, an EAGLE-3 head as its files have it."""
        draft = self.speculative_config.draft_model_config
        with head_as_written(draft and draft.hf_config):
            super().load_model()

    def get_kv_cache_spec(self) -> Any:
        """The spec of `TPUModelRunner`, with the layers of the draft model."""
        spec = super().get_kv_cache_spec()
        if isinstance(self.drafter, DraftModelProposer):
            draft = self.speculative_config.draft_model_config
            shards = hook("utils:get_mesh_shape_product")(self.mesh, Axis.ATTN_HEAD)
            heads = hook("utils:get_padded_num_heads")(draft.get_total_num_kv_heads(), shards)
            shape = heads, hook("utils:get_padded_head_dim")(draft.get_head_size())
            for name in self.drafter.layer_names:
                spec[name] = self.kv_cache_manager._create_attention_spec(self.block_size, *shape)
        return spec

    def capture_model(self) -> None:
        """Compiles the programs of `TPUModelRunner`, and those of the draft model."""
        super().capture_model()
        skips = hook("envs:SKIP_JAX_PRECOMPILE") or self.model_config.enforce_eager
        if isinstance(self.drafter, DraftModelProposer) and not skips:
            self.drafter.warm_up()


_PROPOSE = inspect.signature(Manager.propose_draft_token_ids)


class _Manager(Manager):  # type: ignore[misc]
    """The manager of tpu-inference, which also tells the sampler whose rows are next."""

    def get_spec_decode_metadata(self, **kwargs: Any) -> Any:
        """Assigns the rows to requests: the engine's first call of a step."""
        metadata = super().get_spec_decode_metadata(**kwargs)
        sampler, requests = self.runner.rejection_sampler, self.runner.requests
        of_ranks = [metadata.req_ids_dp[rank] for rank in range(kwargs["dp_size"])]
        if isinstance(sampler, LoosenedSampler):
            rows = _padded(of_ranks, kwargs["padded_num_reqs_per_dp_rank"])
            sampler.begin(rows, requests, lambda name: requests[name].sampling_params)
        if isinstance(self.runner.drafter, DraftModelProposer):
            rows = _padded(of_ranks, kwargs["max_num_reqs_per_dp_rank"])
            self.runner.drafter.begin(rows, requests)
        return metadata

    def propose_draft_token_ids(self, *given: Any, **named: Any) -> None:
        """Drafts: the engine's last call of a step."""
        runner, batch = self.runner, self.runner.input_batch
        bound = _PROPOSE.bind(self, *given, **named)
        bound.apply_defaults()
        of = bound.arguments
        if runner.rescues is not None:
            runner.rescues.wait_for(runner.rejection_sampler.num_rescued)
        if isinstance(runner.drafter, DraftModelProposer):
            # It has the interface of the EAGLE-3 head, so the engine drives it as one.
            names = (
                "spec_decode_metadata", "last_sampled_token_id", "num_rejected_tokens",
                "discard_sampled_tokens_req_indices", "aux_hidden_states", "attn_metadata",
                "scheduler_output", "input_ids", "async_scheduling", "hidden_states",
            )  # fmt: skip
            drafts = self.propose_eagle3_draft_token_ids(*(of[name] for name in names))
            self._draft_token_ids = drafts
            self._req_indices_dp = of["spec_decode_metadata"].req_indices_dp
        elif runner.speculative_config.method == "ngram":
            # The engine looks up before it writes the step's tokens into its text, so it drafts
            # what followed one step ago. Here they are written first; it writes them once more.
            sampled = hook("runner.utils:host_extract_sampled_tokens")(
                runner, of["spec_decode_metadata"], of["sampled_output"],
                of["logits_indices_selector"], of["discard_sampled_tokens_req_indices"],
                batch.num_reqs,
            )  # fmt: skip
            lengths = batch.num_tokens_no_spec.copy()
            for row, tokens in enumerate(sampled):
                batch.token_ids_cpu[row, lengths[row] : lengths[row] + len(tokens)] = tokens
                lengths[row] += len(tokens)
            k = runner.speculative_config.num_speculative_tokens
            self._draft_token_ids = runner.drafter.propose(k, sampled, lengths, batch.token_ids_cpu)
        else:
            super().propose_draft_token_ids(*given, **named)

    def take_draft_token_ids(self) -> Any:
        """Counts rescues, once the step's tokens have been read."""
        if self.runner.rescues is not None:
            self.runner.rescues.flush()
        return super().take_draft_token_ids()


def _padded(of_ranks: list[list[str]], length: int) -> list[str | None]:
    return [name for names in of_ranks for name in [*names, *[None] * (length - len(names))]]


class Worker(TPUWorker):  # type: ignore[misc]
    """The worker of tpu-inference, with `Runner` for its runner."""

    def init_device(self) -> None:
        """Makes a `Runner`, in place of the module's `TPUModelRunner`."""
        module: Any = sys.modules[TPUWorker.__module__]
        stock, module.TPUModelRunner = module.TPUModelRunner, Runner
        try:
            super().init_device()
        finally:
            module.TPUModelRunner = stock
