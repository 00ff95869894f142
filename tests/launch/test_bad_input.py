"""Whatever is wrong is one sentence and status 2, before any weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fly_jax.decoding import pair as pair_module


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(pair_module, "load_llama", load)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt="], ["Prompt 1", "empty"]),
        (["--prompt=x", "--prompt=\udcff"], ["Prompt 2", "Unicode"]),
        (["--prompt=x", "--mesh=8y8"], ["8y8"]),
        (["--prompt=x", "--mesh=3x3"], ["9", "8"]),
        (["--prompt=x", "--num_speculative_tokens=6"], ["num_speculative_tokens=6", "window"]),
        (["--prompt=x", "--num_speculative_tokens=0"], ["num_speculative_tokens"]),
        (["--prompt=x", "--num_speculative_tokens=5000"], ["5000", "96"]),
        (["--prompt=x", "--rule=exact", "--temperature=0.5"], ["exact", "sampled"]),
        (["--prompt=x", "--rule=sampled", "--temperature=0"], ["sampled", "exact"]),
        (["--prompt=x", "--temperature=nan"], ["nan"]),
        (["--prompt=x", "--top_p=0.5"], ["top_p"]),
        (["--prompt=x", "--rule=sampled", "--top_p=1.5"], ["top_p", "1.5"]),
        (["--prompt=x", "--prompt_lookup_max=-1"], ["prompt_lookup_max"]),
        (["--prompt=x", "--prompt_lookup_max=2", "--prompt_lookup_min=3"], ["prompt_lookup_min"]),
        (["--prompt=" + "Ada " * 200], ["Prompt 1", "96"]),
        (["--prompts_file=/nowhere/prompts.txt"], ["/nowhere/prompts.txt"]),
        (["--config=/nowhere/config.toml"], ["/nowhere/config.toml"]),
    ],
)
def test_values(
    refused: Callable[..., str], models: list[str], arguments: list[str], words: list[str]
) -> None:
    sentence = refused(*models, *arguments)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', ["line 3", "JSON"]),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ["line 2", "UTF-8"]),
        (b'{"prompt": "a"}\n{"text": "b"}\n', ["line 2", "prompt"]),
        (b'{"prompt": "a"}\n["b"]\n', ["line 2", "prompt"]),
        (b'{"prompt": "a"}\n{"prompt": 3}\n', ["line 2", "prompt"]),
        (b'{"prompt": ""}\n', ["line 1", "empty"]),
        (b'{"prompt": "\\ud800"}\n', ["line 1", "Unicode"]),
        (b"a\n\xe9\n", ["line 2", "UTF-8"]),
        (b"\n \n", ["no prompt"]),
    ],
)
def test_lines_of_a_prompts_file(
    refused: Callable[..., str],
    models: list[str],
    tmp_path: Path,
    content: bytes,
    words: list[str],
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    sentence = refused(*models, f"--prompts_file={file}")
    assert str(file) in sentence
    for word in words:
        assert word in sentence


def test_nothing_left_after_skipping(models: list[str], tmp_path: Path) -> None:
    from fly_jax.launch.__main__ import main

    file = tmp_path / "prompts.jsonl"
    file.write_text("nonsense\n")
    assert main([*models, f"--prompts_file={file}", "--skip_bad_prompts"]) == 2


def test_a_target_without_a_draft(
    refused: Callable[..., str], tiny_pair: tuple[Path, Path]
) -> None:
    target = f"--target={tiny_pair[0]}"
    assert "--draft" in refused(target, "--prompt=x", "--rule=exact")
    comparing = refused(target, "--prompt=x", "--rule=autoregressive", "--compare")
    assert "--compare" in comparing


def test_missing_model(refused: Callable[..., str], tiny_pair: tuple[Path, Path]) -> None:
    assert "/nowhere/target" in refused(
        "--target=/nowhere/target", f"--draft={tiny_pair[1]}", "--prompt=x"
    )
    assert "/nowhere/draft" in refused(
        f"--target={tiny_pair[0]}", "--draft=/nowhere/draft", "--prompt=x"
    )


def test_broken_draft(
    refused: Callable[..., str], tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Truncated weights, and a vocabulary that is not the target's."""
    draft = tmp_path / "draft"
    shutil.copytree(tiny_pair[1], draft)
    flags = [f"--target={tiny_pair[0]}", f"--draft={draft}", "--prompt=x"]
    weights = draft / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "model.safetensors" in refused(*flags)
    weights.write_bytes(whole)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert "300" in refused(*flags)
    # The same below a good draft, and before any weight is read.
    assert "300" in refused(flags[0], f"--draft={tiny_pair[1]}", f"--draft={draft}", "--prompt=x")
    assert "at least 1" in refused(*flags, "--level_speculative_tokens=0")
    assert "defer" in refused(*flags, "--boundary=sometimes")
