"""What an engine refuses, each in a sentence; stop strings, of which no part is ever handed out."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_kinds import KINDS, ROUND, Kind, engine_for
from random_pairs import SPECS, pair_engine
from refusals import assert_refused

from fly_jax import Csd, Engine, Fly, Margin, Request, RequestState, Sampling, Settled, Why
from fly_jax.engine.request import StopChecker

REFUSED = {
    "autoregressive": {
        "is empty": Request([]), "shorten it, or raise max_length": Request([1] * 100),
        "max_new_tokens is 0": Request([1], 0),
        "max_new_tokens=2.5, .*all others whole": Request([1], 2.5),  # type: ignore[arg-type]
        "rule='fly', .*must be a Rule": Request([1], rule="fly"),  # type: ignore[arg-type]
        "at least one character": Request([1], stop=["a", ""]),
        "a list of texts": Request([1], stop="abc"), r"stop is \[13\]": Request([1], stop=[13]),
        "stop is None": Request([1], stop=None), "has no tokenizer": Request([1], stop=["a"]),
        "outside the model's vocabulary": Request([99]),
        "log-probabilities of 0 tokens.*the engine gives none": Request([1], logprobs=0),
        "sampling and for a rule with a memory": Request([1], 1, Csd(), Sampling(0.5)),
        "asks for the rule Margin, of a kind that the engine": Request([1], rule=Margin()),
    },
    "defer": {
        "defers windows, which is for greedy": Request([1], sampling=Sampling(0.5)),
        "with window_size=2 was given to an engine that defers": Request([1], rule=Fly(0.0, 2)),
    },
    "rules and sampling": {"no deferred window of window_size=4": Request([1], rule=Fly(0.5, 4))},
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_requests_that_are_refused(kind: str) -> None:
    engine = engine_for(KINDS[kind])
    for words, request in REFUSED[kind].items():
        assert_refused(words, engine.submit, request)
        assert_refused(words, engine.answer, [Request([1]), request])
        assert_refused(words, engine.warm_up_for, [request])
        assert engine.is_idle
    if kind == "defer":
        engine.submit(Request([1], sampling=Sampling(0.0)))  # which is greedy


def test_numbers_of_numpy_and_a_reader_who_leaves() -> None:
    engine = engine_for(KINDS["autoregressive"])
    asked = [Request([one], 24, seed=np.uint32(7)) for one in (1, 2)]
    for state, _ in engine.run(asked):
        assert state.request.seed == 7
        break
    assert engine.is_idle, "both are cancelled"
    assert len(engine.generate([[1]], 4)[0].token_ids) == 4


def test_an_offline_engine_refuses_another_sampling_than_its_own() -> None:
    drawn = Sampling(0.5)
    for own, other in ((None, drawn), (drawn, None), (drawn, Sampling(0.7))):
        spec = dataclasses.replace(SPECS["autoregressive"], sampling=own)
        engine = engine_for(Kind(spec, num_drafts=0), offline=True)
        assert_refused("decodes all with", engine.submit, Request([1], sampling=other))
        engine.submit(Request([1], sampling=own))


@pytest.mark.parametrize(("words", "kind", "given"), [
    ("memory", Kind(dataclasses.replace(ROUND, rule=Csd())), {}),
    ("memory", Kind(ROUND), {"rules": (Csd(),)}),
    ("each request has its own", Kind(dataclasses.replace(ROUND, sampling=Sampling(0.5))), {}),
    ("which must be of one size", KINDS["defer"], {"rules": (Fly(0, 1),)}),
    ("at least", KINDS["autoregressive"], {"num_slots": 0}),
    ("at least", KINDS["autoregressive"], {"max_length": 1}),
    ("at most 600", KINDS["autoregressive"], {"max_length": 601}),
    ("whole numbers", KINDS["autoregressive"], {"max_length": 64.0}),
])  # fmt: skip
def test_engines_that_are_refused(words: str, kind: Kind, given: dict[str, Any]) -> None:
    assert_refused(words, engine_for, kind, **given)


def tokenizer(words: list[bytes]) -> Any:
    """What `TextStream` asks of one."""
    vocabulary = SimpleNamespace(token_bytes=lambda token_id, first: words[token_id])
    return SimpleNamespace(vocabulary=vocabulary, control_token_ids=())


PIECES = [b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa4", b"", b"babab"]


Shown = tuple[list[Settled], int | None]


def shown(stops: list[str], ids: list[int], sizes: list[int], *, ends: bool = True) -> Shown:
    """What is handed out piece by piece, and at which token it stops."""
    stop_checker, found, at = StopChecker(tokenizer(PIECES), stops), [], 0
    for size in sizes:
        if some := tuple(ids[at : at + size]):
            reason = "length" if ends and at + size >= len(ids) else None
            out, kept = stop_checker.push(Settled(some, (Why.MATCHED,) * len(some), reason))
            found += [] if out is None else [out]
            if kept < len(some) or (out is not None and out.finish_reason == "stop"):
                return found, at + kept
        at += size
    return found, None


def oracle(stops: list[str], ids: list[int]) -> tuple[str, int | None]:
    """The text up to the stop string that is complete first, by whole texts of growing length."""
    for number in range(1, len(ids) + 1):
        text = spelled(ids[:number])
        if ends := [(text.find(one) + len(one), text.find(one)) for one in stops if one in text]:
            return text[: min(ends)[1]], number
    return spelled(ids, final=True), None


def spelled(ids: list[int], final: bool = False) -> str:
    data = b"".join(PIECES[one] for one in ids)
    text = data.decode("utf-8", "replace")
    # Half a character at the end is not there yet.
    return text if final or not data.endswith(b"\xc3") else text.removesuffix("\ufffd")


def test_any_stop_in_any_pieces() -> None:
    chance = random.Random(7)
    stopped = 0
    for _ in range(3000):
        ids = [chance.randrange(9) for _ in range(chance.randint(1, 14))]
        sizes = [chance.randint(1, 4) for _ in range(20)]
        texts = ["".join(chance.choice("abä") for _ in range(chance.randint(1, 5))) for _ in "12"]
        stops = texts[: chance.randint(0, 2)]
        found, number = shown(stops, ids, sizes)
        assert ("".join("".join(one.texts) for one in found), number) == oracle(stops, ids)
        assert [token for one in found for token in one.token_ids] == ids[:number]
        assert all(len(one.texts) == len(one.token_ids) == len(one.why) for one in found)
        assert found[-1].finish_reason == ("length" if number is None else "stop")
        stopped += number is not None
        if number is None:
            # What goes on may still become a stop string: no part of one has been handed out.
            begun, _ = shown(stops, ids, sizes, ends=False)
            out, whole = sum(len("".join(one.texts)) for one in begun), spelled(ids)
            begins = (whole.endswith(stop[:size]) * size for stop in stops for size in range(9))
            assert out <= len(whole) - max(begins, default=0)
    assert 500 < stopped < 2500


@pytest.fixture(scope="module")
def engine() -> Engine:
    spec = SPECS["exact"].with_static(eos_token_ids=(), rounds_per_dispatch=2, audits=True)
    letters = tokenizer([bytes([97 + one % 26]) for one in range(48)])
    return pair_engine(2, spec, 0.05, rows=2, offline=False, tokenizer=letters)


def run(engine: Engine, *requests: Request) -> list[tuple[RequestState, str]]:
    states = [engine.submit(one) for one in requests]
    texts = dict.fromkeys(states, "")
    for state, settled in engine.run(()):
        texts[state] += "".join(settled.texts)
    return [(state, texts[state]) for state in states]


def test_a_request_ends_before_its_stop_string_and_frees_its_slot(engine: Engine) -> None:
    ((whole, text),) = run(engine, Request([1, 2, 3], 40))
    assert len(text) == 40
    stops = [text[at : at + 3] for at in (2, 13, 20, 30)]
    given = [Request([1, 2, 3], 40, stop=[stop, "?"]) for stop in [*stops, "!"]]
    *found, (_, rest) = run(engine, *given)
    assert rest == text
    for stop, (state, cut) in zip(stops, found, strict=True):
        assert cut == text[: text.index(stop)]
        one = state.generation
        assert one.finish_reason == "stop"
        assert one.token_ids == whole.generation.token_ids[: len(cut) + len(stop)]
        assert one.why == whole.generation.why[: len(one.token_ids)]
        assert [report.token_id for report in one.reports] == one.token_ids
        assert state.is_finished
    assert engine.slots.num_free == 2
    assert engine.is_idle


def test_a_prompt_that_goes_on_where_another_was_stopped(engine: Engine) -> None:
    prompt = [5] * 30
    ((whole, text),) = run(engine, Request(prompt, 30))
    ((stopped, _),) = run(engine, Request(prompt, 30, stop=[text[8:10]]))
    answered = [*prompt, *stopped.generation.token_ids]
    ((again, rest),) = run(engine, Request(answered, 60 - len(answered)))
    assert again.num_reused == (len(answered) - 2) // 16 * 16
    assert [*answered, *again.generation.token_ids] == [*prompt, *whole.generation.token_ids]
    assert text.endswith(rest)
