"""One call, whatever the rows ask for: numbers are data, and a row is decided as if alone.

The support that a rule truncates to is what `accept` would keep, token by token. And evidence is
that of loops in float64, sharded or not.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden import layout_on
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from fly_jax import Budget, CorrectionMemory, Entropy, Layout, Needs, ShardingRules, evidence
from fly_jax.planning.hlo import exchanges
from fly_jax.verification.reductions import one_by_one, vocab_argmax
from fly_jax.verification.rules import Exact, Fly, Loose, Rule, Verdict, Why, accept, per_row
from fly_jax.verification.rules.loosened import Csd, Lenience, Lossy, Margin, Typical
from fly_jax.verification.sampling import Sampling, sample, sample_at, sampling_per_row
from fly_jax.verification.verify import truncated, verify, verify_flat

ROWS, DRAFT, VOCAB = 6, 7, 12
TOKENS = ROWS * (DRAFT + 1) + 3

decide = jax.jit(verify, static_argnames="layout")
gather = jax.jit(evidence, static_argnames=("needs", "layout"))
judge = jax.jit(accept)
cut = jax.jit(truncated, static_argnames="layout")
draw = jax.jit(sample_at)
decide_flat = jax.jit(verify_flat, static_argnames=("max_drafted", "layout"))


class Block(NamedTuple):
    rows: dict[str, np.ndarray]  # the inputs of `evidence`
    protected: np.ndarray
    memory: np.ndarray

    def of(self, rows: Any) -> dict[str, np.ndarray]:
        return {name: values[rows] for name, values in self.rows.items()}

    def shared(self, rule: Rule, num_rows: int = ROWS) -> dict[str, Any]:
        given = {"protected": self.protected, "memory": self.memory}
        return given | {"state": rule.initial_state(num_rows)}


def block_of(seed: int, rows: int = ROWS) -> Block:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, DRAFT + 1, VOCAB)) * rng.choice([0.5, 2.0], (rows, 1, 1))
    draft_logits = logits[:, :-1] + rng.normal(size=(rows, DRAFT, VOCAB)) * 0.7
    memory = CorrectionMemory("v", min_count=1, num_keys=VOCAB**2)
    pairs = [(d, t) for d in range(VOCAB) for t in range(VOCAB)]
    memory.add([pair for pair in pairs if rng.random() < 0.5], 2)
    num_drafted = np.where(rng.random(rows) < 0.5, DRAFT, rng.integers(DRAFT + 1, size=rows))
    given = {
        "logits": logits.astype(np.float32),
        "draft_tokens": draft_logits.argmax(-1).astype(np.int32),
        "draft_logits": draft_logits.astype(np.float32),
        "num_drafted": num_drafted.astype(np.int32),
    }
    return Block(given, np.arange(VOCAB) == rng.integers(VOCAB), memory.keys())


def verdict_on(
    block: Block, rule: Rule, sampling: Sampling | None = None, key: Any = None, rows: Any = None
) -> Verdict:
    """The verdict on some rows of a block, or all of them."""
    rows = np.arange(len(block.rows["logits"])) if rows is None else np.asarray(rows)
    given = block.of(rows) | block.shared(rule, len(rows))
    return decide(rule, **given, sampling=sampling, key=key)


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def alone(block: Block, rule: Rule, sampling: Sampling | None, key: Any, row: int) -> Verdict:
    """The verdict on one row; in two programs, so that not every rule compiles the evidence."""
    here = block.of([row])
    seen = gather(**here, needs=per_row(POOL).needs, sampling=sampling, key=key)
    drafted = {name: here[name] for name in ("draft_tokens", "num_drafted")}
    return judge(rule, seen, **drafted, **block.shared(rule, 1))


def row_of(verdict: Verdict, row: int) -> Verdict:
    return jax.tree.map(lambda leaf: leaf[row : row + 1], verdict)


# Every number of every rule, in one rule.
BOTH = (Fly(0.3, window_size=2) | Csd(0.02)) & Typical(0.05, 0.2)
EVERYTHING = Budget(BOTH | Lossy(0.4) | Lenience(0.7) | Margin(gap=0.2), total=3.0)
NUMBERS = 9 + 3  # of the rule and of its sampling


@pytest.mark.parametrize("by_row", [False, True], ids=["scalars", "rows"])
def test_no_number_is_compiled_in(by_row: bool) -> None:
    block, traces = block_of(0), []
    given = block.rows | {"memory": block.memory, "state": EVERYTHING.initial_state(ROWS)}

    @jax.jit
    def decide(rule: Rule, sampling: Sampling, given: dict[str, Any]) -> Verdict:
        traces.append(rule)
        return verify(rule, **given, sampling=sampling, key=jax.random.key(0))

    leaves, structure = jax.tree.flatten((EVERYTHING, Sampling(0.9, 10, 0.95)))
    assert len(leaves) == NUMBERS
    if by_row:
        types = [np.float32 if type(leaf) is float else np.int32 for leaf in leaves]
        leaves = [np.full(ROWS, *pair) for pair in zip(leaves, types, strict=True)]
    before = decide(*jax.tree.unflatten(structure, leaves), given)
    for at, leaf in enumerate(leaves):
        changed = leaf + (1 if np.asarray(leaf).dtype.kind == "i" else 0.4)
        if by_row:
            changed = np.where(np.arange(ROWS) == 2, changed, leaf).astype(leaf.dtype)
        numbers = [*leaves[:at], changed, *leaves[at + 1 :]]
        after = decide(*jax.tree.unflatten(structure, numbers), given)
        if by_row:  # what is changed for one row is changed for no other
            for row in set(range(ROWS)) - {2}:
                assert_same(row_of(after, row), row_of(before, row))
    assert len(traces) == 1


def test_whole_numbers_for_numbers_are_no_other_program() -> None:
    traces: list[None] = []
    add = jax.jit(lambda *_: traces.append(None))
    add(Sampling(0.5, top_p=0.5), Margin(gap=0.5))
    add(Sampling(1, top_p=1), Margin(gap=2))
    assert len(traces) == 1


def test_nothing_runs_on_the_device_to_make_a_rule(compilations: Callable[[], list[str]]) -> None:
    with jax.transfer_guard("disallow"):
        rule = per_row([EVERYTHING, Exact(), Fly(), Fly() & Margin(), Budget(Csd(), 1.0)])
        sampling_per_row([None, Sampling(0.3, 4), Sampling(1.0)])
        rule.clauses()
        assert rule.longest_window == 6
        assert rule.strict_tail.tolist() == [0, 0, 6, 6, 0]
        rule.check(7)
        assert_refused("window_size=6", rule.check, 6)
    assert compilations() == []


# What the rows of a mixed batch ask for.
POOL: list[Rule] = [
    Exact(), Fly(window_size=1), Fly(0.0, window_size=2), Margin(gap=0.5),
    Fly(0.6, window_size=1) | Csd(0.02), Lossy(0.2) | Lossy(0.1) & Margin(gap=1.0), Typical(),
    Lenience(0.3), Csd(0.05, memory=False), Csd(1e-6), Budget(Margin(gap=3.0), 1.0),
    Budget(Fly(0.1, window_size=0), 0.2), Budget(Lenience(0.2), 0.7),
]  # fmt: skip
SAMPLINGS = [None, Sampling(0.4), Sampling(1.0, 4, 0.9), Sampling(1.3, 0, 0.8)]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), is_sampled=st.booleans())
def test_each_row_gets_what_it_would_get_alone(seed: int, is_sampled: bool) -> None:
    rng = np.random.default_rng(seed)
    block, keys = block_of(seed), jax.random.split(jax.random.key(seed), ROWS)
    rules = [POOL[index] for index in rng.choice(len(POOL), ROWS)]
    samplings = [SAMPLINGS[index] for index in rng.choice(len(SAMPLINGS), ROWS)]
    sampling = sampling_per_row(samplings) if is_sampled else None
    together = verdict_on(block, per_row(rules, like=POOL), sampling, keys)
    for row, rule in enumerate(rules):
        mixed = row_of(together, row)
        if rule.budget is None:
            mixed = dataclasses.replace(mixed, regret=None)
        sampling = samplings[row] if is_sampled else None
        assert_same(mixed, alone(block, rule, sampling, keys[row : row + 1], row))


def test_a_mixed_batch_is_one_program_whoever_is_in_it() -> None:
    def batch(*rules: Rule, like: list[Rule] = POOL) -> Any:
        leaves, structure = jax.tree.flatten(per_row(rules, like=like))
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    one = batch(Exact(), Fly(window_size=3), Margin(gap=0.1))
    assert one == batch(Budget(Margin(gap=2.0), 5.0), Exact(), Exact())
    assert batch(Fly(), Margin(), like=[]) == batch(Margin(gap=1.0), Fly(0.1), like=[])


def test_the_pool_rescues_and_refuses_in_every_way() -> None:
    """What is compared above is no handful of trivial verdicts."""
    blocks = [block_of(seed, len(POOL)) for seed in range(30)]
    found = np.stack([verdict_on(block, per_row(POOL)).why for block in blocks])
    assert {*map(Why, found.ravel().tolist())} == {*Why} - {Why.CORRECTED, Why.BONUS}


def test_rows_that_cannot_be_united_are_refused() -> None:
    assert_refused("different entropies", per_row, [Fly(), Fly(entropy="full")])
    assert_refused("array of numbers", per_row, [Margin(gap=np.ones(3, np.float32))])
    assert_refused("cuts the target", per_row, [Exact()], [Exact(Margin())])


def test_of_one_key_each_row_makes_its_own_and_knows_no_other_row() -> None:
    block, key, sampling = block_of(7), jax.random.key(3), Sampling(1.5)
    together = verdict_on(block, Exact(), sampling, key)
    first = verdict_on(block, Exact(), sampling, key, [0, 1])
    assert_same(first, jax.tree.map(lambda leaf: leaf[:2], together))
    keys = jax.random.split(key, 2)
    assert_refused("one for each", verdict_on, block, Exact(), sampling, keys)


def test_a_text_position_has_its_noise_in_any_pass() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5, VOCAB)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 3)
    positions = np.arange(5) + np.array([[4], [0], [9]])
    together = draw(logits, Sampling(), keys, positions)
    later = draw(logits[1:, 3:], Sampling(), keys[1:], positions[1:, 3:])
    np.testing.assert_array_equal(later, together[1:, 3:])


def flattened(block: Block, with_bonus: bool) -> dict[str, np.ndarray]:
    """A block in vLLM's layout: one request after the other, and padding up to `TOKENS`."""
    counts = block.rows["num_drafted"] + with_bonus
    flat = {}
    for name, filler in (("logits", 1), ("draft_tokens", 3), ("draft_logits", 0)):
        values = block.rows[name]
        beyond = np.full_like(values[:, :1], filler)  # of drafts, which have no bonus position
        rows = zip(np.concatenate((values, beyond), axis=1), counts, strict=True)
        kept = np.concatenate([values[:count] for values, count in rows])
        padding = np.ones((TOKENS - len(kept), *kept.shape[1:]), kept.dtype)
        flat[name] = np.concatenate((kept, padding))
    return flat


