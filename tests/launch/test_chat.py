"""Prompts, texts and messages from flags, files and standard input; and the command chat."""

import builtins
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from launch_types import Captured, Decoded, Folders, Patch, Ran, Refused, Talk

from fly_jax import Engine, OpenPair, Request, RequestState
from fly_jax.decoding.programs import Programs
from fly_jax.engine.prefill import Prefill
from fly_jax.launch import view
from fly_jax.launch.inputs import read_prompts
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
    flags = ("--rule=fly", "--window_size=1", "--entropy_threshold=0")
    answers, said = talk("/exact", "Ada", "/clear", "/rule fly | margin", "Ada", flags=flags)
    assert len(answers) == 2
    assert all(f"The rule is {rule}." in said for rule in ("exact", "fly | margin"))
    _, said = talk("/rule lucky", "/dance", "/help", "/rule", "/clear all")
    for words in ("/clear stands alone, without 'all'.", "lucky", "no command /dance"):
        assert words in said


def test_a_line_that_is_not_utf_8_is_one_sentence(
    chatty: list[str], monkeypatch: Patch, ran: Ran
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nAda\n"), "utf-8"))
    out, said = ran("chat", *chatty, *SIZES)
    assert "not valid Unicode" in said
    assert said.count("tokens/s") == 1, out


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


@pytest.mark.parametrize(
    ("owner", "name", "before"),
    # A question is encoded, as is another one before weights load; it is begun; run; answered.
    [(OpenPair, "encode", 1), (Prefill, "begin", 0), (Prefill, "run", 0), (Programs, "run", 0)],
)
def test_ctrl_c_before_an_answer(
    talk: Talk, monkeypatch: Patch, owner: type, name: str, before: int
) -> None:
    """As if nothing had been asked; the next line is answered, and compiles before it."""
    (whole,), _ = talk("Ada has 3")
    does, calls, finished = getattr(owner, name), itertools.count(), list[bool]()

    def interrupted(*given: Any, **named: Any) -> object:
        if next(calls) == before:
            raise KeyboardInterrupt
        if owner is Programs:
            finished.append(bool(given[1].finished[0]))
        return does(*given, **named)

    monkeypatch.setattr(owner, name, interrupted)
    answers, said = talk("Boris", "Ada has 3")
    assert answers == [*[""] * (name != "encode"), whole]
    assert said.count("tokens/s") == 1
    assert all(finished[:1]), "what decodes was compiled before, with rows that are finished"


Answered = Callable[..., tuple[list[dict], str]]
Read = Callable[[dict], str]
FILES = {
    b"one\ntwo {x}\n\n three\r\n": ["one", "two {x}", " three"],
    b'{"prompt": "one\\ntwo", "id": 7}\r\n{"prompt": "three"}': ["one\ntwo", "three"],
    b"\xef\xbb\xbfone\n": ["one"], b'\xef\xbb\xbf\n{"prompt": "\xc3\xa9"}\n': ["\u00e9"],
}  # fmt: skip


@pytest.mark.parametrize("content", FILES)
def test_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "prompts").write_bytes(content)
    prompts = read_prompts(str(tmp_path / "prompts"), skip_bad=False)
    assert [prompt.text for prompt in prompts] == FILES[content]


def test_lines_are_named(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """Of a file whose name tells that they are JSON, and of standard input."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('plain\n{"prompt": "x"}\n')
    prompts = read_prompts(str(file), skip_bad=True)
    assert [prompt.source for prompt in prompts] == [f"{file}, line 2"]
    assert "line 1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\n\xff\n")))
    assert [prompt.text for prompt in read_prompts("-", skip_bad=True)] == ["one"]
    assert "Standard input, line 2" in capsys.readouterr().err


@pytest.fixture
def answered(chatty: list[str], ran: Ran) -> Answered:
    """Runs the command; gives the objects that it prints, and what it says."""

    def run(*arguments: str) -> tuple[list[dict], str]:
        out, said = ran(*chatty, *SIZES, "--json", *arguments)
        return [json.loads(line) for line in out.splitlines()], said

    return run


@pytest.fixture
def read(tokenizer: Tokenizer) -> Read:
    """What a target was given to read."""
    return lambda one: tokenizer.decode(one["prompt_token_ids"], skip_special_tokens=False)


def test_a_text_is_a_users_message(
    answered: Answered, read: Read, chatty: list[str], ran: Ran
) -> None:
    """Where there is a template; and the answer stands apart from it."""
    given = [*chatty, "--prompt=Ada has 3", *SIZES]
    assert ran(*given).out.startswith("Ada has 3\n\n")
    assert not ran(*given, "--nochat").out.startswith("Ada has 3\n")
    (record,), said = answered("--prompt=Ada has 3")
    assert read(record) == "user:Ada has 3</s>assistant:"
    assert record["prompt"] == "Ada has 3"
    assert said.count("--nochat") == 1
    (asked,), said = answered("--prompt=Ada has 3", "--chat")
    assert asked["token_ids"] == record["token_ids"]
    assert "--nochat" not in said


def test_lines_of_messages(
    answered: Answered, read: Read, refused: Refused, chatty: list[str], tmp_path: Path
) -> None:
    """And a system message before them."""
    spoken = [("user", "Ada"), ("assistant", "has"), ("user", "</s>3")]
    turns = [{"role": role, "content": text} for role, text in spoken]
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": turns, "prompt": "</s>3"}, {"prompt": "Boris"}]  # as --json writes them
    file.write_text("\n".join(json.dumps(line) for line in lines))
    first, second = answered(f"--prompts_file={file}", "--system=Be short.")[0]
    begin = "system:Be short.</s>"
    assert read(first) == f"{begin}user:Ada</s>assistant:has</s>user:</s>3</s>assistant:"
    assert first["messages"] == turns
    assert read(second) == f"{begin}user:Boris</s>assistant:"
    raw, said = answered(f"--prompts_file={file}", "--nochat")
    assert read(raw[1]) == "<s>Boris"
    assert "--nochat" not in said
    for role, words in (
        ("tool", "line 1: The chat template refuses these messages (No tools.)"),
        ("system", "--system was given as well"),
    ):
        messages = [{"role": one, "content": "x"} for one in (role, "user")]
        file.write_text(json.dumps({"messages": messages}))
        refused(*chatty, f"--prompts_file={file}", "--system=Be short.", words=[words])


NAMED = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default"}]}
TEMPLATES = {
    b"\xff{{ messages }}": ("chat_template.jinja", "cannot be read"),
    b"{% for one in %}": ("chat_template.jinja", "fails (TemplateSyntaxError"),
    b"{{ 1 / 0 }}": ("chat_template.jinja", "fails (ZeroDivisionError: division by zero)"),
    b"{{ raise_exception('one\\ntwo') }}": ("chat_template.jinja", "messages (one two)"),
    b'{"chat_template": ["a"]}': ("tokenizer_config.json", "neither a text nor a list"),
    b'{"chat_template": 3}': ("tokenizer_config.json", "neither a text nor a list"),
    json.dumps(NAMED).encode(): ("tokenizer_config.json", "no chat template"),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("content", TEMPLATES)
def test_a_template_that_fails(
    refused: Refused, tiny_pair: Folders, tmp_path: Path, content: bytes
) -> None:
    """In a chat too it is known before weights are read."""
    file, words = TEMPLATES[content]
    folder = shutil.copytree(tiny_pair[0], tmp_path / "target")
    (folder / file).write_bytes(content)
    for command in (["chat"], ["generate", "--prompt=Ada", "--chat"]):
        refused(*command, f"--target={folder}", f"--draft={tiny_pair[1]}", words=[words])
