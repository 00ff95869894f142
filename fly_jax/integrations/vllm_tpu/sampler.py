"""The rule in the place of the engine's rejection sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

from fly_jax.integrations.vllm_tpu.kept import Requests, keep
from fly_jax.integrations.vllm_tpu.rows import RowRules, StepRows
from fly_jax.verification.rules import Rule


class LoosenedSampler(RejectionSampler):
    """The engine's sampler, but for what the rule keeps besides.

    It has the engine's layout: each device decides on its share of the requests, over a vocabulary
    that is whole where the stock sampler has it whole.

    Attributes:
      num_rescued: rescued tokens of the last step, on the device; None before the first.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        rows: RowRules,
        *,
        max_drafted: int,
        protected: Bool[np.ndarray, " vocab"],
        memory: Int32[np.ndarray, "pairs 2"] | None,
    ) -> None:
        """Puts on the devices what stays there.

        Args:
          mesh: the engine's.
          rows: the rules of the engine's requests.
          max_drafted: K.
          protected: see `accept`.
          memory: see `accept`.
        """
        super().__init__(mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.num_rescued: Int32[Array, ""] | None = None
        self._max_drafted = max_drafted
        self._protected = jax.device_put(protected, everywhere)
        self._memory = None if memory is None else jax.device_put(memory, everywhere)
        self._rows = rows
        self._step: StepRows | None = None
        self._budgets = jax.device_put(np.zeros(rows.num_slots, np.float32), everywhere)

    def begin(
        self,
        rows: Sequence[str | None],
        live: Collection[str],
        parameters: Callable[[str], Any],
    ) -> None:
        """Says whose the rows of the next step are; see `RowRules.step`."""
        self._step = self._rows.step(rows, live, parameters)

    def __call__(
        self,
        draft_token_ids: Int[Array, " tokens"],
        num_draft_tokens: Int[Array, " requests"],
        draft_probs: Float[Array, "tokens vocab"] | None,
        target_logits: Float[Array, "tokens vocab"],
        bonus_token_ids: Int[Array, " requests"],
        sampling_metadata: TPUSupportedSamplingMetadata,
        key: Key[Array, ""] | None = None,
    ) -> Int32[Array, " emitted"]:
        """As `RejectionSampler.__call__`."""
        # The engine also calls to compile ahead, with no requests.
        step = self._step or self._rows.padding(num_draft_tokens.shape[0])
        tokens, self.num_rescued, self._budgets = kept_on(
            step,
            self._budgets,
            draft_token_ids,
            num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            key,
            self._protected,
            self._memory,
            mesh=self.mesh,
            max_drafted=self._max_drafted,
        )
        self._step = None
        return tokens


@functools.partial(jax.jit, static_argnames=("mesh", "max_drafted"))
def kept_on(
    step: StepRows,
    budgets: Float32[Array, " slots"],
    draft_tokens: Int[Array, " tokens"],
    num_drafted: Int[Array, " requests"],
    draft_probs: Float[Array, "tokens vocab"] | None,
    logits: Float[Array, "tokens vocab"],
    bonus_tokens: Int[Array, " requests"],
    metadata: TPUSupportedSamplingMetadata,
    key: Key[Array, ""] | None,
    protected: Bool[Array, " vocab"],
    memory: Int32[Array, "pairs 2"] | None,
    *,
    mesh: jax.sharding.Mesh,
    max_drafted: int,
) -> tuple[Int32[Array, " emitted"], Int32[Array, ""], Float32[Array, " slots"]]:
    """`keep` on every device's share of the requests.

    Returns:
      The tokens, in the engine's layout, how many of them are rescues, and the budgets.
    """
    rule = step.rule
    requests: Requests | None = None
    budget: Array | None = None
    if metadata.do_sampling:
        requests = Requests(metadata.temperature, metadata.top_k, metadata.top_p)
    if rule.budget is not None:
        # A row without a slot has a budget of 0.
        before = budgets.at[step.slots].get(mode="fill", fill_value=0)
        is_new = step.is_new & (step.slots < budgets.shape[0])
        budget = jnp.where(is_new, rule.budget, before)

    def of_a_device(
        rule: Rule,
        draft_tokens: Array,
        num_drafted: Array,
        logits: Array,
        bonus_tokens: Array,
        requests: Requests | None,
        draft_probs: Array | None,
        budget: Array | None,
        key: Array | None,
        protected: Array,
        memory: Array | None,
    ) -> tuple[Array, Array, Array | None]:
        if key is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(ShardingAxisName.ATTN_DATA))
        found = keep(
            rule,
            draft_tokens,
            num_drafted,
            logits,
            bonus_tokens,
            max_drafted=max_drafted,
            requests=requests,
            draft_probs=draft_probs,
            key=key,
            protected=protected,
            memory=memory,
            budget=budget,
        )
        return found.tokens, found.num_rescued, found.budget

    split, whole = PartitionSpec(ShardingAxisName.ATTN_DATA), PartitionSpec()
    tokens, rescued, left = jax.shard_map(
        of_a_device,
        mesh=mesh,
        in_specs=(*[split] * 8, *[whole] * 3),
        out_specs=split,
        check_vma=False,
    )(
        rule, draft_tokens, num_drafted, logits, bonus_tokens, requests, draft_probs, budget,
        key, protected, memory,
    )  # fmt: skip
    if rule.budget is not None:
        budgets = budgets.at[step.slots].set(left, mode="drop")
    return tokens, jnp.sum(rescued), budgets