def emitted(verdict: Verdict, drafts: np.ndarray, places: np.ndarray) -> list[int]:
    """What each row emits, in so many places, and -1 elsewhere."""
    kept, following = verdict.num_accepted.tolist(), verdict.next_token.tolist()
    rows = [
        [*drafts[row, : kept[row]].tolist(), following[row], *[-1] * DRAFT][: places[row]]
        for row in range(ROWS)
    ]
    return [*itertools.chain(*rows), *[-1] * (TOKENS - places.sum())]


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(4))
def test_the_flat_layout_decides_as_rows_do(seed: int, is_sampled: bool) -> None:
    block = block_of(seed)
    rule = per_row([POOL[(seed + 3 * row) % len(POOL)] for row in range(ROWS)], like=POOL)
    sampling = sampling_per_row([SAMPLINGS[row % 4] for row in range(ROWS)]) if is_sampled else None
    key = jax.random.key(seed)
    rows = verdict_on(block, rule, sampling, key)
    num_drafted, drafts = block.rows["num_drafted"], block.rows["draft_tokens"]
    shared = block.shared(rule) | {"sampling": sampling, "key": key}
    shared |= {"num_drafted": num_drafted, "max_drafted": DRAFT}
    flat = decide_flat(rule, **flattened(block, with_bonus=True), **shared)
    assert_same(flat.verdict, rows)
    assert flat.tokens.tolist() == emitted(rows, drafts, num_drafted + 1)

    # As tpu-inference has it: the engine has drawn the bonus tokens, which come last.
    bonus = np.arange(50, 50 + ROWS, dtype=np.int32)
    inputs = flattened(block, with_bonus=False)
    if is_sampled and seed == 0:  # probabilities instead of logits, where they are the same
        shared["sampling"] = sampling = Sampling(1.0)
        rows = verdict_on(block, rule, sampling, key)
        inputs["draft_probs"] = np.asarray(jax.nn.softmax(inputs.pop("draft_logits")))
    flat = decide_flat(rule, **inputs, bonus_tokens=bonus, **shared)
    is_whole = np.asarray(rows.num_accepted) == num_drafted
    rows = dataclasses.replace(rows, next_token=np.where(is_whole, bonus, rows.next_token))
    assert_same(flat.verdict, rows)
    bonuses = np.where(is_whole, bonus, -1).tolist()
    assert flat.tokens.tolist() == emitted(rows, drafts, num_drafted) + bonuses


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_missing_or_does_not_fit_is_said() -> None:
    logits, drafts = block_of(0).rows["logits"], block_of(0).rows["draft_tokens"]
    given = {"num_drafted": np.array([DRAFT]), "max_drafted": DRAFT}
    flat, sampled = (Exact(), logits[0], np.append(drafts[0], 0)), {"sampling": Sampling()}
    assert_refused("key", decide, Exact(), logits, drafts, **sampled)
    assert_refused("key", decide_flat, *flat, **given, **sampled)
    assert_refused("key", sample, logits[0], **sampled)
    assert_refused("one row of logits", decide_flat, Exact(), logits[0], drafts[0], **given)
    assert_refused(r"\(6, 8, vocabulary\)", evidence, logits[:, 1:], drafts)
    drawn = sampled | {"draft_logits": logits[:, 1:, 1:], "key": jax.random.key(0)}
    assert_refused("vocabulary", evidence, logits, drafts, **drawn)


