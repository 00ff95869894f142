"""The command report: speeds joined with qualities, verdicts by its own margin, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_types import Captured, Refused

from fly_jax.launch.__main__ import main

MODELS = {"machine": {"cpu": "a <b>", "date": "today"}, "target": "t", "draft": [], "dtype": None}
ITEMS = [str(number) for number in range(400)]


def _decoding(right: str, **more: object) -> dict[str, object]:
    return {
        "items": ITEMS, "right": right, "mean_accepted_tokens": 2.0, "rescued_per_100_tokens": 1.5,
        "rescued_by_class": {"words": 3}, "same_text": 0.5, **more,
    }  # fmt: skip


def _speed(tokens_per_second: float) -> dict[str, object]:
    return {
        "tokens_per_second": tokens_per_second, "deviation": 1.0, "rescued_per_100_tokens": 0,
        "speed_up": tokens_per_second / 10, "mean_accepted_tokens": 3.0,
    }  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A bench, and an evaluation in which fly loses item 0 and gains item 399."""
    speeds = {
        "autoregressive": 10.0,
        "exact, K = 2": 16.0,
        "exact, K = 4": 20.0,
        "fly, K = 8": 30.0,
    }
    bench = {"turns": 2, "decodings": {name: _speed(one) for name, one in speeds.items()}}
    (tmp_path / "bench.json").write_text(json.dumps(MODELS | bench))
    (tmp_path / "other.json").write_text('{"tasks": 1}')
    folder = tmp_path / "code"
    folder.mkdir()
    plain, fly = "1" * 399 + "0", "0" + "1" * 399
    tasks = {"gsm8k": {"autoregressive": _decoding(plain), "fly, K = 8": _decoding(fly)}}
    result = json.dumps(MODELS | {"setting": {}, "tasks": tasks})
    (folder / "results.json").write_text(result)
    lines = [{}]
    for decoding in tasks["gsm8k"]:
        pieces = [" <script>", decoding, "\x1b[0m"]
        of = {"task": "gsm8k", "item": "0", "decoding": decoding, "pieces": pieces, "why": "mrb"}
        lines.append(of)
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "answers.jsonl").write_text(text + '{"task": "gs')
    return tmp_path


def test_speed_beside_quality(runs: Path, capsys: Captured) -> None:
    assert main(["report", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((runs / "report.json").read_text())
    plain, two, _, fly = found["speed"]
    assert [one["over_tuned_exact"] for one in (plain, two, fly)] == [0.5, 0.8, 1.5]
    assert (two["quality"], plain["quality"]["gsm8k"]["score"]) == ({}, 399 / 400)
    kept = fly["quality"]["gsm8k"]
    assert (kept["lost"], kept["gained"], kept["retention"]) == (1, 1, 1)
    assert (kept["verdict"], kept["items_to_decide"]) == ("undecided", 996)
    assert main(["report", str(runs), "--margin=2"]) == 0
    printed = capsys.readouterr().out
    assert "not worse" in printed
    assert "30.0 ± 1.0 3.00x 1.50x 3.00 99.8% 100.0% [" in " ".join(printed.split())


def test_the_page(runs: Path) -> None:
    assert main(["report", str(runs)]) == 0
    page = (runs / "report.html").read_text()
    lost, gained = page.split("<details>")[1:]
    assert "gsm8k, fly, K = 8: 1 lost" in lost
    assert lost.count('<span class="t r">') == 2
    assert "&lt;script&gt;" in lost
    assert "1 gained" in gained
    assert "texts: 399<" in gained
    assert not any(one in page for one in ("<script", "\x1b", "a <b>", "http:", "https:"))
    assert main(["report", str(runs), "--items=0"]) == 0
    page = (runs / "report.html").read_text()
    assert "<h3>" not in page
    assert "texts: 0<" in page


def test_rules_beside_what_needs_none(runs: Path, capsys: Captured) -> None:
    """Two evaluations of one folder, and a rule with its regret, beside truncation and draft."""
    with_regret = {"regret_per_100_tokens": 0.5, "regret_by_class": {"words": 1.5}}
    none = {"rescued_per_100_tokens": 0, "rescued_by_class": {}}
    right = "1" * 399 + "0"
    decodings = {
        "autoregressive": _decoding(right, **none),
        "fly, K = 8": _decoding("0" + right[1:], support="gate", **with_regret),
        "cut": _decoding("0" * 400, support="gate", is_truncated=True, **none),
        "cut otherwise": _decoding("1" * 400, support="margin", is_truncated=True, **none),
        "draft": _decoding("1" * 400, **none),
    }
    (runs / "again.json").write_text(
        json.dumps(MODELS | {"setting": {}, "tasks": {"mbpp": decodings}})
    )
    assert main(["report", str(runs), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert {*found["quality"]} == {"code", "again"}
    beside = found["quality"]["again"]["tasks"]["mbpp"]["fly, K = 8"]["beside"]
    assert {name: (one["gained"], one["lost"]) for name, one in beside.items()} == {
        "cut": (398, 0), "draft": (0, 2),
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in captured.err.splitlines()]
    assert "mbpp fly, K = 8 99.5% cut 0.0% 398 0 <0.01" in lines
    assert "mbpp fly, K = 8 0 0 0 0 0 0 3 (0.50)" in lines
    page = (runs / "report.html").read_text()
    assert "That was not measured here" not in page
    assert page.count("cpu a &lt;b&gt;, date today") == 1  # once for all three files


def test_refusals(runs: Path, tmp_path: Path, refused: Refused) -> None:
    refused("report", words=["folder"])
    refused("report", str(tmp_path / "nowhere"), words=["nowhere"])
    refused("report", str(runs), "--margin=0", words=["margin"])
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("report", str(empty), words=["empty", "bench"])
    whole = (runs / "code" / "results.json").read_text()
    wrong = [whole[:-20], *(whole.replace(f'"{key}"', '"x"') for key in ("right", "machine"))]
    for text in [*wrong, '{"machine": {}, "setting": {}, "tasks": {"gsm8k": {}}}']:
        (runs / "code" / "results.json").write_text(text)
        refused("report", str(runs), words=["results.json", "no whole file"])
