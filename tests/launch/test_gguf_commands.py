"""GGUF files through the commands: as target and draft, in a chat, planned, converted, refused."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from gguf_files import CONFIG, byte_level_writer, tensors_of, write_sized
from launch_types import Captured, Decoded, Folders, Patch, Refused
from tokenizer_makers import llama3_json

from fly_jax.launch.__main__ import main
from fly_jax.models.llama import Llama

TEMPLATE = "{% for one in messages %}{{ one.content }}<|eot|>{% endfor %}"
EXACT = ["--rule=exact", "--num_speculative_tokens=3"]
Tokens = Callable[..., list[int]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two models that share a tokenizer with a chat template."""
    made = llama3_json()
    put = byte_level_writer(made, "gpt-2", adds_bos=True, template=TEMPLATE)

    def write(number: int) -> Path:
        tensors = tensors_of(Llama.random(CONFIG, jax.random.key(number)))
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        return write_sized(path, tensors, made.get_vocab_size(), put)

    return write(0), write(1)


@pytest.fixture
def tokens(decoded: Decoded) -> Tokens:
    return lambda *flags: decoded(*flags, "--prompt=the fox", "--max_new_tokens=12")[0]["token_ids"]


def test_target_and_drafts(files: Folders, tokens: Tokens, tmp_path: Path) -> None:
    target, draft = files
    alone = tokens(f"--target={target}")
    assert len(alone) > 4
    for given in (f"--draft={draft}", "--draft=self:int4"):
        assert tokens(f"--target={target}", given, *EXACT) == alone
    output = tmp_path / "folder"
    assert main(["convert", f"--target={target}", f"--output={output}", "--dtype=float32"]) == 0
    assert tokens(f"--target={output}") == alone


def test_a_chat(files: Folders, tokens: Tokens, capsys: Captured, monkeypatch: Patch) -> None:
    """The README's command, which a file alone is enough for."""
    expected = tokens(f"--target={files[0]}")
    monkeypatch.setattr(builtins, "input", Mock(side_effect=["the fox", EOFError]))
    arguments = [f"--target={files[0]}", "--draft=self:int4", *EXACT, "--max_new_tokens=12"]
    assert main(["chat", *arguments]) == 0
    said = capsys.readouterr().err
    assert f"[{len(expected)} tokens, " in said
    assert "mean accepted tokens" in said
    assert said.count("On a CPU a pass of self:int4 takes as long as the target's") == 1


def test_a_plan(files: Folders, capsys: Captured) -> None:
    sizes = ["--mesh=1x1", "--context=64", "--no_compile", "--json"]
    for draft in (str(files[1]), "self:int4"):
        assert main(["plan", f"--target={files[0]}", f"--draft={draft}", *sizes]) == 0
        passes = json.loads(capsys.readouterr().out)["drafters"]["passes"]
        assert ("int4" in {one["matrices"] for one in passes}) == (draft == "self:int4")


def test_a_file_that_was_cut_off(refused: Refused, files: Folders, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[0].read_bytes()[:-5000])
    for command, own in (
        ("generate", ["--prompt=the fox"]),
        ("chat", []),
        ("plan", [f"--draft={files[1]}", "--no_compile"]),
        ("convert", [f"--output={tmp_path / 'folder'}"]),
    ):
        refused(command, f"--target={cut}", *own, words=[str(cut), "cut off"])
