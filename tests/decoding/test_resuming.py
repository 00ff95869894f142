"""Turns of a conversation: what the caches hold already is not run again, and no token changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from fly_jax.decoding.decoder import Decoder
from random_pairs import CONFIG, EOS, placed, random_draft, random_target

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.programs import Programs, Rows
from fly_jax.decoding.spec import RoundSpec
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout
from fly_jax.verification.rules import Budget, Exact, Fly
from fly_jax.verification.sampling import Sampling

LONG = dataclasses.replace(CONFIG, max_context=600)
FIRST = [[3, 1, 4, 1, 5] * 8]
SPECS = {
    "autoregressive": RoundSpec(Exact(), 0, None, EOS),
    "exact": RoundSpec(Exact(), 3, None, EOS),
    "fly": RoundSpec(Fly(window_size=1), 4, None, EOS),
    "defer": RoundSpec(Fly(0.0, 2), 3, None, EOS, boundary="defer"),
    "lookup": RoundSpec(Exact(), 3, Lookup(), EOS),
    "sampled": RoundSpec(Exact(), 3, None, EOS, sampling=Sampling(0.8)),
    "draft and lookup": RoundSpec(Fly(window_size=1), 4, Lookup(), EOS),
    "budget": RoundSpec(Budget(Fly(window_size=1), 2.0), 4, None, EOS),
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of each row each piece of a prompt had."""
    pieces: list[int] = []
    take_in, admit = Programs.take_in, Programs.admit

    def taking(self: Programs, state: object, piece: int, start: int) -> object:
        pieces.append(piece)
        return take_in(self, state, piece, start)  # type: ignore[arg-type]

    def admitting(self: Programs, rows: Rows, bucket: int) -> object:
        pieces.append(bucket)
        return admit(self, rows, bucket)

    monkeypatch.setattr(Programs, "take_in", taking)
    monkeypatch.setattr(Programs, "admit", admitting)
    return pieces


def decoder_for(name: str, mesh: str | None = None, rows: int = 1) -> Decoder:
    target, draft = random_target(2, LONG), random_draft(2, 0.3, LONG)
    if mesh is not None:
        layout = Layout(create_mesh(parse_mesh(mesh)), RULES["tensor"])
        target, draft = placed(target, layout), placed(draft, layout)
    spec = SPECS[name]
    drafts = [draft] if spec.num_speculative_tokens and name != "lookup" else []
    return Decoder(target, drafts, spec, batch_size=rows)


def turn(
    decoder: Decoder, prompts: list[list[int]], *, resumes: bool, most: int = 24, stop: int = 10**6
) -> list[int]:
    found: list[int] = []
    stream: Iterator = decoder.stream(prompts, most, seed=5, resumes=resumes)
    for settled, _ in stream:
        found += settled.token_ids
        if len(found) >= stop:
            stream.close()
    return found


@pytest.mark.parametrize("name", SPECS)
def test_three_turns(name: str, run: list[int]) -> None:
    kept, fresh = decoder_for(name), decoder_for(name)
    text = FIRST[0]
    for number in range(3):
        run.clear()
        found = turn(kept, [text], resumes=True)
        if number:
            assert sum(run) == 16, "the last tokens of the answer, and what was said since"
        assert found == turn(fresh, [text], resumes=False)
        text = [*text, *found, *range(10, 14)]


def test_a_second_turn_is_warmed_up_by_the_first(run: list[int]) -> None:
    decoder, text = decoder_for("exact"), FIRST[0]
    decoder.warm_up([text], 24, resumes=True)
    assert run == [64], "as the turn itself will take it in"
    text = [*text, *turn(decoder, [text], resumes=True), 11]
    run.clear()
    decoder.warm_up([text], 24, resumes=True)
    assert run == []


@pytest.mark.parametrize("name", ["exact", "fly", "autoregressive"])
def test_several_rows(name: str, run: list[int]) -> None:
    """Some end long before others, and later there are fewer of them."""
    kept, fresh = (decoder_for(name, rows=3) for _ in range(2))
    random = np.random.default_rng(0)
    prompts = [random.integers(0, CONFIG.vocab_size, 30 + row).tolist() for row in range(3)]
    for number, rows in enumerate((3, 3, 2)):
        prompts, seeds = prompts[:rows], [1, 2, 3][:rows]
        run.clear()
        found = {
            resumes: _rows(decoder, prompts, seeds, resumes=resumes)
            for decoder, resumes in ((kept, True), (fresh, False))
        }
        assert found[True] == found[False]
        assert len(set(map(len, found[True]))) > 1, "all rows end at once"
        if number:
            assert run[0] < max(map(len, prompts)), "of what the caches hold nothing is run"
        prompts = [[*text, *new, 11, 12] for text, new in zip(prompts, found[True], strict=True)]


def _rows(
    decoder: Decoder, prompts: list[list[int]], seeds: list[int], *, resumes: bool
) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for settled, generation in decoder.stream(prompts, 30, seed=seeds, resumes=resumes):
        found[settled.row] = generation.token_ids
    return [found[row] for row in range(len(prompts))]


def test_an_answer_that_was_stopped(run: list[int]) -> None:
    kept, fresh = decoder_for("exact"), decoder_for("exact")
    found = turn(kept, FIRST, resumes=True, stop=5)
    assert 5 <= len(found) < 24
    text = [*FIRST[0], *found, 11, 12]
    run.clear()
    assert turn(kept, [text], resumes=True) == turn(fresh, [text], resumes=False)
    assert run[0] == 16


def test_another_text_begins_anew(run: list[int]) -> None:
    kept, fresh = decoder_for("exact"), decoder_for("exact")
    turn(kept, FIRST, resumes=True)
    other = [9, 9, 9, *FIRST[0]]
    run.clear()
    assert turn(kept, [other], resumes=True) == turn(fresh, [other], resumes=False)
    assert run[0] == 64
    # Of the same text less is left to run than its last token: that is run again.
    run.clear()
    assert turn(kept, [other], resumes=True) == turn(fresh, [other], resumes=False)
    assert run[0] == 16


@pytest.mark.parametrize("mesh", [None, "2x2"])
def test_caches_grow_with_the_conversation(mesh: str | None, run: list[int]) -> None:
    kept, fresh = decoder_for("exact", mesh), decoder_for("exact", mesh)
    text = FIRST[0] * 5
    answer = turn(kept, [text], resumes=True)
    text = [*text, *answer, *range(10, 30)]
    run.clear()
    found = turn(kept, [text], resumes=True, most=120)
    assert sum(run) <= 32
    assert found == turn(fresh, [text], resumes=False, most=120)


def test_a_chain_of_drafts_begins_anew() -> None:
    """What lies below lags behind the text."""
    spec = dataclasses.replace(SPECS["exact"], level_speculative_tokens=(2,))
    models = random_target(2, LONG), [random_draft(2, 0.3, LONG), random_draft(2, 0.4, LONG)]
    kept, fresh = (Decoder(*models, spec, batch_size=1) for _ in range(2))
    text = FIRST[0]
    for _ in range(2):
        found = turn(kept, [text], resumes=True)
        assert found == turn(fresh, [text], resumes=False)
        text = [*text, *found, 11]
