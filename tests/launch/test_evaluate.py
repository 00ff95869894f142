"""The command evaluate: its files, what it goes on with, its verdicts and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from launch_types import Captured, Patch, Refused

from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.tasks import TASKS, read_items
from fly_jax.launch.__main__ import main

SIZES = ["--max_new_tokens=8", "--window_size=2", "--batch_size=2"]
TWO = ["--tasks=gsm8k,humaneval", "--allow_code_execution"]
DECODE = ["--decode=autoregressive", "--decode=exact:2", "--decode=fly:4"]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef first(x: List[int]):\n    """The first."""\n',
    "entry_point": "first",
    "canonical_solution": "    return x[0]\n",
    "test": "def check(candidate):\n    assert candidate([3, 4]) == 3\n",
}
MBPP = {
    "task_id": 11, "text": "Double a number.", "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(4) == 8"], "test_setup_code": "", "challenge_test_list": [],
}  # fmt: skip
GSM8K = {"question": "How much is 500 + 734?", "answer": "It is 1,234.\n#### 1,234"}
IFEVAL = {
    "key": 7, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    other_split = MBPP | {"task_id": 1}
    (tmp_path / "mbpp.jsonl").write_text(f"{json.dumps(other_split)}\n{json.dumps(MBPP)}\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(GSM8K) + "\n")
    (tmp_path / "input_data.jsonl").write_text(json.dumps(IFEVAL) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        ("humaneval", "```python\ndef first(x: List[int]):\n    return x[0]\n```", "return x[0]"),
        ("humaneval", HUMANEVAL["canonical_solution"], "    return x[1]\n"),
        ("mbpp", f"Here:\n```python\n{MBPP['code']}\n```\nIt works.", "exit(0)"),
        ("gsm8k", "So 500 + 734.\n#### 1234\n", "1234\n#### 1235"),
        ("gsm8k", "That makes $1,234.00.", "It cannot be said."),
    ],
)
def test_verdicts(data: Path, task: str, right: str, wrong: str) -> None:
    (item,) = read_items(task, data, None)
    assert TASKS[task].is_right(item.record, right)
    assert not TASKS[task].is_right(item.record, wrong)


def test_problems_are_those_of_the_folder_or_built_in(data: Path) -> None:
    assert len(read_items("problems", data, None)) == len(read_items("problems", None, 8)) == 8
    (data / "problems.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}))
    (item,) = read_items("problems", data, None)
    assert TASKS["problems"].is_right(item.record, " It is 2.\nAnswer: 2")
    assert not TASKS["problems"].is_right(item.record, "Answer: 3\nAnswer: 2")


def test_instructions(data: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    (item,) = read_items("ifeval", data, None)
    unknown = IFEVAL | {"instruction_id_list": ["punctuation:no_colon"]}
    (data / "input_data.jsonl").write_text(f"{json.dumps(IFEVAL)}\n{json.dumps(unknown)}\n")
    with pytest.raises(FlyJaxError, match=r"input_data.jsonl, line 2 .*punctuation:no_colon"):
        read_items("ifeval", data, None)
    assert TASKS["ifeval"].is_right(item.record, "None at all.")
    assert not TASKS["ifeval"].is_right(item.record, "One, two.")
    assert not TASKS["ifeval"].is_right(item.record, " ")


def test_goes_on(models: list[str], data: Path, capsys: Captured, refused: Refused) -> None:
    given = ["evaluate", *models, *SIZES, *DECODE, f"--data={data}", f"--output={data / 'out'}"]
    assert main([*given, *TWO, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    answers = data / "out" / "answers.jsonl"
    before = answers.read_text().splitlines()
    assert len(before) == 1 + 2 * 3
    assert [*found["tasks"]] == ["gsm8k", "humaneval"]
    plain, exact, _ = found["tasks"]["gsm8k"].values()
    assert plain["mean_accepted_tokens"] == 1
    assert (exact["same_text"], exact["gained"], exact["lost"]) == (1, 0, 0)

    cut = before[-1]
    answers.write_text("\n".join(before)[:-9])
    assert main([*given, *TWO]) == 0
    captured = capsys.readouterr()
    assert "half there" in captured.err
    assert "items would tell" in captured.out
    after = answers.read_text().splitlines()
    assert after[:-1] == before[:-1]
    assert json.loads(after[-1]) == json.loads(cut)

    refused(*given, *TWO, "--batch_size=1", words=["another run", "batch_size"])
    (data / "test.jsonl").write_text(json.dumps(GSM8K | {"question": "And 2 + 2?"}))
    refused(*given, "--tasks=gsm8k", words=["another prompt", "gsm8k 1"])


def test_a_rule_beside_its_truncation_and_the_draft(
    models: list[str], data: Path, capsys: Captured, refused: Refused
) -> None:
    decode = [
        "autoregressive", "margin:4 margin_gap=2", "sampled:4 truncate=margin margin_gap=2",
        "autoregressive truncate=margin margin_gap=0", "draft",
    ]  # fmt: skip
    given = ["evaluate", *models[:2], f"--data={data}", f"--output={data / 'out'}"]
    given += ["--tasks=gsm8k", *(f"--decode={one}" for one in decode)]
    assert main([*given, "--max_new_tokens=16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
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
    lookup = [models[0], "--draft=ngram", "--decode=draft"]
    refused("evaluate", *lookup, f"--output={data / 'out'}", words=["--decode draft", "itself"])


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--decode=fly truncate=margin"], ["truncate", "autoregressive or sampled"]),
        (["--decode=exact truncate=margin temperature=0"], ["truncate", "temperature"]),
        (["--decode=sampled truncate=csd"], ["truncate", "memory"]),
        (["--decode=sampled truncate=exact"], ["truncate", "loosened"]),
        (["--tasks=humanevil"], ["humanevil", "humaneval"]),
        (["--tasks=gsm8k"], ["gsm8k", "--data"]),
        (["--tasks=mbpp"], ["--allow_code_execution"]),
        (["--tasks=gsm8k", "--data=nowhere"], ["nowhere", "test.jsonl"]),
        (["--margin=0"], ["margin", "above 0"]),
        (["--decode=exakt:2"], ["exakt"]),
    ],
)
def test_refusals(
    models: list[str], tmp_path: Path, refused: Refused, given: list[str], words: list[str]
) -> None:
    refused("evaluate", *models, f"--output={tmp_path / 'out'}", *given, words=words)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
def test_data_of_another_format(
    models: list[str], data: Path, refused: Refused, monkeypatch: Patch
) -> None:
    given = ["evaluate", *models, f"--data={data}", f"--output={data / 'out'}"]
    (data / "test.jsonl").write_text(f"{json.dumps(GSM8K)}\n{{'question': 1}}\n")
    refused(*given, "--tasks=gsm8k", words=["test.jsonl, line 2", "question"])
    (data / "HumanEval.jsonl.gz").write_bytes(b"no gzip")
    code = [*given, "--tasks=humaneval", "--allow_code_execution"]
    refused(*code, words=["HumanEval.jsonl.gz", "gzip"])
    refused(*given[:-1], words=["--output"])
    monkeypatch.setitem(__import__("sys").modules, "langdetect", None)
    refused(*given, "--tasks=ifeval", words=["fly_jax[eval]"])
