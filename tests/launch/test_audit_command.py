"""generate --audit and the command audit, on a tiny random pair."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from launch_types import Captured, Decoded, Refused

from fly_jax.launch.__main__ import main
from fly_jax.models.tokenizer import Tokenizer

PROMPTS = ["Ada has 3 apples", "<script>Boris", "Vera's"]
SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]
GIVEN = [f"--prompt={prompt}" for prompt in PROMPTS]
# It rescues whatever it can pay for.
RULE = ["--rule=margin", "--margin_gap=100", "--risk_budget=6"]


@pytest.fixture(scope="module")
def audit(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    answers = path.with_name("answers.txt")
    flags = [*models, *GIVEN, *SIZES, *RULE, f"--audit={path}", "--batch_size=2"]
    with pytest.MonkeyPatch.context() as patch, answers.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(flags) == 0
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_was_generated(audit: Path, tokenizer: Tokenizer, of_pair: Decoded) -> None:
    given = [*GIVEN, *SIZES]
    fast, exact = of_pair(*given, *RULE), of_pair(*given, "--rule=exact")
    first, *events = lines(audit)
    run = {"event": "run", "rule": "margin", "version": 1, "entropy_measure": "top_3"}
    assert first == first | run
    assert first["settings"]["risk_budget"] == 6
    for index, (one, other) in enumerate(zip(fast, exact, strict=True)):
        *mismatches, whole = [event for event in events if event["prompt"] == index]
        for name in ("token_ids", "why", "text", "finish_reason", "num_rounds"):
            assert whole[name] == one[name]
        texts = {"event": "prompt", "prompt_text": one["prompt"], "exact_text": other["text"]}
        assert whole == whole | texts
        assert "".join(whole["token_texts"]).removesuffix("</s>") == one["text"]
        kept = [event for event in mismatches if event["event"] == "rescue"]
        rescued = [at for at, why in enumerate(one["why"]) if why == "r"]
        assert [event["position"] for event in kept] == rescued
        assert len(mismatches) - len(kept) == one["why"].count("c")
        left = 6.0
        for event in mismatches:
            ratio = event["choice_probability"] / event["draft_probability"]
            assert event["regret"] == pytest.approx(math.log(ratio), abs=1e-4)
            left -= event["regret"] if event["event"] == "rescue" else 0
            assert event["budget_left"] == pytest.approx(max(left, 0), abs=1e-4)
            assert event["draft_text"] == tokenizer.token_text(event["draft_id"])
            stands = event["draft_id" if event["event"] == "rescue" else "choice_id"]
            assert one["token_ids"][event["position"]] == stands
            text = one["prompt"] + "".join(whole["token_texts"][: event["position"]])
            assert text.endswith(event["context"])
            assert event["window"] is None
            assert (event["refused_by"] is None) == (event["event"] == "rescue")
        assert one["regret"] == pytest.approx(6 - left, abs=1e-3)
    refusals = [event for event in events if event["event"] == "refusal"]
    assert {event["refused_by"] for event in refusals} == {"budget"}


def test_deferred_windows(tmp_path: Path, of_pair: Decoded, capsys: Captured) -> None:
    path = tmp_path / "audit.jsonl"
    flags = ["--boundary=defer", "--entropy_threshold=0.01", "--noaudit_exact", f"--audit={path}"]
    found = of_pair(*GIVEN, *SIZES, *flags)
    events = [event for event in lines(path) if event["event"] == "rescue"]
    assert len(events) == sum(one["num_rescued_tokens"] for one in found)
    assert {"held"} <= {event["window"] for event in events} <= {"held", "completed"}
    assert {event["entropy_measure"] for event in events} == {"top_3"}
    assert main(["audit", str(path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["compared"] == 0
    assert sum(summary["windows"].values()) == len(events)


def test_a_summary_and_a_page(audit: Path, tmp_path: Path, capsys: Captured) -> None:
    html = tmp_path / "page.html"
    assert main(["audit", f"--html={html}", str(audit), "--prompt=2", "--pairs", "3"]) == 0
    shown = capsys.readouterr().out
    rescues = sum(line["event"] == "rescue" for line in lines(audit))
    assert f"rule margin: 3 prompts, 60 tokens, {rescues} rescues" in shown
    assert "of 3 texts" in shown
    assert "by budget" in shown
    assert main(["audit", str(audit), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rescues"] == rescues == sum(pair["count"] for pair in summary["pairs"])
    assert summary["windows"] == {"none": rescues}
    text = html.read_text(encoding="utf-8")
    assert "&lt;script&gt;Boris" in text
    assert "<script" not in text


def test_a_stopped_run_is_summed_up(audit: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(audit.read_bytes()[:-30])
    assert main(["audit", str(path)]) == 0
    said, warning = capsys.readouterr()
    assert "2 prompts" in said
    assert warning.count("\n") == 1
    assert "breaks off" in warning


def test_bad_input(audit: Path, refused: Refused) -> None:
    file = str(audit)
    refused("audit", words=["needs a file"])
    refused("audit", "/nowhere/audit.jsonl", words=["/nowhere/audit.jsonl", "cannot be read"])
    refused("audit", file, file, words=["one file", "2"])
    refused("audit", file, "--html=page.html", "--prompt=9", words=["prompt 9", "1, 2, 3"])
    refused("audit", file, f"--html={file}", words=["written over"])
    refused("audit", file, "--html=/nowhere/page.html", words=["/nowhere/page.html"])
    refused("audit", file, "--htm=x", words=["--htm"])
    refused("audit", file, "--pairs=-1", words=["pairs"])