def test_rebuilding_a_rule_checks_nothing() -> None:
    leaves, structure = jax.tree.flatten(Margin())
    for placeholder in (object(), None, -1.0):
        rebuilt = jax.tree.unflatten(structure, [placeholder] * len(leaves))
        assert rebuilt.gap is placeholder
    Margin(gap=np.full(3, -1.0))  # an array is data, and so not checked


# Of what is cut to a support.
MANY, PLACES, WORDS = SHAPE = 8, 3, 16
SUPPORTS: dict[str, Loose] = {
    "fly": Fly(0.3, 0), "fly, full entropy": Fly(0.3, 0, "normalized"), "margin": Margin(1.0),
    "lossy": Lossy(0.1), "lenience": Lenience(0.2), "typical": Typical(0.2, 0.5),
    "both": Fly(0.3, 0) & Margin(2.0), "either": Lossy(0.2) | Margin(0.5),
}  # fmt: skip
PROTECTED = np.arange(WORDS) % 5 == 3


@functools.partial(jax.jit, static_argnames="rule_name")
def kept(rule_name: str, logits: jax.Array) -> jax.Array:
    """Whether `accept` keeps each token of the vocabulary, drafted alone: [positions, vocab]."""
    rule, number = SUPPORTS[rule_name], len(logits) * WORDS
    drafts = jnp.tile(jnp.arange(WORDS), len(logits))[:, None]
    every = jnp.broadcast_to(logits.repeat(WORDS, axis=0)[:, None], (number, 2, WORDS))
    seen = evidence(every, drafts, needs=rule.needs)
    verdict = accept(rule, seen, drafts, protected=PROTECTED)
    return (verdict.num_accepted == 1).reshape(-1, WORDS)


