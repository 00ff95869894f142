"""The commands evaluate, bench and report: what they measure, their files and their verdicts."""

import gzip
import json
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from launch_types import Patch, Ran, Refused

from fly_jax import Budget, DecodingConfig, Fly, FlyJaxError, Margin
from fly_jax.decoding.config import check_patterns
from fly_jax.decoding.pair import OpenPair
from fly_jax.evaluation.tasks import TASKS, load_checkers, read_items
from fly_jax.launch.bench import decodings
from fly_jax.launch.flags import ModelFlags

SIZES = ["--max_new_tokens=8", "--window_size=2", "--batch_size=2"]
TWO = ["--tasks=gsm8k,humaneval", "--allow_code_execution"]
DECODE = ["--decode=autoregressive", "--decode=exact:2", "--decode=fly:4"]
BEGUN = 'from typing import List\n\n\ndef first(x: List[int]):\n    """The first."""\n'
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": BEGUN, "entry_point": "first"}
HUMANEVAL |= {"test": "def check(candidate):\n    assert candidate([3, 4]) == 3\n"}
MBPP = {"task_id": 11, "text": "Double a number.", "code": "def double(x):\n    return 2 * x"}
MBPP |= {"test_list": ["assert double(4) == 8"], "test_setup_code": "", "challenge_test_list": []}
GSM8K = {"question": "How much is 500 + 734?", "answer": "It is 1,234.\n#### 1,234"}
IFEVAL = {"key": 7, "prompt": "No commas.", "kwargs": [{}]}
IFEVAL |= {"instruction_id_list": ["punctuation:no_comma"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    mbpp = [MBPP | {"task_id": 1}, MBPP]  # the first is of another split
    for name, rows in (("mbpp", mbpp), ("test", [GSM8K]), ("input_data", [IFEVAL])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(("task", "right", "wrong"), [
    ("humaneval", "```python\ndef first(x: List[int]):\n    return x[0]\n```", "return x[0]"),
    ("humaneval", "    return x[0]\n", "    return x[1]\n"),
    ("mbpp", f"Here:\n```python\n{MBPP['code']}\n```\nIt works.", "exit(0)"),
    (
        "mbpp",
        f"Type ```sh\npip\n```\nThen ```x```,\nby: ```python3\n{MBPP['code']}\n```",
        "```py\npass\n```",
    ),
    ("gsm8k", "So 500 + 734.\n#### 1234\n", "1234\n#### 1235"),
    ("gsm8k", "That makes $1,234.00.", "It cannot be said."),
    ("gsm8k", "#### Step 2: add\n500 + 734, so 1234.", "#### **1235**, as 1234 is less."),
])  # fmt: skip
def test_verdicts(data: Path, task: str, right: str, wrong: str) -> None:
    (item,) = read_items(task, data, None)
    assert TASKS[task].is_right(item.record, right)
    assert not TASKS[task].is_right(item.record, wrong)


def test_problems_are_those_of_the_folder_or_built_in(data: Path) -> None:
    assert len(read_items("problems", data, None)) == len(read_items("problems", None, 8)) == 8
    (data / "problems.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}))
    (item,) = read_items("problems", data, None)
    assert TASKS["problems"].is_right(item.record, " It is 2.\n**Answer: 2 pears**")
    assert not TASKS["problems"].is_right(item.record, "Answer: 3\nAnswer: 2")


def test_instructions(data: Path) -> None:
    for name in ("lm_eval", "punkt"):  # the extra eval, and the table that its page names
        pytest.importorskip(name, reason="what IFEval's checks need is not installed")
    (item,) = read_items("ifeval", data, None)
    unknown = IFEVAL | {"instruction_id_list": ["punctuation:no_colon"]}
    (data / "input_data.jsonl").write_text(f"{json.dumps(IFEVAL)}\n{json.dumps(unknown)}\n")
    with pytest.raises(FlyJaxError, match=r"input_data.jsonl, line 2 .*punctuation:no_colon"):
        read_items("ifeval", data, None)
    assert TASKS["ifeval"].is_right(item.record, "None at all.")
    assert not TASKS["ifeval"].is_right(item.record, "One, two.")
    assert not TASKS["ifeval"].is_right(item.record, " ")
    is_json = item.record | {"instruction_id_list": ["detectable_format:json_format"]}
    assert not TASKS["ifeval"].is_right(is_json, "[" * 3000)


def test_goes_on(models: list[str], data: Path, ran: Ran, refused: Refused) -> None:
    given = ["evaluate", *models, *SIZES, *DECODE, f"--data={data}", f"--output={data / 'out'}"]
    found = json.loads(ran(*given, *TWO, "--json").out)
    answers = data / "out" / "answers.jsonl"
    before = answers.read_text().splitlines()
    assert len(before) == 1 + 2 * 3
    assert [*found["tasks"]] == ["gsm8k", "humaneval"]
    plain, exact, _ = found["tasks"]["gsm8k"].values()
    assert plain["mean_accepted_tokens"] == 1
    assert (exact["same_text"], exact["gained"], exact["lost"]) == (1, 0, 0)

    answers.write_text("\n".join(before)[:-9])
    out, said = ran(*given, *TWO)
    assert "half there" in said
    assert "items would tell" in out
    after = answers.read_text().splitlines()
    assert after[:-1] == before[:-1]
    assert json.loads(after[-1]) == json.loads(before[-1])

    refused(*given, *TWO, "--batch_size=1", words=["another run", "batch_size"])
    (data / "answers.jsonl").write_text("mine")
    refused(*given[:-1], *TWO, f"--output={data}", words=["answers.jsonl, line 1", "no answer"])
    assert (data / "answers.jsonl").read_text() == "mine"
    for other in ({"question": "And 2 + 2?"}, {"answer": "No. #### 5"}):
        (data / "test.jsonl").write_text(json.dumps(GSM8K | other))
        refused(*given, "--tasks=gsm8k", words=["gsm8k 1", "another item"])


def test_a_rule_beside_its_truncation_and_the_draft(
    models: list[str], data: Path, ran: Ran, refused: Refused
) -> None:
    decode = ["margin:4 margin_gap=2", "sampled:4 truncate=margin margin_gap=2"]
    decode = ["autoregressive", *decode, "autoregressive truncate=margin margin_gap=0", "draft"]
    given = [f"--data={data}", f"--output={data / 'out'}", "--tasks=gsm8k", "--max_new_tokens=16"]
    given += [*models[:2], *(f"--decode={one}" for one in decode), "--json"]
    found = json.loads(ran("evaluate", *given).out)
    assert found["dtype"] == "float32"  # by which report knows what bench has measured
    plain, margin, cut, best, draft = found["tasks"]["gsm8k"].items()
    assert sum(margin[1]["rescued_by_class"].values()) > 0
    assert 0 < margin[1]["regret_per_100_tokens"] <= 2 * margin[1]["rescued_per_100_tokens"]
    assert margin[1]["regret_by_class"].keys() == margin[1]["rescued_by_class"].keys()
    assert [*margin[1]["beside"]] == [cut[0], draft[0]]
    assert (cut[1]["support"], plain[1]["support"]) == (margin[1]["support"], None)
    assert (best[1]["same_text"], draft[1]["same_text"]) == (1, 0)
    answers = (data / "out" / "answers.jsonl").read_text().splitlines()[1:]
    records = {one["decoding"]: one for one in map(json.loads, answers)}
    regret = records[margin[0]]["regret"]
    assert len(regret) == records[margin[0]]["why"].count("r")
    assert all(0 <= one <= 2 for one in regret)
    lookup = [models[0], "--draft=ngram", "--decode=draft", given[1]]
    refused("evaluate", *lookup, words=["--decode draft", "itself"])


@pytest.mark.usefixtures("no_weights")
def test_data_of_another_format(
    models: list[str], data: Path, refused: Refused, monkeypatch: Patch
) -> None:
    given = ["evaluate", *models, f"--data={data}", f"--output={data / 'out'}"]
    (data / "test.jsonl").write_text(f"{json.dumps(GSM8K)}\n{{'question': 1}}\n")
    refused(*given, "--tasks=gsm8k", words=["test.jsonl, line 2", "question"])
    (data / "test.jsonl").write_text(json.dumps(GSM8K))
    (data / "HumanEval.jsonl.gz").write_bytes(b"no gzip")
    refused(*given, *TWO, words=["HumanEval.jsonl.gz", "gzip"])
    refused(*given[:-1], words=["--output"])
    refused(*given, "--tasks=problems", "--data=/nowhere", words=["--data", "/nowhere"])
    monkeypatch.setitem(sys.modules, "langdetect", None)
    load_checkers.cache_clear()
    refused(*given, "--tasks=ifeval", words=["fly_jax[eval]"])


def test_decodings_side_by_side(
    models: list[str], tmp_path: Path, ran: Ran, monkeypatch: Patch
) -> None:
    """Of questions as Spec-Bench has them; and a target alone."""
    path, picture = tmp_path / "question.jsonl", tmp_path / "speed.svg"
    rows = [("qa", ["Ada has 3 apples", "And then?"]), ("qa", ["Boris"]), ("math", ["Vera's 12"])]
    questions = [
        {"question_id": number, "category": category, "turns": turns}
        for number, (category, turns) in enumerate(rows, 1)
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    given = ["--max_new_tokens=12", "--window_size=2", f"--prompts_file={path}"]
    heading, _, line = ran("bench", *models[::2], *given, "--turns=1").out.splitlines()
    assert line.startswith("autoregressive")
    assert "kept at" not in heading
    check = Mock(side_effect=lambda one: check_patterns("[" * (one.num_speculative_tokens > 4)))
    monkeypatch.setattr(OpenPair, "check_drafting", check)  # as if a head drafted no more
    more = ["--num_speculative_tokens=3", "--turns=1"]
    few, said = ran("bench", *models[::2], "--draft=ngram", *given, *more)
    assert "exact, K = 15 is left out" in said
    assert re.findall(r"K = (\d+)", few) == ["3", "2", "4", "3"]
    monkeypatch.undo()
    given += ["--decode=autoregressive", "--decode=exact:4", "--decode=fly:4", "--each=1"]
    given += [f"--picture={picture}", "--turns=2"]
    out, said = ran("bench", *models, *given, "--json")
    found = json.loads(out)
    assert (found["prompts"], found["turns"]) == (2, 2)
    plain, four, fly = found["decodings"].values()
    assert [*found["decodings"]] == ["autoregressive", "exact, K = 4", "fly, K = 4"]
    for one in (plain, four, fly):
        assert (len(one["speeds"]), [*one["by_category"]]) == (2, ["qa", "math"])
        assert min(one["first_token_seconds"], one["inter_token_seconds"]) > 0
        assert 0 < one["whole_tokens_per_second"] < one["tokens_per_second"]
        kept = one["accepted_by_position"]
        assert kept == sorted(kept, reverse=True)
        # Without the bonus of each pass, the kept tokens are those of all positions together.
        passes = one["num_rounds"] if one["num_draft_tokens"] else 0
        assert sum(kept) * passes == pytest.approx(one["num_accepted_tokens"])
    assert four["num_tokens"] == plain["num_tokens"] == plain["num_rounds"]
    assert (plain["draft_share"], plain["accepted_by_position"]) == (None, [])
    assert all(0 <= one["draft_share"] < 1 for one in (four, fly))
    assert "<svg" in picture.read_text()
    heading = said.splitlines()[-5]
    assert all(word in heading for word in ("tokens/s", "prompts", "first token", "draft"))
    assert "±" in said


def test_a_decoding_has_parameters_of_its_own() -> None:
    config = DecodingConfig(rule="fly", protect=(r"\d",), window_size=3)
    given = ["fly|margin:8,auto margin_gap=0.5 protect=", "fly boundary=defer risk_budget=2"]
    one, other, last = (found := decodings(given, config, ModelFlags())).values()
    assert next(iter(found)) == "fly|margin, K = 8, margin_gap=0.5, protect="
    assert [one.num_speculative_tokens, other.num_speculative_tokens] == [8, "auto"]
    assert one.to_rule() == Fly(window_size=3) | Margin(gap=0.5)
    assert (one.limits.protect, last.limits.protect) == ((), (r"\d",))
    assert (last.drafting.boundary, last.to_rule()) == ("defer", Budget(Fly(window_size=3), 2))


MODELS = {"machine": {"cpu": "a <b>", "date": "today"}, "target": "t", "draft": [], "dtype": None}
ITEMS = [str(number) for number in range(400)]


def _decoding(right: str, **more: object) -> dict[str, object]:
    rescued = {"rescued_per_100_tokens": 1.5, "rescued_by_class": {"words": 3}, "same_text": 0.5}
    return {"items": ITEMS, "right": right, "mean_accepted_tokens": 2.0} | rescued | more


def _speed(speed: float) -> dict[str, object]:
    more = {"deviation": 1.0, "rescued_per_100_tokens": 0, "mean_accepted_tokens": 3.0}
    return {"tokens_per_second": speed, "speed_up": speed / 10} | more


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A bench, and an evaluation in which fly loses item 0 and gains item 399."""
    speeds = {"autoregressive": 10.0, "exact, K = 2": 16.0, "exact, K = 4": 20.0}
    speeds["fly, K = 8"] = 30.0
    bench = {"turns": 2, "decodings": {name: _speed(one) for name, one in speeds.items()}}
    (tmp_path / "bench.json").write_text(json.dumps(MODELS | bench))
    (tmp_path / "other.json").write_text('{"tasks": 1}')
    (tmp_path / "lines.json").write_text("{}\n{}\n")
    (folder := tmp_path / "code").mkdir()
    plain, fly = "1" * 399 + "0", "0" + "1" * 399
    tasks = {"gsm8k": {"autoregressive": _decoding(plain), "fly, K = 8": _decoding(fly)}}
    (folder / "results.json").write_text(json.dumps(MODELS | {"setting": {}, "tasks": tasks}))
    answer = {"task": "gsm8k", "item": "0", "why": "mrb"}
    lines = [
        answer | {"decoding": one, "pieces": [" <script>", one, "\x1b[0m"]}
        for one in tasks["gsm8k"]
    ]
    text = "".join(json.dumps(one) + "\n" for one in ({}, *lines))
    (folder / "answers.jsonl").write_text(text + '{"task": "gs')
    return tmp_path


def test_speed_is_reported_beside_quality(runs: Path, ran: Ran) -> None:
    found = json.loads(ran("report", str(runs), "--json").out)
    assert found == json.loads((runs / "report.json").read_text())
    plain, two, _, fly = found["speed"]
    assert [one["over_tuned_exact"] for one in (plain, two, fly)] == [0.5, 0.8, 1.5]
    assert (two["quality"], plain["quality"]["gsm8k"]["score"]) == ({}, 399 / 400)
    kept = fly["quality"]["gsm8k"]
    assert (kept["lost"], kept["gained"], kept["retention"]) == (1, 1, 1)
    assert (kept["verdict"], kept["items_to_decide"]) == ("undecided", 786)
    printed = ran("report", str(runs), "--margin=2").out
    assert "not worse" in printed
    assert "30.0 ± 1.0 3.00x 1.50x 3.00 99.8% 100.0% [" in " ".join(printed.split())
    page = (runs / "report.html").read_text()
    lost, gained = page.split("<details>")[1:]
    assert all(words in lost for words in ("gsm8k, fly, K = 8: 1 lost", "&lt;script&gt;"))
    assert lost.count('<span class="t r">') == 2
    assert all(words in gained for words in ("1 gained", "texts: 399<"))
    assert not any(one in page for one in ("<script", "\x1b", "a <b>", "http:", "https:"))
    ran("report", str(runs), "--items=0")
    page = (runs / "report.html").read_text()
    assert "<h3>" not in page
    assert "texts: 0<" in page


def test_rules_beside_what_needs_none(runs: Path, ran: Ran) -> None:
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
    again = MODELS | {"setting": {}, "tasks": {"mbpp": decodings}}
    (runs / "again.json").write_text(json.dumps(again))
    out, said = ran("report", str(runs), "--json")
    found = json.loads(out)
    assert {*found["quality"]} == {"code", "again"}
    beside = found["quality"]["again"]["tasks"]["mbpp"]["fly, K = 8"]["beside"]
    changed = {name: (one["gained"], one["lost"]) for name, one in beside.items()}
    assert changed == {"cut": (398, 0), "draft": (0, 2)}
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "mbpp fly, K = 8 99.5% cut 0.0% 398 0 <0.01" in lines
    assert "mbpp fly, K = 8 0 0 0 0 0 0 3 (0.50)" in lines
    page = (runs / "report.html").read_text()
    assert "That was not measured here" not in page
    assert page.count("cpu a &lt;b&gt;, date today") == 1  # once for all three files


def test_reports_that_are_refused(runs: Path, tmp_path: Path, refused: Refused) -> None:
    refused("report", words=["folder"])
    refused("report", str(tmp_path / "nowhere"), words=["nowhere"])
    refused("report", str(runs), "--margin=0", words=["margin"])
    (empty := tmp_path / "empty").mkdir()
    refused("report", str(empty), words=["empty", "bench"])
    whole = (runs / "code" / "results.json").read_text()
    (runs / "report.json").write_text(whole)
    refused("report", str(runs), words=["report.json", "rename"])
    (runs / "report.json").unlink()
    wrong = [whole[:-20], *(whole.replace(f'"{key}"', '"x"') for key in ("right", "machine"))]
    for text in [*wrong, '{"machine": {}, "setting": {}, "tasks": {"gsm8k": {}}}']:
        (runs / "code" / "results.json").write_text(text)
        refused("report", str(runs), words=["results.json", "no whole file"])
