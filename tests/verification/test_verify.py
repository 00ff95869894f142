"""One call, whatever the rows ask for: numbers are data, and a row is decided as if alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import monitoring

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameters_of
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.data import STATIC, column, data_tree, log
from fly_jax.verification.evidence import evidence
from fly_jax.verification.rules import (
    RULES,
    Budget,
    Csd,
    Exact,
    Fly,
    Lenience,
    Lossy,
    Margin,
    Rule,
    RuleState,
    Typical,
    Verdict,
    Why,
    accept,
    per_row,
)
from fly_jax.verification.sampling import Sampling, sample, sample_at, sampling_per_row
from fly_jax.verification.verify import verify, verify_flat

ROWS, DRAFT, VOCAB = 6, 7, 12
TOKENS = ROWS * (DRAFT + 1) + 3

decide = jax.jit(verify, static_argnames="layout")
gather = jax.jit(evidence, static_argnames=("needs", "layout"))
judge = jax.jit(accept)
decide_flat = jax.jit(verify_flat, static_argnames=("max_drafted", "layout"))


@dataclasses.dataclass
class Block:
    logits: np.ndarray
    draft_tokens: np.ndarray
    draft_logits: np.ndarray
    num_drafted: np.ndarray
    protected: np.ndarray
    memory: np.ndarray


def block_of(seed: int, rows: int = ROWS) -> Block:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, DRAFT + 1, VOCAB)) * rng.choice([0.5, 2.0], (rows, 1, 1))
    draft_logits = logits[:, :-1] + rng.normal(size=(rows, DRAFT, VOCAB)) * 0.7
    memory = CorrectionMemory("v", min_count=1, num_keys=VOCAB**2)
    pairs = [(d, t) for d in range(VOCAB) for t in range(VOCAB)]
    memory.add([pair for pair in pairs if rng.random() < 0.5], 2)
    full = rng.random(rows) < 0.5
    return Block(
        logits.astype(np.float32),
        draft_logits.argmax(-1).astype(np.int32),
        draft_logits.astype(np.float32),
        np.where(full, DRAFT, rng.integers(DRAFT + 1, size=rows)).astype(np.int32),
        np.arange(VOCAB) == rng.integers(VOCAB),
        memory.keys(),
    )


def verdict_on(
    block: Block, rule: Rule, sampling: Sampling | None = None, key: Any = None, rows: Any = None
) -> Verdict:
    """The verdict on some rows of a block, or all of them."""
    rows = np.arange(len(block.logits)) if rows is None else np.asarray(rows)
    return decide(
        rule,
        block.logits[rows],
        block.draft_tokens[rows],
        num_drafted=block.num_drafted[rows],
        draft_logits=block.draft_logits[rows],
        sampling=sampling,
        key=key,
        protected=block.protected,
        memory=block.memory,
        state=rule.initial_state(len(rows)),
    )


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def alone(block: Block, rule: Rule, sampling: Sampling | None, key: Any, row: int) -> Verdict:
    """The verdict on one row; in two programs, so that not every rule compiles the evidence."""
    here = slice(row, row + 1)
    seen = gather(
        block.logits[here],
        block.draft_tokens[here],
        needs=per_row(POOL).needs,
        num_drafted=block.num_drafted[here],
        draft_logits=block.draft_logits[here],
        sampling=sampling,
        key=key,
    )
    return judge(
        rule,
        seen,
        block.draft_tokens[here],
        num_drafted=block.num_drafted[here],
        protected=block.protected,
        memory=block.memory,
        state=rule.initial_state(1),
    )


def row_of(verdict: Verdict, row: int) -> Verdict:
    return jax.tree.map(lambda leaf: leaf[row : row + 1], verdict)


# Every number of every rule, in one rule.
EVERYTHING = Budget(
    ((Fly(0.3, window_size=2) | Csd(0.02)) & Typical(0.05, 0.2))
    | Lossy(0.4)
    | Lenience(0.7)
    | Margin(gap=0.2),
    total=3.0,
)
NUMBERS = 9 + 3  # of the rule and of its sampling


@pytest.mark.parametrize("by_row", [False, True], ids=["scalars", "rows"])
def test_no_number_is_compiled_in(by_row: bool) -> None:
    block, traces = block_of(0), 0

    @jax.jit
    def decide(rule: Rule, sampling: Sampling, key: jax.Array, state: RuleState) -> Verdict:
        nonlocal traces
        traces += 1
        return verify(
            rule,
            block.logits,
            block.draft_tokens,
            draft_logits=block.draft_logits,
            sampling=sampling,
            key=key,
            memory=block.memory,
            state=state,
        )

    leaves, structure = jax.tree.flatten((EVERYTHING, Sampling(0.9, 10, 0.95)))
    assert len(leaves) == NUMBERS
    if by_row:
        types = [np.float32 if type(leaf) is float else np.int32 for leaf in leaves]
        leaves = [np.full(ROWS, *pair) for pair in zip(leaves, types, strict=True)]
    state, key = EVERYTHING.initial_state(ROWS), jax.random.key(0)
    before = decide(*jax.tree.unflatten(structure, leaves), key, state)
    for at, leaf in enumerate(leaves):
        step = 1 if np.asarray(leaf).dtype.kind == "i" else 0.4
        changed = (
            (leaf + step * (np.arange(ROWS) == 2)).astype(leaf.dtype) if by_row else leaf + step
        )
        after = decide(
            *jax.tree.unflatten(structure, [*leaves[:at], changed, *leaves[at + 1 :]]), key, state
        )
        if by_row:  # what is changed for one row is changed for no other
            for row in set(range(ROWS)) - {2}:
                assert_same(row_of(after, row), row_of(before, row))
    assert traces == 1


def test_whole_numbers_for_numbers_are_no_other_program() -> None:
    traces = 0

    @jax.jit
    def add(sampling: Sampling, rule: Rule) -> None:
        nonlocal traces
        traces += 1

    add(Sampling(0.5, top_p=0.5), Margin(gap=0.5))
    add(Sampling(1, top_p=1), Margin(gap=2))
    assert traces == 1


def test_nothing_runs_on_the_device_to_make_a_rule() -> None:
    compiled: list[str] = []
    listening = True

    def listen(event: str, duration: float, **_: Any) -> None:
        if listening and "compile" in event:
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    rule = per_row([EVERYTHING, Exact(), Fly(), Fly() & Margin(), Budget(Csd(), 1.0)])
    sampling_per_row([None, Sampling(0.3, 4), Sampling(1.0)])
    rule.clauses()
    assert rule.longest_window == 6
    assert rule.strict_tail.tolist() == [0, 0, 6, 6, 0]
    rule.check(7)
    with pytest.raises(FlyJaxError, match="window_size=6"):
        rule.check(6)
    listening = False
    assert compiled == []


# What the rows of a mixed batch ask for.
POOL: list[Rule] = [
    Exact(),
    Fly(window_size=1),
    Fly(0.0, window_size=2),
    Margin(gap=0.5),
    Fly(0.6, window_size=1) | Csd(0.02),
    Lossy(0.2) | Lossy(0.1) & Margin(gap=1.0),
    Typical(),
    Lenience(0.3),
    Csd(0.05, memory=False),
    Csd(1e-6),
    Budget(Margin(gap=3.0), 1.0),
    Budget(Fly(0.1, window_size=0), 0.2),
    Budget(Lenience(0.2), 0.7),
]
SAMPLINGS = [None, Sampling(0.4), Sampling(1.0, 4, 0.9), Sampling(1.3, 0, 0.8)]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), is_sampled=st.booleans())
def test_each_row_gets_what_it_would_get_alone(seed: int, is_sampled: bool) -> None:
    rng = np.random.default_rng(seed)
    block, keys = block_of(seed), jax.random.split(jax.random.key(seed), ROWS)
    rules = [POOL[index] for index in rng.choice(len(POOL), ROWS)]
    samplings = [SAMPLINGS[index] for index in rng.choice(len(SAMPLINGS), ROWS)]
    together = verdict_on(
        block, per_row(rules, like=POOL), sampling_per_row(samplings) if is_sampled else None, keys
    )
    for row, rule in enumerate(rules):
        sampling = samplings[row] if is_sampled else None
        mixed = row_of(together, row)
        if rule.budget is None:
            mixed = dataclasses.replace(mixed, regret=None)
        assert_same(mixed, alone(block, rule, sampling, keys[row : row + 1], row))


def test_a_mixed_batch_is_one_program_whoever_is_in_it() -> None:
    def batch(*rules: Rule) -> Any:
        return jax.tree.structure(per_row(rules, like=POOL)), [
            (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(per_row(rules, like=POOL))
        ]

    one = batch(Exact(), Fly(window_size=3), Margin(gap=0.1))
    assert one == batch(Budget(Margin(gap=2.0), 5.0), Exact(), Exact())
    assert jax.tree.structure(per_row([Fly(), Margin()])) == jax.tree.structure(
        per_row([Margin(gap=1.0), Fly(0.1)])
    )


def test_the_pool_rescues_and_refuses_in_every_way() -> None:
    """What is compared above is no handful of trivial verdicts."""
    rule = per_row(POOL)
    found = set()
    for seed in range(30):
        verdict = verdict_on(block_of(seed, len(POOL)), rule)
        found |= {Why(int(why)).name for why in np.unique(verdict.why)}
    assert found == {why.name for why in Why} - {"CORRECTED", "BONUS"}


def test_rows_that_cannot_be_united_are_refused() -> None:
    with pytest.raises(FlyJaxError, match="different entropies"):
        per_row([Fly(), Fly(entropy="full")])
    with pytest.raises(FlyJaxError, match="array of numbers"):
        per_row([Margin(gap=np.ones(3, np.float32))])


def test_a_row_of_temperature_0_is_decoded_greedily() -> None:
    block = block_of(4)
    temperature = np.array([0, 1, 0, 2, 0.5, 0], np.float32)
    rule = per_row([Exact(), Fly(), Fly(window_size=1), Fly(), Fly(), Lenience(0.4)], like=POOL)
    mixed = verdict_on(block, rule, Sampling(temperature, 5, 0.9), jax.random.key(1))
    greedy = verdict_on(block, rule)
    for row in np.flatnonzero(temperature == 0):
        assert_same(row_of(mixed, row), row_of(greedy, row))
    tokens = sample(
        block.logits[:, 0], Sampling(temperature), jax.random.split(jax.random.key(0), ROWS)
    )
    greedy_rows = temperature == 0
    best = block.logits[:, 0].argmax(-1)
    np.testing.assert_array_equal(tokens[greedy_rows], best[greedy_rows])


def test_a_rows_draws_are_its_own() -> None:
    block, keys = block_of(7), jax.random.split(jax.random.key(3), ROWS)
    sampling = Sampling(1.5)
    together = verdict_on(block, Exact(), sampling, keys)
    for rows in ([3, 0, 5, 1, 2, 4], [2, 5]):
        part = verdict_on(block, Exact(), sampling, keys[np.array(rows)], rows)
        assert_same(part, jax.tree.map(lambda leaf, rows=rows: leaf[np.array(rows)], together))
    # Of one key each row makes its own, and knows no other row.
    together = verdict_on(block, Exact(), sampling, jax.random.key(3))
    first = verdict_on(block, Exact(), sampling, jax.random.key(3), [0, 1])
    assert_same(first, jax.tree.map(lambda leaf: leaf[:2], together))
    with pytest.raises(FlyJaxError, match="one for each"):
        verdict_on(block, Exact(), sampling, keys[:2])


def test_a_text_position_has_its_noise_in_any_pass() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5, VOCAB)).astype(np.float32)
    keys, positions = (
        jax.random.split(jax.random.key(0), 3),
        np.arange(5) + np.array([[4], [0], [9]]),
    )
    together = sample_at(logits, Sampling(), keys, positions)
    later = sample_at(logits[1:, 3:], Sampling(), keys[1:], positions[1:, 3:])
    np.testing.assert_array_equal(later, together[1:, 3:])


def flattened(block: Block, with_bonus: bool) -> dict[str, np.ndarray]:
    """A block in vLLM's layout: one request after the other, and padding up to `TOKENS`."""
    counts = block.num_drafted + with_bonus
    kept = [(row, at) for row, count in enumerate(counts) for at in range(count)]
    rows, at = np.array(kept).T
    draft = np.pad(block.draft_tokens, ((0, 0), (0, 1)), constant_values=3)
    draft_logits = np.pad(block.draft_logits, ((0, 0), (0, 1), (0, 0)))
    flat = {
        "logits": block.logits[rows, at],
        "draft_tokens": draft[rows, at],
        "draft_logits": draft_logits[rows, at],
    }
    return {
        name: np.pad(
            values,
            ((0, TOKENS - len(values)),) + ((0, 0),) * (values.ndim - 1),
            constant_values=1,
        )
        for name, values in flat.items()
    }


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(4))
def test_the_flat_layout_decides_as_rows_do(seed: int, is_sampled: bool) -> None:
    block = block_of(seed)
    rule = per_row([POOL[(seed + 3 * row) % len(POOL)] for row in range(ROWS)], like=POOL)
    sampling = sampling_per_row([SAMPLINGS[row % 4] for row in range(ROWS)]) if is_sampled else None
    key = jax.random.key(seed)
    rows = verdict_on(block, rule, sampling, key)
    shared = {
        "num_drafted": block.num_drafted,
        "max_drafted": DRAFT,
        "sampling": sampling,
        "key": key,
        "protected": block.protected,
        "memory": block.memory,
        "state": rule.initial_state(ROWS),
    }
    flat = decide_flat(rule, **flattened(block, with_bonus=True), **shared)
    assert_same(flat.verdict, rows)
    expected = []
    for row in range(ROWS):
        kept = int(rows.num_accepted[row])
        tail = [-1] * (int(block.num_drafted[row]) - kept)
        expected.append([*block.draft_tokens[row, :kept], int(rows.next_token[row]), *tail])
    expected = np.concatenate(expected).tolist()
    assert flat.tokens.tolist() == [*expected, *[-1] * (TOKENS - len(expected))]

    # As tpu-inference has it: the engine has drawn the bonus tokens, which come last.
    bonus = np.arange(50, 50 + ROWS, dtype=np.int32)
    inputs = flattened(block, with_bonus=False)
    if is_sampled and seed == 0:  # probabilities instead of logits, where they are the same
        shared["sampling"] = sampling = Sampling(1.0)
        rows = verdict_on(block, rule, sampling, key)
        inputs["draft_probs"] = np.asarray(jax.nn.softmax(inputs.pop("draft_logits")))
    flat = decide_flat(rule, **inputs, bonus_tokens=bonus, **shared)
    is_whole = np.asarray(rows.num_accepted) == block.num_drafted
    following = np.where(is_whole, bonus, rows.next_token)
    assert_same(flat.verdict, dataclasses.replace(rows, next_token=following))
    expected = []
    for row in range(ROWS):
        kept = int(rows.num_accepted[row])
        block_tokens = [*block.draft_tokens[row, :kept], int(following[row]), *[-1] * DRAFT]
        expected.append(np.array(block_tokens)[: block.num_drafted[row]])
    expected = np.concatenate(expected).tolist()
    expected += [-1] * (TOKENS - len(expected))
    assert flat.tokens.tolist() == [*expected, *np.where(is_whole, bonus, -1)]


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_missing_is_said() -> None:
    block = block_of(0)
    for rule, words in ((Csd(), "CorrectionMemory"), (Budget(Margin(), 1.0), "initial_state")):
        with pytest.raises(FlyJaxError, match=words):
            decide(rule, block.logits, block.draft_tokens)
    with pytest.raises(FlyJaxError, match="key"):
        decide(Exact(), block.logits, block.draft_tokens, sampling=Sampling())
    one, drafted = block.draft_tokens[0], {"num_drafted": np.array([DRAFT]), "max_drafted": DRAFT}
    with pytest.raises(FlyJaxError, match="key"):
        decide_flat(Exact(), block.logits[0], np.append(one, 0), sampling=Sampling(), **drafted)
    with pytest.raises(FlyJaxError, match="one row of logits"):
        decide_flat(Exact(), block.logits[0], one, **drafted)


