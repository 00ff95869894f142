"""The command convert: what it writes decodes like its source; what is wrong is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launch_types import Captured, Decoded, Folders, Patch, Refused

from fly_jax.launch.__main__ import main
from fly_jax.models.checkpoints import write as module

Tokens = Callable[..., list[int]]


@pytest.fixture
def tokens(decoded: Decoded) -> Tokens:
    given = ["--prompt=Ada has 3", "--max_new_tokens=12"]
    return lambda *flags: decoded(*flags, *given)[0]["token_ids"]


def test_the_sources_tokens_on_meshes(tiny_pair: Folders, tmp_path: Path, tokens: Tokens) -> None:
    target, output = tiny_pair[0], tmp_path / "output"
    assert main(["convert", f"--target={target}", f"--output={output}", "--dtype=bf16"]) == 0
    flags = ("--rule=autoregressive", "--dtype=float32")
    expected = tokens(f"--target={target}", *flags)
    assert tokens(f"--target={output}", *flags) == expected
    assert tokens(f"--target={output}", *flags, "--mesh=2x4") == expected


def test_int8_decodes_alike(tiny_pair: Folders, tmp_path: Path, tokens: Tokens) -> None:
    """Quantised while it loads, or converted before."""
    for name, source in zip(("target", "draft"), tiny_pair, strict=True):
        folder = f"--output={tmp_path / name}"
        assert main(["convert", f"--target={source}", folder, "--dtype=int8"]) == 0
    loaded = tokens(f"--target={tiny_pair[0]}", f"--draft={tiny_pair[1]}", "--dtype=int8")
    folders = (f"--target={tmp_path / 'target'}", f"--draft={tmp_path / 'draft'}")
    assert tokens(*folders, "--dtype=bfloat16") == loaded


def test_what_is_wrong(refused: Refused, tiny_pair: Folders, tmp_path: Path) -> None:
    target, output = f"--target={tiny_pair[0]}", f"--output={tmp_path / 'a'}"
    refused("convert", output, words=["--target"])
    refused("convert", target, words=["--output"])
    refused("convert", "--target=/nowhere", output, words=["/nowhere"])
    refused("convert", target, f"--output={tiny_pair[1]}", words=["is no conversion"])
    refused("convert", target, output, "--dtype=int4", words=["dtype"])


def test_an_interrupted_conversion_says_how_to_go_on(
    tiny_pair: Folders, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_group", interrupted)
    arguments = ["convert", f"--target={tiny_pair[0]}", f"--output={tmp_path / 'output'}"]
    assert main(arguments) == 130
    assert "python -m fly_jax.launch " + " ".join(arguments) in capsys.readouterr().err
    monkeypatch.undo()
    assert main(arguments) == 0