@pytest.mark.parametrize("name", SUPPORTS)
def test_the_support_is_what_the_rule_keeps(name: str) -> None:
    logits = oracle.random_logits(7, SHAPE)
    flat = logits.reshape(-1, WORDS)
    found = np.asarray(cut(SUPPORTS[name], logits, protected=PROTECTED)).reshape(flat.shape)
    expected = np.asarray(kept(name, flat))
    assert 1 < expected.sum(axis=1).mean() < WORDS
    np.testing.assert_array_equal(found, np.where(expected, flat, -np.inf))
    assert np.isfinite(found[np.arange(len(flat)), flat.argmax(axis=1)]).all()


def test_windows_cut_nothing_and_each_row_has_its_protected_tokens() -> None:
    logits = oracle.random_logits(8, SHAPE)
    protected = np.stack([PROTECTED, *[np.zeros(WORDS, bool)] * (MANY - 1)])
    alone, deferred = (cut(rule, logits, protected=protected) for rule in (Fly(0.3, 0), Fly()))
    np.testing.assert_array_equal(alone, deferred)
    np.testing.assert_array_equal(deferred[:1], cut(Fly(), logits[:1], protected=PROTECTED))


def test_a_mesh_cuts_alike() -> None:
    layout = Layout(layout_on("2x4").mesh, ShardingRules(rows=("x",), vocab=("y",)))
    logits = oracle.random_logits(9, SHAPE)
    placed = jax.device_put(logits, layout.sharding(("rows", None, "vocab"), logits.shape))
    rule = SUPPORTS["either"] | Fly(0.3, 0)
    found = cut(rule, placed, protected=PROTECTED, layout=layout)
    np.testing.assert_array_equal(found, cut(rule, logits, protected=PROTECTED))


