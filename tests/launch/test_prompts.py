"""Prompts: texts and messages, from flags, files and standard input."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_types import Captured, Folders, Patch, Ran, Refused

from fly_jax.evaluation.problems import is_correct
from fly_jax.launch.inputs import built_in_prompts, read_prompts
from fly_jax.models.tokenizer import Tokenizer

SIZES = ["--max_new_tokens=4", "--rule=exact", "--num_speculative_tokens=2", "--json"]
Answered = Callable[..., tuple[list[dict], str]]
Read = Callable[[dict], str]
FILES = {
    b"one\ntwo {x}\n\n three\r\n": ["one", "two {x}", " three"],
    b'{"prompt": "one\\ntwo", "id": 7}\r\n{"prompt": "three"}': ["one\ntwo", "three"],
    b"\xef\xbb\xbfone\n": ["one"],
    b'\xef\xbb\xbf\n{"prompt": "\xc3\xa9"}\n': ["\u00e9"],
}


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


def test_built_in_prompts_are_held_out_and_the_same_every_time() -> None:
    prompts = built_in_prompts()
    assert prompts == built_in_prompts()
    problems = [prompt.problem for prompt in prompts if prompt.problem is not None]
    assert len(problems) == 8
    assert 1 <= len(prompts) - len(problems) <= 2
    for problem in problems:
        assert is_correct(problem, problem.solution)


@pytest.fixture
def answered(chatty: list[str], ran: Ran) -> Answered:
    """Runs the command; gives the objects that it prints, and what it says."""

    def run(*arguments: str) -> tuple[list[dict], str]:
        out, said = ran(*chatty, *SIZES, *arguments)
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
    given = [*chatty, "--prompt=Ada has 3", *SIZES[:-1]]
    assert ran(*given).out.startswith("Ada has 3\n\n")
    assert not ran(*given, "--nochat").out.startswith("Ada has 3\n")
    (record,), said = answered("--prompt=Ada has 3")
    assert read(record) == "user:Ada has 3</s>assistant:"
    assert record["prompt"] == "Ada has 3"
    assert said.count("--nochat") == 1
    (asked,), said = answered("--prompt=Ada has 3", "--chat")
    assert asked["token_ids"] == record["token_ids"]
    assert "--nochat" not in said


def test_lines_of_messages(answered: Answered, read: Read, tmp_path: Path) -> None:
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


def test_messages_that_are_refused(refused: Refused, chatty: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    arguments = [*chatty, *SIZES, f"--prompts_file={file}", "--system=Be short."]
    for roles, words in (
        (["tool", "user"], ["line 1: The chat template refuses these messages (No tools.)"]),
        (["system", "user"], ["--system was given as well"]),
    ):
        file.write_text(json.dumps({"messages": [{"role": one, "content": "x"} for one in roles]}))
        refused(*arguments, words=words)


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


def test_flags_without_a_template(refused: Refused, models: list[str]) -> None:
    refused("chat", *models, words=["no chat template"])
    given = [*models, *SIZES, "--prompt=Ada"]
    refused(*given, "--chat", words=["no chat template"])
    refused(*given, "--system=Be short.", words=["no prompt is a conversation"])
