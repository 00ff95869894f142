"""Prompts as messages: by --chat, by a template that is there, and as lines of a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fly_jax.decoding import pair as pair_module
from fly_jax.launch.__main__ import main
from fly_jax.models.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'tool' %}{{ raise_exception('No tools.') }}"
    "{% endif %}{{ one.role }}:{{ one.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = ["--max_new_tokens=4", "--rule=exact", "--num_speculative_tokens=2", "--json"]


@pytest.fixture(scope="module")
def chatty(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(tiny_pair[0], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def decoded(
    chatty: Path, tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[dict], str]]:
    """Runs the command; gives the objects that it prints, and what it says."""

    def run(*arguments: str) -> tuple[list[dict], str]:
        models = [f"--target={chatty}", f"--draft={tiny_pair[1]}"]
        assert main([*models, *SIZES, *arguments]) == 0
        captured = capsys.readouterr()
        return [json.loads(line) for line in captured.out.splitlines()], captured.err

    return run


def text_of(folder: Path, ids: list[int]) -> str:
    return load_tokenizer(folder).decode(ids, skip_special_tokens=False)


def test_a_text_is_a_users_message_where_there_is_a_template(
    decoded: Callable[..., tuple[list[dict], str]], chatty: Path
) -> None:
    (record,), said = decoded("--prompt=Ada has 3")
    assert text_of(chatty, record["prompt_token_ids"]) == "user:Ada has 3</s>assistant:"
    assert record["prompt"] == "Ada has 3"
    assert said.count("--nochat") == 1
    (asked,), said = decoded("--prompt=Ada has 3", "--chat")
    assert asked["token_ids"] == record["token_ids"]
    assert "--nochat" not in said


def test_an_answer_stands_apart_from_what_was_asked(
    chatty: Path, tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--target={chatty}", f"--draft={tiny_pair[1]}", "--prompt=Ada has 3", *SIZES[:-1]]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("Ada has 3\n\n")
    assert main([*arguments, "--nochat"]) == 0
    assert not capsys.readouterr().out.startswith("Ada has 3\n")


def test_nochat_continues_the_text(
    decoded: Callable[..., tuple[list[dict], str]], chatty: Path
) -> None:
    (record,), said = decoded("--prompt=Ada has 3", "--nochat")
    assert text_of(chatty, record["prompt_token_ids"]) == "<s>Ada has 3"
    assert "--nochat" not in said


def test_a_system_message_and_lines_of_messages(
    decoded: Callable[..., tuple[list[dict], str]], chatty: Path, tmp_path: Path
) -> None:
    turns = [
        {"role": "user", "content": "Ada"},
        {"role": "assistant", "content": "has"},
        {"role": "user", "content": "</s>3"},
    ]
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": turns, "prompt": "</s>3"}, {"prompt": "Boris"}]  # as --json writes them
    file.write_text("\n".join(json.dumps(line) for line in lines))
    first, second = decoded(f"--prompts_file={file}", "--system=Be short.")[0]
    begin = "system:Be short.</s>"
    rendered = f"{begin}user:Ada</s>assistant:has</s>user:</s>3</s>assistant:"
    assert text_of(chatty, first["prompt_token_ids"]) == rendered
    assert first["messages"] == turns
    assert text_of(chatty, second["prompt_token_ids"]) == f"{begin}user:Boris</s>assistant:"
    raw = decoded(f"--prompts_file={file}", "--nochat")[0]
    assert text_of(chatty, raw[1]["prompt_token_ids"]) == "<s>Boris"


@pytest.mark.parametrize(
    "messages",
    ["Hello", [], [{"role": "user"}], [{"role": "user", "content": 3}], [["user", "Hello"]]],
)
def test_messages_of_the_wrong_shape(
    refused: Callable[..., str], models: list[str], tmp_path: Path, messages: object
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    sentence = refused(*models, *SIZES, f"--prompts_file={file}")
    assert "line 1 has messages that are not a list" in sentence


def test_a_template_that_refuses(
    refused: Callable[..., str], tiny_pair: tuple[Path, Path], chatty: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}]}))
    models = [f"--target={chatty}", f"--draft={tiny_pair[1]}"]
    sentence = refused(*models, *SIZES, f"--prompts_file={file}")
    assert "line 1: The chat template refuses these messages (No tools.)" in sentence


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
    refused: Callable[..., str],
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: bytes,
    words: str,
) -> None:
    """In a chat too it is known before weights are read."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(pair_module, "load_llama", load)
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair[0], folder)
    (folder / file).write_bytes(content)
    models = [f"--target={folder}", f"--draft={tiny_pair[1]}"]
    for arguments in (["chat", *models], ["generate", *models, "--prompt=Ada", "--chat"]):
        assert words in refused(*arguments)


def test_a_list_without_a_default_is_no_template(
    refused: Callable[..., str], tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair[0], folder)
    named = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    assert "no chat template" in refused("chat", f"--target={folder}")


def test_two_messages_of_the_system(
    refused: Callable[..., str], tiny_pair: tuple[Path, Path], chatty: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "Ada"}]
    file.write_text(json.dumps({"messages": turns}))
    models = [f"--target={chatty}", f"--draft={tiny_pair[1]}"]
    sentence = refused(*models, *SIZES, f"--prompts_file={file}", "--system=Be short.")
    assert "--system was given as well" in sentence


def test_flags_without_a_template(refused: Callable[..., str], models: list[str]) -> None:
    assert "no chat template" in refused(*models, *SIZES, "--prompt=Ada", "--chat")
    assert "no prompt is a conversation" in refused(
        *models, *SIZES, "--prompt=Ada", "--system=Be short."
    )
