"""The command bench: what it measures of which decodings, its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_types import Captured, Refused

from fly_jax.decoding.config import DecodingConfig
from fly_jax.launch.__main__ import main
from fly_jax.launch.bench import decodings
from fly_jax.verification.rules import Budget, Fly, Margin

SIZES = ["--max_new_tokens=12", "--window_size=2"]
DECODE = ["--decode=autoregressive", "--decode=exact:2,4", "--decode=fly:4"]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """A file as Spec-Bench has it."""
    rows = [
        {"question_id": 1, "category": "qa", "turns": ["Ada has 3 apples", "And then?"]},
        {"question_id": 2, "category": "qa", "turns": ["Boris"]},
        {"question_id": 3, "category": "math", "turns": ["Vera's 12"]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_decodings_side_by_side(models: list[str], questions: str, capsys: Captured) -> None:
    picture = Path(questions).parent / "speed.svg"
    given = [f"--prompts_file={questions}", "--each=1", f"--picture={picture}", "--turns=2"]
    assert main(["bench", *models, *SIZES, *DECODE, *given, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["prompts"], found["turns"]) == (2, 2)
    plain, two, four, fly = found["decodings"].values()
    assert [*found["decodings"]] == ["autoregressive", "exact, K = 2", "exact, K = 4", "fly, K = 4"]
    for one in (plain, two, four, fly):
        assert len(one["speeds"]) == 2
        assert one["first_token_seconds"] > 0
        assert one["inter_token_seconds"] > 0
        assert [*one["by_category"]] == ["qa", "math"]
        kept = one["accepted_by_position"]
        assert kept == sorted(kept, reverse=True)
        # Without the bonus of each pass, the kept tokens are those of all positions together.
        passes = one["num_rounds"] if one["num_draft_tokens"] else 0
        assert sum(kept) * passes == pytest.approx(one["num_accepted_tokens"])
    assert two["num_tokens"] == four["num_tokens"] == plain["num_tokens"] == plain["num_rounds"]
    assert (plain["draft_share"], plain["accepted_by_position"]) == (None, [])
    assert all(0 <= one["draft_share"] < 1 for one in (two, four, fly))
    assert "<svg" in picture.read_text()
    heading = captured.err.splitlines()[-6]
    assert all(word in heading for word in ("tokens/s", "first token", "kept at", "draft"))
    assert "±" in captured.err


def test_a_decoding_has_parameters_of_its_own() -> None:
    config = DecodingConfig(rule="fly", protect=(r"\d",), window_size=3)
    given = ["fly|margin:8,auto margin_gap=0.5 protect=", "fly boundary=defer risk_budget=2"]
    one, other, last = (found := decodings(given, config, proposes=True)).values()
    assert next(iter(found)) == "fly|margin, K = 8, margin_gap=0.5, protect="
    assert [one.num_speculative_tokens, other.num_speculative_tokens] == [8, "auto"]
    assert one.to_rule() == Fly(window_size=3) | Margin(gap=0.5)
    assert (one.limits.protect, last.limits.protect) == ((), (r"\d",))
    assert (last.drafting.boundary, last.to_rule()) == ("defer", Budget(Fly(window_size=3), 2))


def test_target_alone(models: list[str], questions: str, capsys: Captured) -> None:
    given = [f"--prompts_file={questions}", "--turns=1"]
    assert main(["bench", models[0], "--dtype=float32", *SIZES, *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("autoregressive")
    assert "kept at" not in lines[0]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--decode=exact:two"], ["exact:two", "whole numbers or auto"]),
        (["--decode=exakt:2"], ["exakt"]),
        (["--decode=fly:2"], ["window"]),
        (["--decode=margin:2 margin_gab=1"], ["margin_gab"]),
        (["--decode=margin:2 margin_gap=x"], ["margin_gap", "'x'"]),
        (["--picture=speed.xyz"], ["speed.xyz", ".svg"]),
        (["--picture=nowhere/speed.svg"], ["nowhere", "folder"]),
    ],
)  # fmt: skip
def test_refusals(models: list[str], refused: Refused, given: list[str], words: list[str]) -> None:
    refused("bench", *models, *given, words=words)


@pytest.mark.usefixtures("no_weights")
def test_nothing_proposes(models: list[str], refused: Refused) -> None:
    refused("bench", models[0], "--decode=exact:2", words=["exact", "--draft"])
