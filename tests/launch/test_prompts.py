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
from launch_types import Captured, Patch, Refused

from fly_jax.evaluation.problems import is_correct
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import built_in_prompts, read_prompts
from fly_jax.models.tokenizer import load_tokenizer

SIZES = ["--max_new_tokens=4", "--rule=exact", "--num_speculative_tokens=2", "--json"]
Answered = Callable[..., tuple[list[dict], str]]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"one\ntwo {x}\n\n three\r\n", ["one", "two {x}", " three"]),
        (b'{"prompt": "one\\ntwo", "id": 7}\r\n{"prompt": "three"}', ["one\ntwo", "three"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        (b'\xef\xbb\xbf\n{"prompt": "\xc3\xa9"}\n', ["\u00e9"]),
    ],
)
def test_files(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    assert [prompt.text for prompt in read_prompts(str(file), skip_bad=False)] == texts


def test_the_name_tells_that_lines_are_json(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('plain\n{"prompt": "x"}\n')
    prompts = read_prompts(str(file), skip_bad=True)
    assert [prompt.source for prompt in prompts] == [f"{file}, line 2"]
    assert "line 1" in capsys.readouterr().err


def test_standard_input(monkeypatch: Patch, capsys: Captured) -> None:
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
def answered(chatty: list[str], capsys: Captured) -> Answered:
    """Runs the command; gives the objects that it prints, and what it says."""

    def run(*arguments: str) -> tuple[list[dict], str]:
        assert main([*chatty, *SIZES, *arguments]) == 0
        captured = capsys.readouterr()
        return [json.loads(line) for line in captured.out.splitlines()], captured.err

    return run


def text_of(chatty: list[str], ids: list[int]) -> str:
    folder = Path(chatty[0].partition("=")[2])
    return load_tokenizer(folder).decode(ids, skip_special_tokens=False)


def test_a_text_is_a_users_message_where_there_is_a_template(
    answered: Answered, chatty: list[str]
) -> None:
    (record,), said = answered("--prompt=Ada has 3")
    assert text_of(chatty, record["prompt_token_ids"]) == "user:Ada has 3</s>assistant:"
    assert record["prompt"] == "Ada has 3"
    assert said.count("--nochat") == 1
    (asked,), said = answered("--prompt=Ada has 3", "--chat")
    assert asked["token_ids"] == record["token_ids"]
    assert "--nochat" not in said


def test_an_answer_stands_apart_from_what_was_asked(chatty: list[str], capsys: Captured) -> None:
    arguments = [*chatty, "--prompt=Ada has 3", *SIZES[:-1]]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("Ada has 3\n\n")
    assert main([*arguments, "--nochat"]) == 0
    assert not capsys.readouterr().out.startswith("Ada has 3\n")


def test_nochat_continues_the_text(answered: Answered, chatty: list[str]) -> None:
    (record,), said = answered("--prompt=Ada has 3", "--nochat")
    assert text_of(chatty, record["prompt_token_ids"]) == "<s>Ada has 3"
    assert "--nochat" not in said


def test_a_system_message_and_lines_of_messages(
    answered: Answered, chatty: list[str], tmp_path: Path
) -> None:
    turns = [
        {"role": "user", "content": "Ada"},
        {"role": "assistant", "content": "has"},
        {"role": "user", "content": "</s>3"},
    ]
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": turns, "prompt": "</s>3"}, {"prompt": "Boris"}]  # as --json writes them
    file.write_text("\n".join(json.dumps(line) for line in lines))
    first, second = answered(f"--prompts_file={file}", "--system=Be short.")[0]
    begin = "system:Be short.</s>"
    rendered = f"{begin}user:Ada</s>assistant:has</s>user:</s>3</s>assistant:"
    assert text_of(chatty, first["prompt_token_ids"]) == rendered
    assert first["messages"] == turns
    assert text_of(chatty, second["prompt_token_ids"]) == f"{begin}user:Boris</s>assistant:"
    raw = answered(f"--prompts_file={file}", "--nochat")[0]
    assert text_of(chatty, raw[1]["prompt_token_ids"]) == "<s>Boris"


@pytest.mark.parametrize(
    "messages",
    ["Hello", [], [{"role": "user"}], [{"role": "user", "content": 3}], [["user", "Hello"]]],
)
def test_messages_of_the_wrong_shape(
    refused: Refused, models: list[str], tmp_path: Path, messages: object
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    words = ["line 1 has messages that are not a list"]
    refused(*models, *SIZES, f"--prompts_file={file}", words=words)


@pytest.mark.parametrize(
    ("role", "more", "words"),
    [
        ("tool", [], ["line 1: The chat template refuses these messages (No tools.)"]),
        ("system", ["--system=Be short."], ["--system was given as well"]),
    ],
)
def test_messages_that_are_refused(
    refused: Refused,
    chatty: list[str],
    tmp_path: Path,
    role: str,
    more: list[str],
    words: list[str],
) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": role, "content": "x"}, {"role": "user", "content": "Ada"}]
    file.write_text(json.dumps({"messages": turns}))
    refused(*chatty, *SIZES, f"--prompts_file={file}", *more, words=words)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("chat_template.jinja", b"\xff{{ messages }}", "cannot be read"),
        ("chat_template.jinja", b"{% for one in %}", "fails (TemplateSyntaxError"),
        ("chat_template.jinja", b"{{ 1 / 0 }}", "fails (ZeroDivisionError: division by zero)"),
        ("chat_template.jinja", b"{{ raise_exception('one\\ntwo') }}", "messages (one two)"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}', "neither a text nor a list"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "neither a text nor a list"),
    ],
)
def test_a_template_that_fails(
    refused: Refused,
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    file: str,
    content: bytes,
    words: str,
) -> None:
    """In a chat too it is known before weights are read."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair[0], folder)
    (folder / file).write_bytes(content)
    models = [f"--target={folder}", f"--draft={tiny_pair[1]}"]
    for arguments in (["chat", *models], ["generate", *models, "--prompt=Ada", "--chat"]):
        refused(*arguments, words=[words])


def test_a_list_without_a_default_is_no_template(
    refused: Refused, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair[0], folder)
    named = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    refused("chat", f"--target={folder}", words=["no chat template"])


def test_flags_without_a_template(refused: Refused, models: list[str]) -> None:
    refused("chat", *models, words=["no chat template"])
    given = [*models, *SIZES, "--prompt=Ada"]
    refused(*given, "--chat", words=["no chat template"])
    refused(*given, "--system=Be short.", words=["no prompt is a conversation"])
