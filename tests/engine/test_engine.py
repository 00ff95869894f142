"""A request's tokens are those that it would have alone, whoever its neighbours are."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from engine_kinds import KINDS, Kind, account, engine_for, finished, models, requests
from random_pairs import batch_engine, greedy, logits_after, until_end
from refusals import assert_refused

from fly_jax import CorrectionMemory, Csd, Engine, Lookup, Request, RequestState, Sampling
from fly_jax.decoding import programs
from fly_jax.decoding.programs import Programs
from fly_jax.verification.rules import Exact, Why


@functools.cache
def engine_alone(kind: Kind, protected: Sequence[int] | None, **given: Any) -> Engine:
    """For requests of one rule and one sampling, one at a time."""
    more = {"protected_token_ids": protected or (), "memory": kind.memory, "max_length": 224}
    target, *drafts = models(None, kind.num_drafts)
    return batch_engine(target, drafts, replace(kind.spec, **given), 1, **more)


def alone(kind: Kind, asked: Request) -> RequestState:
    state = RequestState(asked, asked.rule or kind.spec.rule)
    given = {"rule": state.rule, "sampling": asked.sampling}
    engine = engine_alone(kind, asked.protected_token_ids, **given)
    (state.generation,) = engine.generate([asked.prompt], asked.max_new_tokens, seed=asked.seed)
    return state


def check_alone(kind: Kind, found: Sequence[RequestState]) -> None:
    for one in found:
        other = alone(kind, one.request)
        assert account(one) == account(other)
        regret = other.generation.regret  # a sum, which other widths round otherwise
        assert one.generation.regret == (regret and pytest.approx(regret, rel=1e-3))


def check_logprobs(found: Sequence[RequestState]) -> None:
    """They are those of a pass over the whole text, why ever a token stands there."""
    whys = set()
    for state in found:
        one, asked = state.generation, state.request.logprobs
        if asked is None:
            assert one.logprobs == []
        elif one.num_tokens <= 64:  # what the pass is made for
            text = [*one.prompt_token_ids, *one.token_ids]
            logits = logits_after(models(None, 1)[0], text)[-len(one.token_ids) - 1 : -1]
            rows = np.asarray(jax.nn.log_softmax(logits))
            assert [given.token_id for given in one.logprobs] == one.token_ids
            for given, row in zip(one.logprobs, rows, strict=True):
                most = -np.sort(-row)[:asked]
                assert [value for _, value in given.top] == pytest.approx(most, abs=1e-4)
                for token, value in ((given.token_id, given.logprob), *given.top):
                    assert value == pytest.approx(row[token], abs=1e-4)
            whys |= {(why, state.request.sampling is None) for why in one.why}
    assert {why for why, _ in whys} == {Why.MATCHED, Why.RESCUED, Why.CORRECTED, Why.BONUS}
    # One that was drawn from the residual is neither the draft's nor the likeliest.
    assert ((Why.CORRECTED, False) in whys) == any(one.request.sampling for one in found)


@pytest.mark.parametrize("name", ["defer", "lookup alone"])
def test_rows_move_to_the_first_slot(name: str, compilations: Callable[[], list[str]]) -> None:
    kind = KINDS[name]
    engine, asked = engine_for(kind, num_slots=4), requests(kind, 3)
    engine.warm_up_for(asked)
    compilations()
    asked = [replace(one, prompt=one.prompt[:16], max_new_tokens=14) for one in asked]
    asked[2] = replace(asked[2], max_new_tokens=24)
    states, slots = [engine.submit(one) for one in asked], list[int]()
    while not engine.is_idle:
        engine.step()
        slots += [slot for slot, one in engine.slots.live if one is states[2]]
    assert slots[0] > slots[-1] == 0
    # What the caches hold has moved with it, and what was there before it has not been lost.
    assert {*engine.slots.texts} == {text_of(one) for one in states}
    for one, state in zip(asked, tuple(states), strict=True):
        text = text_of(state)
        states += finished(engine, [replace(one, prompt=[*text, 1])])
        assert states[-1].num_reused >= max((len(text) - 2) // 16 * 16, 16)
    assert not compilations()
    check_alone(kind, states)


def text_of(state: RequestState) -> tuple[int, ...]:
    return (*state.generation.prompt_token_ids, *state.generation.token_ids)


@pytest.mark.parametrize("name", KINDS)
def test_requests_equal_those_alone(name: str, compilations: Callable[[], list[str]]) -> None:
    kind = KINDS[name]
    engine, given = engine_for(kind, offline=not kind.rules), requests(kind)
    engine.warm_up_for(given)
    compilations()
    found = finished(engine, given)
    # A beginning is copied, unless the drafter cannot begin there, and a slot is given up.
    again = [engine.submit(given[-1]) for _ in range(kind.num_slots + 1)]
    engine.cancel(again[-1])  # it waits
    engine.step()
    for _ in range(2):
        engine.cancel(again[0])
    heard = {state for state, settled in engine.run(()) if settled.finish_reason}
    assert heard == set(again[1:-1])
    assert any(one.num_reused for one in (*found, *again)) == (name != "levels")
    assert not compilations()
    check_alone(kind, [*found, *again[1:-1]])
    for one in found:
        assert one.submitted <= one.first_token <= one.finished
        regret, budget = one.generation.regret, one.budget
        assert regret is budget is None or regret <= budget
    if kind.spec.static.max_logprobs:
        check_logprobs(found)
    if kind.memory is not None:
        learnt = [one.generation for one in found if one.request.rule == Csd(0.0)]
        assert any(one.num_rescued_tokens for one in learnt)
    assert engine.slots.num_free == kind.num_slots
    assert len({one.generation.finish_reason for one in found}) == 2
    if any(rule.longest_window for rule in (kind.spec.rule, *kind.rules)):
        assert any(one.generation.num_rescued_tokens for one in found)


def test_earlier_answers_are_kept_in_the_order_in_which_they_end(
    compilations: Callable[[], list[str]],
) -> None:
    """But those of requests with a salt, and of cancelled ones; rounds of few slots have all."""
    spec = KINDS["lookup alone"].spec.with_static(lookup=Lookup(num_earlier_tokens=64))
    kind = replace(KINDS["lookup alone"], spec=spec, num_slots=2)
    engine, answers, found = engine_for(kind), [-1] * 64, list[RequestState]()
    engine.warm_up()
    compilations()
    for number in (1, 4, 2):
        states = [engine.submit(one) for one in requests(kind)[:number]]
        salted = engine.submit(Request([1, 2], 9, cache_salt="a"))
        engine.cancel(engine.submit(Request([3], 9)))
        ended = [state for state, settled in engine.run(()) if settled.finish_reason]
        assert set(ended) == {*states, salted}
        answers += [token for one in ended if one != salted for token in one.generation.token_ids]
        assert engine.earlier is not None
        assert engine.earlier.tokens.tolist() == answers[-64:]
        found += states
    assert not compilations()
    for one in found:
        other = alone(KINDS["lookup alone"], one.request).generation
        assert one.generation.token_ids == other.token_ids


@pytest.mark.parametrize("name", ["rules and sampling", "defer"])
def test_who_asks_for_it_goes_on_behind_an_end_of_text(name: str) -> None:
    kind = KINDS[name]
    engine = engine_for(kind, offline=not kind.rules)
    endless = [Request([index], 24, ignores_eos=index % 2 == 0) for index in range(6)]
    ended = finished(engine, [replace(one, ignores_eos=False) for one in endless])
    assert {one.generation.finish_reason for one in ended} == {"stop", "length"}
    for state, before in zip(finished(engine, endless), ended, strict=True):
        one, tokens = state.generation, before.generation.token_ids
        assert one.token_ids[: len(tokens)] == tokens
        if state.request.ignores_eos:
            assert (len(one.token_ids), one.finish_reason) == (24, "length")
        else:
            assert one.token_ids == tokens
    if Exact() in kind.rules:
        exact = finished(engine, [replace(one, rule=Exact()) for one in endless[::2]])
        expected = greedy(models(None, 1)[0], [one.request.prompt for one in exact], 24)
        assert [one.generation.token_ids for one in exact] == expected


def test_a_memory_learns_from_what_is_handed_out_and_was_not_drawn() -> None:
    memory, usual = CorrectionMemory("v"), KINDS["rules and sampling"]
    engine = engine_for(replace(usual, memory=memory))
    # Its rounds report all the same, for what else it is asked: the host alone asks this.
    engine.spec = engine.spec.with_static(reports_mismatches=True)
    one, other = (Request([number] * 4, 24, rule=Exact()) for number in (1, 2))
    finished(engine, [replace(one, sampling=Sampling(1.0, top_k=5))])
    assert len(memory) == 0
    states = [engine.submit(one), engine.submit(other)]
    engine.step()
    engine.cancel(states[0])  # whose rounds are on their way, with the other's
    states += finished(engine, [replace(one, sampling=Sampling(0.0))])  # greedy
    corrected = [state.generation.why.count(Why.CORRECTED) for state in states]
    assert corrected[0] == 0 < corrected[2]
    assert sum(count for *_, count in memory.counts()) == sum(corrected)


@pytest.mark.parametrize("name", ["rules and sampling", "defer", "lookup alone"])
def test_three_turns_of_three_conversations(name: str) -> None:
    """Nothing is run again but what a slot cannot be relied on for, and no token changes."""
    kind, texts = KINDS[name], [[3, 1, 4, 1, 5] * size for size in (2, 4, 5)]
    engine, fresh = (engine_for(kind, offline=not kind.rules) for _ in range(2))
    held = [0] * 3
    for number in range(3):
        fresh.forget()
        given = [
            replace(one, prompt=text, max_new_tokens=16)
            for one, text in zip(requests(kind, 3, seed=9), texts, strict=True)
        ]
        states = [engine.submit(one) for one in given]
        if number == 1:
            while not states[0].generation.token_ids:
                engine.step()
            engine.cancel(states[0])
        finished(engine, [])
        if number:
            assert [one.num_reused for one in states] == held
        for one, other in zip(states, finished(fresh, given), strict=True):
            if one.generation.finish_reason == "cancelled":
                tokens = one.generation.token_ids
                assert tokens == other.generation.token_ids[: len(tokens)]
            else:
                assert account(one) == account(other)
        texts = [[*one.request.prompt, *one.generation.token_ids] for one in states]
        held = [(len(text) - 2) // 16 * 16 for text in texts]
        texts = [[*text, 11, 12, 13] for text in texts]
    assert min(held) >= 16
    (other,) = finished(engine, [Request([9, 9, 9, *texts[0]], 4)])
    assert other.num_reused == 0


def test_a_long_prompt_does_not_stop_the_others(passes: list[tuple[int, int]]) -> None:
    """Between two rounds of the others one chunk of it is run."""
    engine = engine_for(KINDS["autoregressive"], max_length=500)
    short = engine.submit(Request([1, 2], 80, ignores_eos=True))
    engine.step()
    assert passes == [(1, 32)]
    long = engine.submit(Request([3] * 400, 2))
    begun = short.generation.num_tokens
    for steps in itertools.count(1):
        passes.clear()
        engine.step()
        assert sum(rows * size for rows, size in passes) <= 32
        assert short.generation.num_tokens == begun + steps
        if long.first_token is not None:
            break
    assert steps >= 400 // 32
    assert not short.is_finished


def test_a_prompt_that_reaches_the_end_of_the_caches() -> None:
    """Its last piece begins earlier than it would, so that it does not run over the end."""
    kind = KINDS["autoregressive"]
    engine = engine_for(kind, max_length=126)
    assert engine._capacity == 128
    prompt = np.random.default_rng(5).integers(0, 48, 125).tolist()
    finished(engine, [Request(prompt[:60], 1)])
    (found,) = finished(engine, [Request(prompt, 1)])
    assert found.num_reused == 48
    *_, before, last = engine._prefill.plan.chunks(48, 125)
    assert last.start + last.size == 128
    assert last.start < before.start + before.size
    check_alone(kind, [found])


def test_warming_up_again_overwrites_nothing() -> None:
    kind = KINDS["autoregressive"]
    engine, prompt = engine_for(kind), list(range(40))
    request = Request(tuple(prompt), 10)
    first = engine.submit(Request(prompt, 10))
    prompt.reverse()  # the request is as it was handed in
    assert_refused("warm up while it decodes", engine.warm_up)
    assert_refused("give its caches back while it decodes", engine.forget)
    finished(engine, [])
    assert first.generation.prompt_token_ids == request.prompt
    found = [first]
    for again in (engine.warm_up, engine.forget):
        again()
        found += finished(engine, [request])
    assert [one.num_reused for one in found] == [0, 32, 0]
    check_alone(kind, found)


def interrupted(does: Callable[..., Any], calls: Iterator[int], *at: int) -> Callable[..., Any]:
    """A function that does the same, but for some calls, which Ctrl-C interrupts."""

    def function(*given: Any, **named: Any) -> Any:
        if next(calls) in at:
            raise KeyboardInterrupt
        return does(*given, **named)

    return function


def test_a_round_that_is_there_with_its_prompt_takes_more_than_no_time() -> None:
    kind = KINDS["rules and sampling"]
    engine = engine_for(kind)
    state = engine.submit(replace(requests(kind, 1, seed=2)[0], max_new_tokens=1))
    engine.step()
    jax.block_until_ready(engine._pending[0].output)
    time.sleep(0.2)
    finished(engine, [])
    assert state.generation.seconds > 0.1


def test_ctrl_c_while_rounds_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is lost: a step that was interrupted is followed by others as if it had not been."""
    kind, calls = KINDS["rules and sampling"], itertools.count()
    engine = engine_for(kind)
    monkeypatch.setattr(jax, "device_get", interrupted(jax.device_get, calls, 2, 3, 7))
    states = [engine.submit(one) for one in requests(kind, 5, seed=2)]
    while not engine.is_idle:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    assert next(calls) > 8
    check_alone(kind, states)


