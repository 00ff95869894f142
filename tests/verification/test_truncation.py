"""The support that a rule truncates to is what `accept` would keep, token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType

from fly_jax.sharding.rules import Layout, ShardingRules
from fly_jax.verification.evidence import evidence
from fly_jax.verification.rules import Exact, Fly, Lenience, Loose, Lossy, Margin, Typical, accept
from fly_jax.verification.sampling import Sampling
from fly_jax.verification.verify import truncated, verify, verify_flat

ROWS, POSITIONS, VOCAB = 8, 3, 16
RULES: dict[str, Loose] = {
    "fly": Fly(0.3, 0),
    "fly, full entropy": Fly(0.3, 0, "normalized"),
    "margin": Margin(1.0),
    "lossy": Lossy(0.1),
    "lenience": Lenience(0.2),
    "typical": Typical(0.2, 0.5),
    "both": Fly(0.3, 0) & Margin(2.0),
    "either": Lossy(0.2) | Margin(0.5),
}
PROTECTED = np.arange(VOCAB) % 5 == 3

cut = jax.jit(truncated, static_argnames="layout")


@functools.partial(jax.jit, static_argnames="rule_name")
def kept(rule_name: str, logits: jax.Array) -> jax.Array:
    """Whether `accept` keeps each token of the vocabulary, drafted alone: [positions, vocab]."""
    rule, number = RULES[rule_name], len(logits) * VOCAB
    drafts = jnp.tile(jnp.arange(VOCAB), len(logits))[:, None]
    every = jnp.broadcast_to(logits.repeat(VOCAB, axis=0)[:, None], (number, 2, VOCAB))
    seen = evidence(every, drafts, needs=rule.needs)
    verdict = accept(rule, seen, drafts, protected=PROTECTED)
    return (verdict.num_accepted == 1).reshape(-1, VOCAB)


@pytest.mark.parametrize("name", RULES)
def test_the_support_is_what_the_rule_keeps(name: str) -> None:
    logits = oracle.random_logits(7, (ROWS, POSITIONS, VOCAB))
    flat = logits.reshape(-1, VOCAB)
    found = np.asarray(cut(RULES[name], logits, protected=PROTECTED)).reshape(-1, VOCAB)
    expected = np.asarray(kept(name, flat))
    assert 1 < expected.sum(axis=1).mean() < VOCAB
    np.testing.assert_array_equal(found, np.where(expected, flat, -np.inf))
    assert np.isfinite(found[np.arange(len(flat)), flat.argmax(axis=1)]).all()


def test_windows_look_elsewhere() -> None:
    logits = oracle.random_logits(8, (ROWS, POSITIONS, VOCAB))
    protected = np.stack([PROTECTED, *[np.zeros(VOCAB, bool)] * (ROWS - 1)])
    alone, deferred = (cut(rule, logits, protected=protected) for rule in (Fly(0.3, 0), Fly()))
    np.testing.assert_array_equal(alone, deferred)
    of_first = cut(Fly(), logits[:1], protected=PROTECTED)
    np.testing.assert_array_equal(deferred[:1], of_first)


def test_a_mesh_cuts_alike() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    layout = Layout(mesh, ShardingRules(rows=("x",), vocab=("y",)))
    logits = oracle.random_logits(9, (ROWS, POSITIONS, VOCAB))
    placed = jax.device_put(logits, layout.sharding(("rows", None, "vocab"), logits.shape))
    rule = RULES["either"] | Fly(0.3, 0)
    found = cut(rule, placed, protected=PROTECTED, layout=layout)
    np.testing.assert_array_equal(found, cut(rule, logits, protected=PROTECTED))


def test_exact_decoding_of_a_support_is_that_of_cut_logits() -> None:
    logits, rule = oracle.random_logits(10, (ROWS, POSITIONS, VOCAB)), RULES["both"]
    drafts = np.asarray(logits)[:, :-1].argsort(axis=2)[:, :, -2].astype(np.int32)
    given = {"sampling": Sampling(1.0), "key": jax.random.split(jax.random.key(3), ROWS)}
    expected = verify(Exact(), cut(rule, logits, protected=PROTECTED), drafts, **given)
    found = verify(Exact(rule), logits, drafts, protected=PROTECTED, **given)
    assert not np.array_equal(found.why, verify(Exact(), logits, drafts, **given).why)
    padded = np.pad(drafts, ((0, 0), (0, 1))).ravel()
    counts, flat = np.full(ROWS, POSITIONS - 1), logits.reshape(-1, VOCAB)
    sizes = {"max_drafted": POSITIONS - 1, "protected": PROTECTED}
    in_flat = verify_flat(Exact(rule), flat, padded, counts, **sizes, **given).verdict
    for one in (found, in_flat):
        np.testing.assert_array_equal(one.why, expected.why)
        np.testing.assert_array_equal(one.next_token, expected.next_token)
