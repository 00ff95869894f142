"""A request's tokens are those that it would have alone, whoever its neighbours are."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from random_pairs import CONFIG, EOS, placed, random_draft, random_target

from fly_jax.decoding.decoder import Decoder
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.stopping import EntropyStop
from fly_jax.decoding.spec import RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama
from fly_jax.serving.engine import Engine
from fly_jax.serving.request import Request, Ticket
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout
from fly_jax.verification.rules import Budget, Csd, Exact, Fly, Margin, Rule
from fly_jax.verification.sampling import Sampling

LONG = dataclasses.replace(CONFIG, max_context=600)
ROUND = RoundSpec(Fly(0.2, 2), 4, None, EOS, rounds_per_dispatch=2)
NUM_SLOTS = 3


@dataclasses.dataclass(frozen=True)
class Kind:
    """An engine, and what its requests ask for in turn."""

    spec: RoundSpec
    num_drafts: int = 1
    rules: tuple[Rule, ...] = ()
    samplings: tuple[Sampling | None, ...] = (None,)
    mesh: str | None = None


KINDS = {
    "rules and sampling": Kind(
        ROUND,
        rules=(Exact(), Fly(0.5, 2), Budget(Margin(gap=2.0), 3.0)),
        samplings=(None, None, None, Sampling(0.9, top_p=0.9), Sampling(1.0, top_k=5)),
    ),
    "levels": Kind(
        dataclasses.replace(ROUND, lookup=Lookup(), level_speculative_tokens=(2,)), num_drafts=2
    ),
    "defer, stop": Kind(
        dataclasses.replace(ROUND, rule=Fly(0.0, 3), boundary="defer", draft_stop=EntropyStop())
    ),
    "lookup alone": Kind(RoundSpec(Exact(), 4, Lookup(), EOS, audits=True), num_drafts=0),
    "autoregressive": Kind(RoundSpec(Exact(), 0, None, EOS), num_drafts=0),
    "mesh": Kind(ROUND, mesh="2x2x2", rules=(Exact(),), samplings=(None, Sampling(0.9))),
}


@functools.cache
def models(mesh: str | None, num_drafts: int) -> tuple[Llama, ...]:
    found = [random_target(2, LONG), *(random_draft(2, noise, LONG) for noise in (0.2, 0.3))]
    if mesh is not None:
        layout = Layout(create_mesh(parse_mesh(mesh)), RULES["tensor"])
        found = [placed(one, layout) for one in found]
    return tuple(found[: 1 + num_drafts])


def engine_for(kind: Kind, *, num_slots: int = NUM_SLOTS, max_length: int = 100) -> Engine:
    target, *drafts = models(kind.mesh, kind.num_drafts)
    return Engine(
        target,
        drafts,
        kind.spec,
        num_slots=num_slots,
        max_length=max_length,
        prefill_chunk=32,
        rules=kind.rules,
    )


def requests(kind: Kind, number: int = 14, seed: int = 0) -> list[Request]:
    random = np.random.default_rng(seed)
    rules = (None, *kind.rules)
    return [
        Request(
            random.integers(0, CONFIG.vocab_size, int(random.integers(1, 70))).tolist(),
            int(random.integers(1, 25)),
            rule=rules[index % len(rules)],
            sampling=kind.samplings[index % len(kind.samplings)],
            seed=index + 1,
        )
        for index in range(number)
    ]


def finished(engine: Engine, given: Sequence[Request]) -> list[Ticket]:
    tickets = [engine.submit(request) for request in given]
    while not engine.is_idle:
        engine.step()
    return tickets


def account(ticket: Ticket) -> tuple[object, ...]:
    one = ticket.generation
    counts = (one.num_rounds, one.num_draft_tokens, one.num_rescued_tokens, one.num_rollbacks)
    # Passes of other widths round other than alone.
    reports = [
        (report.draft_id, report.choice_id, report.verdict, round(report.entropy, 3))
        for report in one.reports
    ]
    return one.token_ids, one.why, one.finish_reason, counts, reports


def alone(kind: Kind, request: Request, decoders: dict[object, Decoder]) -> Ticket:
    """By a decoder of this rule and this sampling."""
    key = (request.rule, request.sampling)
    if key not in decoders:
        spec = dataclasses.replace(
            kind.spec, rule=request.rule or kind.spec.rule, sampling=request.sampling
        )
        target, *drafts = models(None, kind.num_drafts)
        decoders[key] = Decoder(target, drafts, spec, capacity=128)
    ticket = Ticket(request, kind.spec.rule)
    (ticket.generation,) = decoders[key].decode(
        [request.prompt], request.max_new_tokens, seed=[request.seed]
    )
    return ticket


@pytest.mark.parametrize("name", KINDS)
def test_requests_of_all_lengths_equal_those_alone(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = KINDS[name]
    engine = engine_for(kind)
    engine.warm_up()
    given = requests(kind)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = finished(engine, given)
        assert not [one for one in caplog.messages if one.startswith("Finished XLA")]
    decoders: dict[object, Decoder] = {}
    expected = [alone(kind, request, decoders) for request in given]
    assert [account(one) for one in found] == [account(one) for one in expected]
    assert engine.slots.num_free == NUM_SLOTS
    assert len({one.generation.finish_reason for one in found}) == 2
    if any(rule.longest_window for rule in (kind.spec.rule, *kind.rules)):
        assert sum(one.generation.num_rescued_tokens for one in found) > 0
    for one in found:
        assert one.submitted <= one.first_token <= one.finished  # type: ignore[operator]
        budget = one.budget
        assert (one.generation.regret is None) == (budget is None)
        assert budget is None or one.generation.regret <= budget  # type: ignore[operator]


def test_a_conversation_and_a_common_beginning_are_run_once() -> None:
    kind = KINDS["rules and sampling"]
    engine, fresh = engine_for(kind, max_length=200), {}
    system = [int(token) for token in np.random.default_rng(1).integers(0, 48, 60)]
    first, second = (Request([*system, *turn], 20) for turn in ([1, 2, 3], [4, 5]))
    found = finished(engine, [first])
    assert found[0].num_reused == 0
    # While the one that it shares with is still being decoded, and when it is done.
    going = engine.submit(first)
    engine.step()
    found += [going, *finished(engine, [second, second])]
    assert [one.num_reused for one in found[1:]] == [62, 60, 60]
    answered = [*found[-1].request.prompt, *found[-1].generation.token_ids]
    found += finished(engine, [Request([*answered, 9, 9, 9], 20)])
    assert found[-1].num_reused == len(answered) - 2
    assert engine.num_reused_tokens == sum(one.num_reused for one in found)
    assert engine.num_prompt_tokens == sum(len(one.request.prompt) for one in found)
    for one in found:
        assert account(one) == account(alone(kind, one.request, fresh))


def test_a_conversation_stays_in_its_slot() -> None:
    engine = engine_for(KINDS["autoregressive"], num_slots=2, max_length=300)
    text = list(range(40))
    for _ in range(4):
        (one,) = finished(engine, [Request(text, 10)])
        text = [*text, *one.generation.token_ids, 1, 2, 3]
    # The other slot still has what it had.
    other = Request([*range(47, 0, -1)], 5)
    finished(engine, [other])
    assert finished(engine, [Request(text, 5), other])[1].num_reused == 46


def test_what_is_cancelled_leaves_its_slot_and_its_neighbours_alone() -> None:
    kind = KINDS["rules and sampling"]
    engine, given = engine_for(kind), requests(kind, 9, seed=3)
    decoders: dict[object, Decoder] = {}
    tickets = [engine.submit(request) for request in given]
    engine.cancel(tickets[5])  # it waits
    engine.step()
    running = engine.slots.live[0][1]
    assert running is tickets[0]
    engine.cancel(running)
    engine.cancel(running)
    assert engine.slots.num_free >= 1
    told = [ticket for _ in range(200) for ticket, _ in engine.step()]
    assert engine.is_idle
    assert engine.slots.num_free == NUM_SLOTS
    for index, ticket in enumerate(tickets):
        assert ticket.is_finished
        if index in (0, 5):
            assert ticket not in told
        else:
            assert account(ticket) == account(alone(kind, ticket.request, decoders))


def test_a_prompt_that_is_cancelled_while_it_is_taken_in() -> None:
    engine = engine_for(KINDS["autoregressive"], max_length=500)
    short = engine.submit(Request([1, 2], 60))
    engine.step()
    long = engine.submit(Request([3] * 400, 5))
    engine.step()
    assert short.generation.num_tokens < 60
    assert not engine.waiting, "it is being taken in"
    engine.cancel(long)
    while not engine.is_idle:
        engine.step()
    assert long.generation.token_ids == []
    assert short.generation.num_rounds > 0
    assert engine.slots.num_free == NUM_SLOTS


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """Between two rounds of the others one chunk of it is run."""
    engine = engine_for(KINDS["autoregressive"], max_length=500)
    short = engine.submit(Request([1, 2], 80))
    long = engine.submit(Request([3] * 400, 2))
    while not short.is_finished or not long.is_finished:
        before = short.generation.num_tokens
        engine.step()
        started = before > 2
        assert not started or short.is_finished or short.generation.num_tokens > before
    assert short.first_token < long.first_token  # type: ignore[operator]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "is empty"),
        (Request([1] * 100), "shorten it, or raise max_length"),
        (Request([1], 0), "max_new_tokens is 0"),
        (Request([99]), "outside the model's vocabulary"),
        (Request([1], rule=Margin()), "asks for the rule Margin, of a kind that the engine"),
    ],
)
def test_requests_that_are_refused(request_: Request, words: str) -> None:
    engine = engine_for(KINDS["autoregressive"])
    with pytest.raises(FlyJaxError, match=words):
        engine.submit(request_)
    assert engine.is_idle


def test_sampling_is_refused_where_windows_are_deferred() -> None:
    with pytest.raises(FlyJaxError, match="defers windows"):
        engine_for(KINDS["defer, stop"]).submit(Request([1], sampling=Sampling(0.5)))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (dataclasses.replace(ROUND, depths=(2, 4)), "give a number"),
        (dataclasses.replace(ROUND, rule=Csd()), "memory"),
    ],
)
def test_engines_that_are_refused(spec: RoundSpec, words: str) -> None:
    with pytest.raises(FlyJaxError, match=words):
        engine_for(Kind(spec))
    with pytest.raises(FlyJaxError, match="at least 1"):
        engine_for(KINDS["autoregressive"], num_slots=0)


def test_what_runs_into_the_engines_length_ends_there() -> None:
    (one,) = finished(engine_for(KINDS["autoregressive"]), [Request([1] * 95, 50)])
    assert one.generation.num_tokens <= 100
    assert one.generation.finish_reason in ("length", "stop")
    assert one.generation.num_tokens == 100 or one.generation.finish_reason == "stop"
