"""A loosened rule in sglang-jax, where it verifies greedily: chains of drafts of one length.

Its DFlash worker verifies with one function of the logits, which `install` replaces. In its fused
EAGLE program, `predictions` replaces the argmax, one line of `draft_extend_fused.py`.
Tried with the source of August 2026 (commit cddbf6f) on a CPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from fly_jax.errors import FlyJaxError
from fly_jax.verification.rules import Rule, Why
from fly_jax.verification.verify import verify


def predictions(
    rule: Rule, draft_tokens: Int[Array, " tokens"], target_logits: Float[Array, "tokens vocab"], *,
    num_draft_tokens: int, protected: Bool[Array, " vocab"] | None = None,
) -> Int32[Array, " tokens"]:  # fmt: skip
    """The target's tokens, with the draft's own where the rule rescues it. Pure; for greedy rows.

    A comparison of drafts with the target's argmax then keeps what the rule keeps.

    Args:
      rule: without a budget, which would have to be carried from step to step (else FlyJaxError).
      draft_tokens: `num_draft_tokens` of each request, one request after the other; the first is
        the last one that was verified.
      target_logits: at the same places, so that each predicts the next draft token.
      num_draft_tokens: of each request, the verified one included.
      protected: tokens that are never rescued, nor replaced by a rescue.
    """
    if rule.budget is not None:
        raise FlyJaxError(
            "sglang-jax was given a rule with a risk budget, which it has nowhere to keep; leave "
            "the budget out."
        )
    drafts = draft_tokens.reshape(-1, num_draft_tokens)[:, 1:]
    logits = target_logits.reshape(-1, num_draft_tokens, target_logits.shape[-1])
    verdict = verify(rule, logits, drafts, protected=protected)
    argmax = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rescued = jnp.pad(verdict.why == Why.RESCUED.value, ((0, 0), (0, 1)))
    kept = jnp.where(rescued, jnp.pad(drafts.astype(jnp.int32), ((0, 0), (0, 1))), argmax)
    return kept.reshape(-1)


def install(rule: Rule, *, protected: Bool[Array, " vocab"] | None = None) -> None:
    """Makes sglang-jax's DFlash worker verify with a rule; call it where the model runs.

    `protected` is that of `predictions`: say, the tokens that end a text. Raises FlyJaxError for a
    rule with a budget, or an sglang-jax without that function.
    """
    worker: Any = importlib.import_module("sgl_jax.srt.speculative.dflash_worker")
    stock: Callable[..., Any] | None = getattr(worker, "dflash_greedy_verify", None)
    if stock is None or rule.budget is not None:
        raise FlyJaxError(
            "This sglang-jax has no dflash_greedy_verify in its DFlash worker, or the rule has a "
            "risk budget; install one from source (August 2026), and a rule without a budget."
        )
    stock = getattr(stock, "__wrapped__", stock)

    @functools.wraps(stock)
    def dflash_greedy_verify(draft_token: Any, target_logits: Any, *, draft_token_num: int) -> Any:
        mesh = jax.typeof(target_logits).sharding.mesh
        found: Callable[..., Array] = functools.partial(
            predictions, rule, num_draft_tokens=draft_token_num, protected=protected
        )
        if not mesh.empty:  # the engine's axes are explicit, and the rule's are not
            found = jax.sharding.auto_axes(found, out_sharding=PartitionSpec("data"))
        tokens = found(draft_token, target_logits)
        # The argmax of this gives the tokens back; XLA makes no array of it.
        logits = tokens[:, None] == jnp.arange(target_logits.shape[-1])
        return stock(draft_token, logits, draft_token_num=draft_token_num)

    worker.dflash_greedy_verify = dflash_greedy_verify
