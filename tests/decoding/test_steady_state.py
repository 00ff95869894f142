"""After warm-up nothing compiles, nothing is copied unasked, and the state is reused in place."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fly_jax.decoding.decoder import Decoder
from random_pairs import CAPACITY, EOS, random_draft, random_target

from fly_jax.decoding import programs
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.generation import Generation, Settled
from fly_jax.decoding.spec import RoundSpec
from fly_jax.models.cache import KVCache
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Budget, Csd, Exact, Fly, Margin, Rule, per_row
from fly_jax.verification.sampling import Sampling, sampling_per_row

SPECS = {
    "autoregressive": RoundSpec(Exact(), 0, None, EOS),
    "exact": RoundSpec(Exact(), 4, None, EOS),
    "fly": RoundSpec(Fly(window_size=2), 5, Lookup(), EOS),
    "levels": RoundSpec(
        Fly(window_size=2), 5, Lookup(), EOS, level_speculative_tokens=(2,), depths=(2, 5)
    ),
    "lookup": RoundSpec(Exact(), 5, Lookup(), EOS),
    "sampled": RoundSpec(Exact(), 5, None, EOS, sampling=Sampling(0.7, top_p=0.9)),
    "depths": RoundSpec(Fly(window_size=2), 5, None, EOS, depths=(2, 5)),
    "deferred": RoundSpec(Fly(window_size=2), 3, None, EOS, boundary="defer"),
    "audited": RoundSpec(Fly(window_size=2), 3, None, EOS, boundary="defer", audits=True),
    "csd, depths": RoundSpec(Csd(1e-6), 5, None, EOS, depths=(2, 5), reports_mismatches=True),
    # The memory learns, so that its keys are exchanged while rows are being decoded.
    "csd": RoundSpec(Budget(Csd(1e-6), 20.0), 5, None, EOS, reports_mismatches=True),
}
BATCHES = [
    ([[1, 2, 3], [4]], 12, 0),
    ([[9] * 16, [8, 7] * 3], 20, 1),
    ([[5, 4, 3, 2]], 3, 2),
]


@pytest.fixture
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Messages about what has been compiled since the last call."""

    def since() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [message for message in messages if message.startswith("Finished XLA compilation")]

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        yield since


def num_drafts(spec: RoundSpec) -> int:
    if spec is SPECS["lookup"]:
        return 0
    return 1 + len(spec.level_speculative_tokens) if spec.num_speculative_tokens else 0


def decoder_for(spec: RoundSpec) -> Decoder:
    memory = CorrectionMemory("v", min_count=0) if spec.rule.uses_memory else None
    return Decoder(
        random_target(1),
        [random_draft(1, 0.2 + level) for level in range(num_drafts(spec))],
        spec,
        capacity=CAPACITY,
        batch_size=2,
        memory=memory,
    )


@pytest.mark.parametrize("name", SPECS)
def test_later_batches_compile_nothing(name: str, compilations: Callable[[], list[str]]) -> None:
    decoder = decoder_for(SPECS[name])
    for index, (prompts, max_new_tokens, seed) in enumerate(BATCHES):
        rows = decoder.generate(prompts, max_new_tokens, seed=seed)
        assert all(row.token_ids for row in rows)
        compiled = compilations()
        if index == 0:
            assert any("_run" in message for message in compiled), "compilations go uncounted"
        else:
            assert compiled == []


def test_another_pair_of_the_same_shape_compiles_nothing(
    compilations: Callable[[], list[str]],
) -> None:
    prompts, max_new_tokens, seed = BATCHES[0]
    decoder_for(SPECS["exact"]).generate(prompts, max_new_tokens, seed=seed)
    other = Decoder(
        random_target(2), random_draft(2, 0.2), SPECS["exact"], capacity=CAPACITY, batch_size=2
    )
    compilations()
    other.generate(prompts, max_new_tokens, seed=seed)
    assert compilations() == []


