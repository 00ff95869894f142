"""The command calibrate --gate: what it writes meets the bound, and what it refuses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_types import Captured, Decoded, Interrupted, Patch, Refused

from fly_jax.decoding.config import load_config
from fly_jax.evaluation import gate
from fly_jax.launch.__main__ import main

PROMPTS = [f"{name} {number} apples" for name in ("Ada has", "Boris buys") for number in range(6)]
SIZES = ["--max_new_tokens=20", "--batch_size=3"]
Calibrate = Callable[..., list[str]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture
def begun(models: list[str], prompts: Path) -> Calibrate:
    """The command line that writes to a path."""
    given = ["calibrate", *models, f"--prompts_file={prompts}", *SIZES]
    return lambda path, *more: [*given, "--num_speculative_tokens=6", f"--gate={path}", *more]


def test_what_is_written_meets_the_bound(
    begun: Calibrate, tmp_path: Path, of_pair: Decoded, capsys: Captured
) -> None:
    """And a laxer bound is worth no fewer tokens a pass."""
    accepted = []
    for limit in (0.4, 0.2):
        path = tmp_path / f"found_{limit}.toml"
        arguments = begun(path, "--rule=margin", f"--max_disagreement={limit}")
        assert main(arguments) == 0
        said = capsys.readouterr().err
        text = path.read_text()
        first = text.splitlines()[0].removeprefix("# ")
        assert shlex.split(first) == ["python", "-m", "fly_jax.launch", *arguments]
        accepted.append(float(re.findall(r"([0-9.]+) mean accepted tokens", text)[0]))
    assert accepted[0] >= accepted[1]
    config = load_config(path)
    assert (config.rule, config.num_speculative_tokens) == ("margin", 6)
    assert f"margin_gap = {config.to_dict()['margin_gap']}" in text
    # On the prompts that the setting was checked with.
    given = [f"--prompt={prompt}" for prompt in PROMPTS[1::2]]
    found = of_pair(f"--config={path}", *given, *SIZES)
    tokens = sum(len(one["token_ids"]) for one in found)
    rescues, rounds = (
        sum(one[name] for one in found) for name in ("num_rescued_tokens", "num_rounds")
    )
    assert 0 < rescues / tokens <= limit
    figure = f"{100 * rescues / tokens:.2f} rescues in 100 tokens"
    assert f"({tokens} tokens): {figure}" in text
    assert f"{tokens / rounds:.2f} mean accepted tokens" in text
    assert figure in said


def test_windows_are_tried_and_other_values_kept(begun: Calibrate, tmp_path: Path) -> None:
    base, path = tmp_path / "base.toml", tmp_path / "found.toml"
    base.write_text('rule = "fly | margin"\nentropy_top_k = 2\nprotect = ["\\\\d"]\n')
    assert main(begun(path, f"--config={base}", "--max_regret=0.2")) == 0
    found = load_config(path)
    assert (found.rule, found.limits.protect) == ("fly | margin", ("\\d",))
    assert (found.fly.entropy_top_k, found.fly.window_size) == (2, 4), (
        "the others leave no room at K = 6"
    )
    regret = re.findall(r"tokens\): ([0-9.]+) nats a token", path.read_text())
    assert 0 < float(regret[0]) <= 0.2


@pytest.mark.parametrize("line", ['boundary = "defer"', "risk_budget = 3.0", "temperature = 0.5"])
def test_bad_configs(refused: Refused, begun: Calibrate, tmp_path: Path, line: str) -> None:
    base = tmp_path / "base.toml"
    base.write_text(line)
    arguments = begun(tmp_path / "found.toml", f"--config={base}", "--max_regret=0.1")
    refused(*arguments, words=[line.split()[0]])


def test_a_memory_has_no_gate(refused: Refused, models: list[str], prompts: Path) -> None:
    arguments = ["calibrate", *models, f"--prompts_file={prompts}", "--memory=x.npz"]
    refused(*arguments, "--max_regret=0.1", words=["--max_regret"])
    refused(*arguments, "--rule=fly", words=["--rule"])


def test_few_prompts_are_refused(refused: Refused, begun: Calibrate, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("Ada\nBoris\n")
    arguments = begun(tmp_path / "found.toml", "--max_regret=0.1", f"--prompts_file={few}")
    refused(*arguments, words=["2 prompts", "8"])


def test_a_bound_that_nothing_meets(begun: Calibrate, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "found.toml"
    assert main(begun(path, "--rule=margin", "--max_disagreement=0.0001")) == 2
    assert "0.01 rescues in 100 tokens" in capsys.readouterr().err.splitlines()[-1]
    assert not path.exists()


def test_an_interrupted_search_writes_nothing(
    begun: Calibrate, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr(gate, "tqdm", Interrupted)
    path = tmp_path / "found.toml"
    assert main(begun(path, "--rule=margin", "--max_regret=0.1")) == 130
    assert "Nothing was written; begin again with: python -m" in capsys.readouterr().err
    assert not path.exists()
