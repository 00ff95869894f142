"""The command chat: answers, its own commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from launch_types import Decoded, Patch, Ran, Talk

from fly_jax.decoding.pair import OpenPair
from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import DecodeState
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState
from fly_jax.launch import view
from fly_jax.models.tokenizer import Tokenizer

SIZES = ["--max_new_tokens=8", "--num_speculative_tokens=2", "--rule=exact"]


@pytest.fixture
def talk(chatty: list[str], monkeypatch: Patch, ran: Ran) -> Talk:
    """Types lines, then Ctrl-D; gives the answers, and what the program says."""

    def run(*typed: str | type[BaseException], flags: Sequence[str] = ()) -> tuple[list[str], str]:
        monkeypatch.setattr(builtins, "input", Mock(side_effect=[*typed, EOFError]))
        out, said = ran("chat", *chatty, *SIZES, *flags)
        return out.removesuffix("\n").split("\n\n")[:-1], said

    return run


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal(is_terminal: bool, talk: Talk, monkeypatch: Patch) -> None:
    """It says what is waited for, and tokens have the colours of their reasons."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(view, "wants_colour", lambda _: is_terminal)
    answers, said = talk("Ada has 3")
    for why in ("Reading the weights", "Compiling"):
        assert (f"{why} …\r\033[K" in said) == (why in said) == is_terminal
    assert ("\x1b[" in answers[0]) == is_terminal


def test_turns_are_one_conversation(
    talk: Talk, chatty: list[str], tmp_path: Path, decoded: Decoded
) -> None:
    """With the answers that generate gives."""
    messages, expected = [{"role": "system", "content": "Short."}], []
    file = tmp_path / "prompts.jsonl"
    for line in ("Ada has 3", "Boris"):
        messages.append({"role": "user", "content": line})
        file.write_text(json.dumps({"messages": messages}))
        expected += [one["text"] for one in decoded(*chatty, *SIZES, f"--prompts_file={file}")]
        messages.append({"role": "assistant", "content": expected[-1]})
    answers, said = talk("Ada has 3", "", "Boris", flags=("--system=Short.",))
    assert answers == expected
    assert said.count("tokens/s") == said.count("mean accepted tokens") == 2
    assert "readline" in sys.modules, "lines have a history"
    answers, said = talk("Ada has 3", "/clear", "Ada has 3", flags=("--system=Short.",))
    assert answers == [expected[0]] * 2
    assert "Forgotten." in said


def test_the_rule_is_changed_on_the_way(talk: Talk) -> None:
    flags = ("--rule=fly", "--num_speculative_tokens=8", "--entropy_threshold=0")
    answers, said = talk("/exact", "Ada", "/clear", "/rule fly | margin", "Ada", flags=flags)
    assert len(answers) == 2
    assert all(f"The rule is {rule}." in said for rule in ("exact", "fly | margin"))
    _, said = talk("/rule lucky", "/dance", "/help", "/rule", "/clear all")
    for words in ("/clear stands alone, without 'all'.", "lucky", "There is no command /dance"):
        assert words in said


@pytest.fixture
def submitted(monkeypatch: Patch) -> list[RequestState]:
    """The requests that were handed in."""
    states, submit = list[RequestState](), Engine.submit

    def submitting(self: Engine, request: Request) -> RequestState:
        states.append(submit(self, request))
        return states[-1]

    monkeypatch.setattr(Engine, "submit", submitting)
    return states


def test_what_was_said_is_not_taken_in_again(talk: Talk, submitted: list[RequestState]) -> None:
    talk("Ada has 3", "And?", "/clear", "Boris", flags=("--max_new_tokens=20",))
    first, second, third = submitted
    assert first.num_reused == third.num_reused == 0, "which has nothing in common but a word"
    assert second.num_reused > 0


def test_ctrl_c_stops_an_answer(
    talk: Talk, tokenizer: Tokenizer, submitted: list[RequestState], monkeypatch: Patch
) -> None:
    """And not the program."""
    whole, _ = talk("Ada has 3")
    run = Engine.run

    def interrupted(self: Engine, requests: Sequence[Request]) -> Iterator:
        for number, item in enumerate(run(self, requests)):
            if number and len(submitted) == 2:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(Engine, "run", interrupted)
    answers, said = talk("Ada has 3", KeyboardInterrupt, "And?")
    assert len(answers) == 2
    assert whole[0].startswith(answers[0])
    assert len(answers[0]) < len(whole[0])
    assert "Ctrl-D ends the program." in said
    told = tokenizer.decode(submitted[2].request.prompt, skip_special_tokens=False)
    assert told == f"user:Ada has 3</s>assistant:{answers[0]}</s>user:And?</s>assistant:"


def test_ctrl_c_while_an_answer_is_prepared(talk: Talk, monkeypatch: Patch) -> None:
    """As if nothing had been asked; the next line is answered, and compiles before it."""
    (whole,), _ = talk("Ada has 3")
    run, interrupts, finished = Programs.run, iter([KeyboardInterrupt]), list[bool]()

    def interrupted(self: Programs, state: DecodeState, *given: object) -> object:
        for error in interrupts:
            raise error
        finished.append(bool(state.finished[0]))
        return run(self, state, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Programs, "run", interrupted)
    answers, said = talk("Boris", "Ada has 3")
    assert answers == ["", whole]
    assert finished[0], "what decodes was compiled before, with rows that are finished"
    assert said.count("tokens/s") == 1


def test_ctrl_c_while_a_question_is_encoded(talk: Talk, monkeypatch: Patch) -> None:
    encode, interrupts = OpenPair.encode, iter([False, True])  # the first is before weights load

    def interrupted(*given: object, **named: object) -> object:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return encode(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(OpenPair, "encode", interrupted)
    answers, said = talk("Boris", "Ada has 3")
    assert len(answers) == said.count("tokens/s") == 1
