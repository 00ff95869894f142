"""Evidence against loops in float64, and sharded evidence against unsharded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden import layout_on
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from fly_jax import Entropy, Layout, Needs, Sampling, ShardingRules, evidence
from fly_jax.planning.hlo import exchanges
from fly_jax.verification.reductions import one_by_one, vocab_argmax

ROWS, VOCAB = 4, 7
MEASURES = [Entropy("top_k"), Entropy("top_k", 5), Entropy("full"), Entropy("normalized")]

compiled = jax.jit(evidence, static_argnames=("needs", "layout"))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 25]), st.sampled_from(MEASURES))
def test_greedy_evidence_is_the_oracles(seed: int, num_draft: int, entropy: Entropy) -> None:
    rng = np.random.default_rng(seed)
    logits = oracle.random_logits(seed, (ROWS, num_draft + 1, VOCAB))
    draft, is_own = rng.integers(VOCAB, size=(ROWS, num_draft)), rng.random((ROWS, num_draft)) < 0.5
    draft = np.where(is_own, logits[:, :-1].argmax(-1), draft)
    num_drafted = rng.integers(num_draft + 1, size=ROWS)
    needs = Needs(entropy, full_entropy=True)
    seen = compiled(logits, draft, needs=needs, num_drafted=num_drafted)
    seen = jax.tree.map(np.asarray, seen)
    for at in np.ndindex(ROWS, num_draft + 1):
        one = jax.tree.map(lambda leaf, at=at: leaf[at].item(), seen)
        token = int(draft[at]) if at[1] < num_drafted[at[0]] else None
        expected = oracle.greedy_evidence(logits[at], token, entropy.measure, entropy.top_k)
        assert one.argmax == one.replacement == expected.argmax
        exact = "accepted", "argmax_logit", "draft_logit"
        assert [getattr(one, name) for name in exact] == [getattr(expected, name) for name in exact]
        # Where the largest logit and the rest cancel, float32's spacing at the logits counts.
        assert one.log_sum_exp == pytest.approx(expected.log_sum_exp, rel=1e-5, abs=1e-6)
        assert one.entropy == pytest.approx(expected.entropy, rel=1e-4, abs=1e-6)
        full = oracle.greedy_evidence(logits[at], token, "full", 0).entropy
        assert one.full_entropy == pytest.approx(full, rel=1e-4, abs=1e-6)
        log_prob = expected.draft_logit - expected.log_sum_exp
        assert one.draft_log_prob == pytest.approx(log_prob, rel=1e-4, abs=1e-5)


def test_the_way_of_tpus_finds_the_same_largest_values() -> None:
    """Ties, and vocabularies with fewer possible tokens than are asked for, included."""
    values = np.random.default_rng(0).integers(0, 6, (40, 12)).astype(np.float32)
    values[20:] = np.where(values[20:] < 5, -np.inf, values[20:])
    found, ids = jax.jit(one_by_one, static_argnames="count")(values, count=4)
    np.testing.assert_array_equal(found, -np.sort(-values)[:, :4])
    possible = np.isfinite(found)
    lowest = np.argsort(-values, axis=-1, kind="stable")[:, :4]
    np.testing.assert_array_equal(np.asarray(ids)[possible], lowest[possible])


def test_numbers_are_float32_for_bfloat16_logits() -> None:
    logits = jnp.asarray(oracle.random_logits(1, (2, 4, 300)), jnp.bfloat16)
    low, high = (
        evidence(logits.astype(dtype), jnp.zeros((2, 3), jnp.int32), needs=Needs(Entropy("full")))
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    for one, other in zip(jax.tree.leaves(low), jax.tree.leaves(high), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_ids_outside_the_vocabulary_are_impossible_and_nothing_is_there_unasked() -> None:
    seen = evidence(jnp.zeros((1, 3, 5)), jnp.array([[-1, 5]]))
    assert not bool(seen.accepted.any())
    np.testing.assert_array_equal(seen.draft_log_prob, np.full((1, 3), -np.inf))
    assert (seen.entropy, seen.full_entropy, seen.scaled_uniform, seen.top) == (None,) * 4


@pytest.mark.usefixtures("unchecked_shapes")
def test_shapes_that_do_not_fit_are_refused() -> None:
    drafts, other = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3, 6))
    assert_refused(r"\(2, 4, vocabulary\)", evidence, jnp.zeros((2, 3, 5)), drafts)
    drawn = {"sampling": Sampling(), "draft_logits": other, "key": jax.random.key(0)}
    assert_refused("vocabulary", evidence, jnp.zeros((2, 4, 5)), drafts, **drawn)


# Mesh axes of the rows and of the vocabulary, on a mesh of 2 by 4.
LAYOUTS = {"vocabulary over x and y": ((), ("x", "y")), "rows over y": (("y",), ("x",))}
LAYOUTS |= {"rows over x": (("x",), ("y",)), "rows only": (("y",), ())}
WIDE, DRAFTED, SHARDED_ROWS = 4096, 5, 4
CASES = {
    "greedy, top-k": (Entropy("top_k"), None),
    "greedy, more than a shard": (Entropy("top_k", 600), None),
    "greedy, full": (Entropy("full"), None), "sampled": (Entropy("normalized"), Sampling(0.9)),
    "sampled, top-k and top-p": (Entropy("top_k"), Sampling(0.7, top_k=50, top_p=0.83)),
}  # fmt: skip
MESH = layout_on("2x4").mesh


@pytest.mark.parametrize(
    ("name", "case", "more"),
    [
        *(("vocabulary over x and y", case, case.endswith("top-k")) for case in CASES),
        ("rows over y", "sampled, top-k and top-p", True),
        ("rows over x", "sampled", False),
        ("rows only", "sampled, top-k and top-p", False),
    ],
)
def test_sharded_evidence_is_the_same_and_moves_no_vocabulary(
    name: str, case: str, more: bool
) -> None:
    (entropy, sampling), (rows, vocab) = CASES[case], LAYOUTS[name]
    layout = Layout(MESH, ShardingRules(rows=rows, vocab=vocab))
    rng = np.random.default_rng(0)
    logits = oracle.random_logits(0, (SHARDED_ROWS, DRAFTED + 1, WIDE))
    logits += 0.0  # -0.0 ties with 0.0 where they are compared, and not where they are sorted
    logits[0, 0] = 0.0  # ties between all shards
    logits[0, 1, [70, 1200, 3450]] = 50.0  # ties between some
    draft_logits = logits[:, :-1] + rng.normal(size=(SHARDED_ROWS, DRAFTED, WIDE)).astype("f")
    draft = rng.integers(WIDE, size=(SHARDED_ROWS, DRAFTED))
    draft[:, ::2] = logits[:, :-1:2].argmax(-1)
    sharding = layout.sharding(("rows", None, "vocab"), logits.shape)
    placed, placed_draft = jax.device_put((logits, draft_logits), sharding)
    known = {"num_drafted": np.array([5, 3, 0, 4]), "key": jax.random.key(4), "sampling": sampling}
    num_top = 5 if more else 0
    needs = Needs(entropy, full_entropy=more, top=num_top)
    expected = compiled(logits, draft, draft_logits=draft_logits, **known, needs=needs)
    known["draft_logits"] = placed_draft
    program = compiled.lower(placed, draft, **known, needs=needs, layout=layout).compile()
    got = program(placed, draft, **known)

    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert (expected.top is not None) == more
    leaves = jax.tree.leaves_with_path(got)
    for (path, one), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        off = 1e-5 if one.dtype == jnp.float32 else 0.0
        np.testing.assert_allclose(one, other, rtol=off, atol=off, err_msg=str(path))

    sizes = [max(map(math.prod, one.shapes)) for one in exchanges(program.as_text(), 8)]
    shards = math.prod(MESH.shape[axis] for axis in vocab)
    if shards > 1:
        assert sizes, "a sharded vocabulary must be merged somehow"
    assert (expected.scaled_uniform is not None) == (sampling is not None)
    # The distributions of target and draft are processed together.
    positions = SHARDED_ROWS * (DRAFTED + 1) * (1 if sampling is None else 2)
    # Of every shard at most the few numbers of its top-k, and never a shard of the vocabulary.
    largest = max(entropy.top_k, num_top)
    numbers = shards * min(largest, WIDE // shards) if entropy.measure == "top_k" else 1
    if sampling is not None and sampling.top_k is not None:
        numbers = WIDE // 8 - 1  # the splitters of the shards, twice
    assert all(size <= positions * numbers for size in sizes), sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_value_is_found_where_numpy_finds_it(dtype: str) -> None:
    """The first of equal ones; where all are hidden, or none is a number, a token all the same."""
    values = np.random.default_rng(5).integers(0, 9, (6, 4, 100)).astype(np.float32)
    values[1], values[2, :, 7], values[3, 0, 50] = -np.inf, np.inf, np.nan
    found = jax.jit(vocab_argmax)(jnp.asarray(values, dtype))
    expected = values.argmax(axis=-1)
    expected[3, 0] = 0
    np.testing.assert_array_equal(found, expected)