def test_exact_decoding_of_a_support_is_that_of_cut_logits() -> None:
    logits, rule = oracle.random_logits(10, SHAPE), SUPPORTS["both"]
    drafts = np.asarray(logits)[:, :-1].argsort(axis=2)[:, :, -2].astype(np.int32)
    given = {"sampling": Sampling(1.0), "key": jax.random.split(jax.random.key(5), MANY)}
    expected = decide(Exact(), cut(rule, logits, protected=PROTECTED), drafts, **given)
    found = decide(Exact(rule), logits, drafts, protected=PROTECTED, **given)
    assert not np.array_equal(found.why, decide(Exact(), logits, drafts, **given).why)
    padded = np.pad(drafts, ((0, 0), (0, 1))).ravel()
    counts, flat = np.full(MANY, PLACES - 1), logits.reshape(-1, WORDS)
    sizes = {"max_drafted": PLACES - 1, "protected": PROTECTED}
    in_flat = decide_flat(Exact(rule), flat, padded, counts, **sizes, **given).verdict
    for one in (found, in_flat):
        np.testing.assert_array_equal(one.why, expected.why)
        np.testing.assert_array_equal(one.next_token, expected.next_token)


# Of evidence alone.
MEASURES = [Entropy("top_k"), Entropy("top_k", 5), Entropy("full"), Entropy("normalized")]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 25]), st.sampled_from(MEASURES))
def test_greedy_evidence_is_the_oracles(seed: int, num_draft: int, entropy: Entropy) -> None:
    rng, rows, vocab = np.random.default_rng(seed), 4, 7
    logits = oracle.random_logits(seed, (rows, num_draft + 1, vocab))
    draft, is_own = rng.integers(vocab, size=(rows, num_draft)), rng.random((rows, num_draft)) < 0.5
    draft = np.where(is_own, logits[:, :-1].argmax(-1), draft)
    num_drafted = rng.integers(num_draft + 1, size=rows)
    needs = Needs(entropy, full_entropy=True)
    seen = gather(logits, draft, needs=needs, num_drafted=num_drafted)
    seen = jax.tree.map(np.asarray, seen)
    for at in np.ndindex(rows, num_draft + 1):
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


@pytest.mark.parametrize(("name", "case", "more"), [
    *(("vocabulary over x and y", case, case.endswith("top-k")) for case in CASES),
    ("rows over y", "sampled, top-k and top-p", True), ("rows over x", "sampled", False),
    ("rows only", "sampled, top-k and top-p", False),
])  # fmt: skip
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
    expected = gather(logits, draft, draft_logits=draft_logits, **known, needs=needs)
    known["draft_logits"] = placed_draft
    program = gather.lower(placed, draft, **known, needs=needs, layout=layout).compile()
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