@pytest.mark.parametrize("name", ["numbers", "numbers of each row"])
def test_other_numbers_compile_nothing(name: str, compilations: Callable[[], list[str]]) -> None:
    """Those of the rule, of its budget and of the sampling are data."""

    def spec(numbers: tuple[float, int, float, float, float]) -> RoundSpec:
        threshold, window, total, temperature, top_p = numbers
        rule: Rule = Budget(Fly(threshold, window) | Margin(gap=threshold), total)
        sampling = Sampling(temperature, top_p=top_p)
        if name == "numbers of each row":
            rule = per_row([rule, Exact()] if window == 2 else [Exact(), rule])
            sampling = sampling_per_row([sampling, None] if window == 2 else [None, sampling])
        return RoundSpec(rule, 5, None, EOS, sampling=sampling)

    prompts, max_new_tokens, seed = BATCHES[0]
    first = decoder_for(spec((0.3, 2, 8.0, 0.7, 0.9)))
    before = first.generate(prompts, max_new_tokens, seed=seed)
    assert any("_run" in message for message in compilations()), "compilations go uncounted"
    other = decoder_for(spec((0.0, 0, 9.5, 1.5, 0.6)))
    after = other.generate(prompts, max_new_tokens, seed=seed)
    assert compilations() == []
    assert [row.token_ids for row in after] != [row.token_ids for row in before]


@pytest.mark.parametrize("name", SPECS)
def test_rounds_copy_nothing_unasked(name: str) -> None:
    decoder = decoder_for(SPECS[name])
    prompts, max_new_tokens, seed = BATCHES[0]
    expected = decoder.generate(prompts, max_new_tokens, seed=seed)  # compiles
    if decoder.memory is not None:  # what has been learnt would change the tokens
        assert decoder.memory.version > 1
        decoder.memory = CorrectionMemory("v", min_count=0)
    stream = decoder.stream(prompts, max_new_tokens, seed=seed)
    accounts = dict([_row(next(stream))])  # admits the prompts
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="isallowed host-to-device"):
            jax.jit(jnp.negative)(np.ones(3))  # the guard is up
        accounts |= dict(_row(item) for item in stream)
    assert [accounts[row] for row in range(len(prompts))] == [row.token_ids for row in expected]


def _row(item: tuple[Settled, Generation]) -> tuple[int, list[int]]:
    return item[0].row, item[1].token_ids


@pytest.mark.parametrize("name", SPECS)
def test_the_state_is_donated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are large: a round that copied them would need twice their memory."""
    states = []
    run = programs._run

    def spy(*arguments: object) -> object:
        states.append(arguments[4])
        return run(*arguments)

    monkeypatch.setattr(programs, "_run", spy)
    (prompts, max_new_tokens, seed), *_ = BATCHES
    decoder_for(SPECS[name]).generate(prompts, max_new_tokens, seed=seed)
    assert len(states) > 2
    for state in states:
        leaves = jax.tree.leaves(state.drafter, is_leaf=lambda one: isinstance(one, KVCache))
        caches = [one for one in (state.target, *leaves) if isinstance(one, KVCache)]
        assert len(caches) == 1 + num_drafts(SPECS[name])
        assert state.tokens.is_deleted()
        assert all(cache.keys.is_deleted() and cache.values.is_deleted() for cache in caches)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_dispatch_in_which_all_have_finished_does_nothing(rounds: int) -> None:
    """The host is one dispatch behind; what it dispatched too much must not cost a round.

    A single round, which is not in a loop, runs all the same, and leaves the rows as they are.
    """
    spec = dataclasses.replace(SPECS["exact"], rounds_per_dispatch=rounds)
    decoder = decoder_for(spec)
    prompts, max_new_tokens, seed = BATCHES[0]
    models = decoder._programs
    state = decoder._admit(prompts, max_new_tokens, seed)
    count = 1
    while count:
        state, output = models.run(state, decoder._inputs)
        count = int(output.count.sum())
    before = jax.device_get(state)
    state, output = models.run(state, decoder._inputs)
    output, after = jax.device_get(output), jax.device_get(state)
    numbers = (output.count, output.num_drafted, output.num_accepted, output.num_rescued)
    assert not any(np.any(leaf) for leaf in numbers)
    assert np.all(after.finished)
    np.testing.assert_array_equal(after.length, before.length)
    for row, length in enumerate(before.length):
        np.testing.assert_array_equal(after.tokens[row, :length], before.tokens[row, :length])
    if rounds > 1:
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(output))
        jax.tree.map(np.testing.assert_array_equal, _numbers(after), _numbers(before))


def _numbers(state: object) -> list[np.ndarray]:
    leaves = jax.tree.leaves(state)
    return [leaf for leaf in leaves if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
