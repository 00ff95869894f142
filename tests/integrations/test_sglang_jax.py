"""The rule in sglang-jax's shapes; and in its own function, where its source is installed."""

import contextlib
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refusals import assert_refused

from fly_jax import Budget, Fly, Margin, Rule, verify
from fly_jax.integrations import sglang_jax

ROWS, WIDTH, VOCAB = 8, 9, 12
RULE = Fly(0.8, 2)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Draft tokens [rows, width], the verified one first, and logits [rows, width, vocab]."""
    chance = np.random.default_rng(3)
    logits = chance.normal(0, 1.5, (ROWS, WIDTH, VOCAB)).astype(np.float32)
    is_own, drafts = chance.random((ROWS, WIDTH)) < 0.8, chance.integers(0, VOCAB, (ROWS, WIDTH))
    drafts[:, 1:] = np.where(is_own, logits.argmax(-1), drafts)[:, :-1]
    return drafts.astype(np.int32), logits


@functools.partial(jax.jit, static_argnums=0)
def predicted(rule: Rule, drafts: jax.Array, logits: jax.Array) -> jax.Array:
    flat = drafts.reshape(-1), logits.reshape(-1, VOCAB)
    return sglang_jax.predictions(rule, *flat, num_draft_tokens=WIDTH)


def test_a_comparison_with_the_predictions_keeps_what_the_rule_keeps() -> None:
    drafts, logits = batch()
    verdict = jax.jit(verify)(RULE, logits, drafts[:, 1:])
    found = np.asarray(predicted(RULE, drafts, logits)).reshape(ROWS, WIDTH)
    kept = np.cumprod(drafts[:, 1:] == found[:, :-1], axis=1).sum(axis=1)
    assert kept.tolist() == verdict.num_accepted.tolist()
    assert found[np.arange(ROWS), kept].tolist() == verdict.next_token.tolist()
    assert int(verdict.num_rescued.sum()) > 2


def test_a_budget_is_refused() -> None:
    assert_refused("nowhere to keep", predicted, Budget(Margin(), 1.0), *batch())


@pytest.mark.skipif(
    importlib.util.find_spec("sgl_jax") is None,
    reason="sglang-jax is not installed; its published package has no DFlash: install its source",
)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_its_own_verification_keeps_what_the_rule_keeps(is_sharded: bool) -> None:
    from sgl_jax.srt.speculative import dflash_worker

    sglang_jax.install(RULE)
    drafts, logits = batch()
    verdict = verify(RULE, logits, drafts[:, 1:])
    inputs = jnp.asarray(drafts.reshape(-1)), jnp.asarray(logits.reshape(-1, VOCAB))
    if is_sharded:  # as the engine has them
        mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
        specs = PartitionSpec("data"), PartitionSpec("data", "tensor")
        inputs = jax.device_put(inputs, tuple(NamedSharding(mesh, spec) for spec in specs))
    decide = jax.jit(dflash_worker.dflash_greedy_verify, static_argnames="draft_token_num")
    with jax.set_mesh(mesh) if is_sharded else contextlib.nullcontext():
        lengths, _, following, kept = decide(*inputs, draft_token_num=WIDTH)
    assert kept.tolist() == verdict.num_accepted.tolist()
    assert lengths.tolist() == (verdict.num_accepted + 1).tolist()
    assert following.tolist() == verdict.next_token.tolist()