@data_tree
@dataclasses.dataclass(frozen=True)
class Pair:
    number: float
    name: str = dataclasses.field(default="a", metadata=STATIC)
    other: float | None = None


def test_numbers_are_leaves_and_the_rest_is_structure() -> None:
    leaves, structure = jax.tree.flatten(Pair(2.0, "b"))
    assert leaves == [2.0]
    assert structure == jax.tree.structure(Pair(jnp.ones(3), "b"))
    assert structure != jax.tree.structure(Pair(2.0, "c"))
    assert structure != jax.tree.structure(Pair(2.0, "b", 1.0)), "None is no number"
    assert jax.tree.unflatten(structure, leaves) == Pair(2.0, "b")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(Pair(1.0))]
    assert paths == [".number"]


def test_rebuilding_a_rule_checks_nothing() -> None:
    with pytest.raises(FlyJaxError, match="margin_gap"):
        Margin(gap=-1.0)
    leaves, structure = jax.tree.flatten(Margin())
    for placeholder in (object(), None, -1.0):
        rebuilt = jax.tree.unflatten(structure, [placeholder] * len(leaves))
        assert rebuilt.gap is placeholder
    Margin(gap=np.full(3, -1.0))  # an array is data, and so not checked


def test_numbers_meet_positions_row_by_row() -> None:
    assert column(2) == 2
    assert column(jnp.float32(2)).shape == ()
    assert column(np.arange(3)).shape == (3, 1)
    assert (log(0), log(1)) == (-math.inf, 0)
    np.testing.assert_allclose(log(np.array([0.5, 1])), np.log([0.5, 1]))


def test_every_rule_is_registered_with_its_parameters() -> None:
    names = [one.name for rule in RULES.values() for one in parameters_of(rule)]
    assert names == [
        "entropy_threshold", "window_size", "entropy", "entropy_top_k", "window",
        "csd_consistency", "csd_memory", "lossy_threshold", "lenience", "typical_epsilon",
        "typical_delta", "margin_gap",
    ]  # fmt: skip
    helps = [one.help for rule in RULES.values() for one in parameters_of(rule)]
    assert all(text and not text.endswith(".") for text in helps)
    assert jax.tree.leaves(Exact()) == []
    assert jax.tree.leaves(Fly()) == [0.3, 6]
    assert jax.tree.leaves(Csd()) == [0.01]