@pytest.mark.parametrize("name", ["begin", "prefill_chunk", "insert", "run"])
def test_ctrl_c_while_a_program_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests are cancelled, and the next ones find nothing that they could rely on."""
    kind, does = KINDS["rules and sampling"], getattr(Programs, name)
    engine = engine_for(kind)
    monkeypatch.setattr(Programs, name, interrupted(does, itertools.count(), 3))
    states = [engine.submit(one) for one in requests(kind, 9, seed=3)]
    with pytest.raises(KeyboardInterrupt):
        finished(engine, [])
    assert engine.is_idle
    assert all(one.is_finished for one in states)
    check_alone(kind, finished(engine, requests(kind, 9, seed=3)))


def test_nothing_is_shared_with_what_is_lost() -> None:
    """A program that Ctrl-C cut off, or that failed, has taken the caches along."""
    kind, request = KINDS["autoregressive"], Request(tuple(range(40)), 10)
    engine = engine_for(kind)
    finished(engine, [request])
    jax.tree.map(lambda one: one.delete(), engine._state)
    (again,) = finished(engine, [request])
    assert again.num_reused == 0
    check_alone(kind, [again])


def test_offline_all_compiles_beforehand(compilations: Callable[[], list[str]]) -> None:
    kind = KINDS["autoregressive"]
    prompts = [[7, 8], *([*range(30), index, *[9] * index] for index in range(5)), [3] * 40]
    given = [Request(prompt, 5 + 3 * index) for index, prompt in enumerate(prompts)]
    for one in vars(programs).values():  # of an engine; to forget all programs takes seconds
        if hasattr(one, "clear_cache"):
            one.clear_cache()
    engine = engine_for(kind, offline=True)
    engine.warm_up_for([])
    engine.warm_up_for(given)
    compilations()
    states = [engine.submit(request) for request in given]
    engine.step()
    assert engine.slots.num_free == 0  # however many tokens that took
    found = [state for state, settled in engine.run(()) if settled.finish_reason]
    assert not compilations()
    assert sum(one.num_reused for one in states) >= 3 * 16
    assert sorted(map(id, found)) == sorted(map(id, states))
    expected = greedy(models(None, 0)[0], prompts, 24)
    for state, tokens in zip(states, expected, strict=True):
        assert state.generation.token_ids == until_end(tokens[: state.request.max_new_tokens])
