"""Converted checkpoints and GGUF files through the commands: they decode, or are refused."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from gguf_files import CONFIG, byte_level_writer, tensors_of, write_sized
from launch_types import Decoded, Folders, Patch, Ran, Refused
from tokenizer_makers import llama3_json

from fly_jax.launch.__main__ import main
from fly_jax.models.checkpoints import converted
from fly_jax.models.llama import Llama

Tokens = Callable[..., list[int]]
ADA = "Ada has 3"


@pytest.fixture
def tokens(decoded: Decoded) -> Tokens:
    given = "--max_new_tokens=12"
    return lambda prompt, *flags: decoded(*flags, f"--prompt={prompt}", given)[0]["token_ids"]


def test_int8_decodes_alike(models: list[str], tmp_path: Path, tokens: Tokens) -> None:
    """Quantised while it loads, or converted before."""
    folders = [f"--target={tmp_path / 'target'}", f"--draft={tmp_path / 'draft'}"]
    for flag, folder in zip(models, folders, strict=False):
        source, output = (one.partition("=")[2] for one in (flag, folder))
        assert main(["convert", f"--target={source}", f"--output={output}", "--dtype=int8"]) == 0
    loaded = tokens(ADA, *models[:2], "--dtype=int8")
    assert tokens(ADA, *folders, "--dtype=float32") == loaded


def test_an_interrupted_conversion_says_how_to_go_on(
    tiny_pair: Folders, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    arguments = ["convert", f"--target={tiny_pair[0]}", f"--output={tmp_path / 'output'}"]
    with monkeypatch.context() as patch:
        patch.setattr(converted, "write_group", Mock(side_effect=KeyboardInterrupt))
        said = ran(*arguments, status=130).err
    assert "python -m fly_jax.launch " + " ".join(arguments) in said
    ran(*arguments)


TEMPLATE = "{% for one in messages %}{{ one.content }}<|eot|>{% endfor %}"
EXACT = ["--rule=exact", "--num_speculative_tokens=3"]


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


def test_target_and_drafts(files: Folders, tokens: Tokens, tmp_path: Path, ran: Ran) -> None:
    target, output = f"--target={files[0]}", tmp_path / "folder"
    alone = tokens("the fox", target)
    assert len(alone) > 4
    sizes = ["--mesh=1x1", "--context=64", "--nocompile", "--json"]
    for draft in (str(files[1]), "self:int4"):
        assert tokens("the fox", target, f"--draft={draft}", *EXACT) == alone
        plan = json.loads(ran("plan", target, f"--draft={draft}", *sizes).out)
        kinds = {one["matrices"] for one in plan["drafters"]["passes"]}
        assert ("int4" in kinds) == (draft == "self:int4")
    assert main(["convert", target, f"--output={output}", "--dtype=float32"]) == 0
    assert tokens("the fox", f"--target={output}") == alone


def test_a_chat(files: Folders, tokens: Tokens, ran: Ran, monkeypatch: Patch) -> None:
    """The README's command, which a file alone is enough for."""
    given = [f"--target={files[0]}", "--dtype=int8"]
    expected = tokens("the fox", *given)
    monkeypatch.setattr(builtins, "input", Mock(side_effect=["the fox", EOFError]))
    said = ran("chat", *given, "--draft=self:int4", *EXACT, "--max_new_tokens=12").err
    assert all(words in said for words in (f"[{len(expected)} tokens, ", "mean accepted tokens"))
    assert said.count("On a CPU a pass of self:int4 takes as long as an int8 target's") == 1


def test_a_file_that_was_cut_off(refused: Refused, files: Folders, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[0].read_bytes()[:-5000])
    for command, own in (
        ("generate", ["--prompt=the fox"]),
        ("chat", []),
        ("plan", [f"--draft={files[1]}", "--nocompile"]),
        ("convert", [f"--output={tmp_path / 'folder'}"]),
    ):
        refused(command, f"--target={cut}", *own, words=[str(cut), "cut off"])
