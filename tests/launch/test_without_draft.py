"""A target without a draft model: the lookup drafts, or nothing does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fly_jax.launch.__main__ import main

PROMPT = "Ada has 3 apples and Ada has 3"
SIZES = ["--max_new_tokens=12", "--json"]


def decoded(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict, str]:
    assert main([f"--prompt={PROMPT}", *SIZES, *arguments]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_lookup_or_nothing_drafts(
    tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"--target={tiny_pair[0]}", "--dtype=float32"]
    exact = ["--rule=exact", "--num_speculative_tokens=4"]
    alone, said = decoded(capsys, *target)
    assert alone["rule"] == "autoregressive"
    assert said.count("one token at a time") == 1
    named, said = decoded(capsys, *target, "--draft=ngram", *exact)
    assert "one token at a time" not in said
    implied, _ = decoded(capsys, *target, "--prompt_lookup_max=4", *exact)
    assert named["token_ids"] == implied["token_ids"] == alone["token_ids"]
    assert named["num_draft_tokens"] == implied["num_draft_tokens"] > 0


def test_the_embedded_target_takes_the_lookup(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = decoded(capsys, "--draft=ngram", "--rule=exact", "--num_speculative_tokens=4")
    expected, _ = decoded(capsys, "--rule=autoregressive")
    assert found["token_ids"] == expected["token_ids"]
    assert found["num_draft_tokens"] > 0


def test_what_proposes_alone_stands_alone(
    tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = ["--draft=ngram", f"--draft={tiny_pair[1]}"]
    assert main([f"--prompt={PROMPT}", f"--target={tiny_pair[0]}", *drafts]) == 2
    assert "proposes alone" in capsys.readouterr().err
