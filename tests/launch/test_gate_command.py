"""The command calibrate --gate: what it writes meets the bound, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from fly_jax.decoding.config import load_config
from fly_jax.evaluation import gate
from fly_jax.launch.__main__ import main

PROMPTS = [f"{name} {number} apples" for name in ("Ada has", "Boris buys") for number in range(6)]
SIZES = ["--max_new_tokens=20", "--batch_size=3"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


def calibrate(models: list[str], prompts: Path, path: Path, *more: str) -> list[str]:
    named = [f"--prompts_file={prompts}", f"--gate={path}"]
    return ["calibrate", *models, *named, *SIZES, "--num_speculative_tokens=6", *more]


def decoded(
    models: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, int, int]:
    """Rescues, tokens and rounds on the prompts that the setting was checked with."""
    given = [f"--prompt={prompt}" for prompt in PROMPTS[1::2]]
    capsys.readouterr()
    assert main([*models, f"--config={config}", *given, *SIZES, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return (
        sum(one["num_rescued_tokens"] for one in found),
        sum(len(one["token_ids"]) for one in found),
        sum(one["num_rounds"] for one in found),
    )


def test_what_is_written_meets_the_bound(
    models: list[str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a laxer bound is worth no fewer tokens a pass."""
    accepted = []
    for limit in (0.4, 0.2):
        path = tmp_path / f"found_{limit}.toml"
        arguments = calibrate(models, prompts, path, "--rule=margin", f"--max_disagreement={limit}")
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
    rescues, tokens, rounds = decoded(models, path, capsys)
    assert 0 < rescues / tokens <= limit
    figure = f"{100 * rescues / tokens:.2f} rescues in 100 tokens"
    assert f"({tokens} tokens): {figure}" in text
    assert f"{tokens / rounds:.2f} mean accepted tokens" in text
    assert figure in said


def test_windows_are_tried_and_other_values_kept(
    models: list[str], prompts: Path, tmp_path: Path
) -> None:
    base, path = tmp_path / "base.toml", tmp_path / "found.toml"
    base.write_text('rule = "fly | margin"\nentropy_top_k = 2\nprotect = ["\\\\d"]\n')
    more = [f"--config={base}", "--max_regret=0.2"]
    assert main(calibrate(models, prompts, path, *more)) == 0
    found = load_config(path)
    assert (found.rule, found.limits.protect) == ("fly | margin", ("\\d",))
    assert (found.fly.entropy_top_k, found.fly.window_size) == (2, 4), (
        "the others leave no room at K = 6"
    )
    regret = re.findall(r"tokens\): ([0-9.]+) nats a token", path.read_text())
    assert 0 < float(regret[0]) <= 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max_disagreement=0"], ["max_disagreement is 0", "0.02"]),
        (["--max_disagreement=2"], ["at most 1"]),
        (["--max_regret=-1"], ["max_regret is -1", "nats"]),
        (["--max_regret=nan"], ["max_regret"]),
        ([], ["--max_disagreement or --max_regret"]),
        (["--max_disagreement=0.1", "--max_regret=0.1"], ["either"]),
        (["--max_regret=0.1", "--memory=x"], ["either --memory or --gate"]),
        (["--max_regret=0.1", "--rule=exact"], ["exact", "margin"]),
        (["--max_regret=0.1", "--rule=fly | csd"], ["fly | csd"]),
        (["--max_regret=0.1", "--rule=unlucky"], ["unlucky"]),
        (["--max_regret=0.1", "--window_size=6"], ["window_size=6"]),
        (["--max_regret=0.1", "--num_speculative_tokens=3"], ["window_size=4"]),
        (["--max_regret=0.1", "--config=/nowhere.toml"], ["/nowhere.toml"]),
        (["--max_regret=0.1", "--gate=/nowhere/found.toml"], ["/nowhere/found.toml"]),
        (["--max_regret=0.1", "--gate=found.json"], ["found.json", ".toml"]),
        (["--max_regret=0.1", "--gate=__file__"], ["there already"]),
        (["--max_regret=0.1", "--prompts_file=/nowhere.txt"], ["/nowhere.txt"]),
    ],
)
def test_what_is_refused(
    refused: Callable[..., str],
    models: list[str],
    prompts: Path,
    tmp_path: Path,
    arguments: list[str],
    words: list[str],
) -> None:
    there = tmp_path / "there.toml"
    there.touch()
    given = [one.replace("__file__", str(there)) for one in arguments]
    sentence = refused(*calibrate(models, prompts, tmp_path / "found.toml", *given))
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('boundary = "defer"', "boundary"),
        ("risk_budget = 3.0", "risk_budget"),
        ("temperature = 0.5", "temperature"),
    ],
)
def test_configs_that_cannot_be_calibrated(
    refused: Callable[..., str],
    models: list[str],
    prompts: Path,
    tmp_path: Path,
    line: str,
    word: str,
) -> None:
    base = tmp_path / "base.toml"
    base.write_text(line)
    more = [f"--config={base}", "--max_regret=0.1"]
    assert word in refused(*calibrate(models, prompts, tmp_path / "found.toml", *more))


def test_the_gate_has_no_say_in_a_memory(
    refused: Callable[..., str], models: list[str], prompts: Path
) -> None:
    arguments = ["calibrate", *models, f"--prompts_file={prompts}", "--memory=x.npz"]
    assert "--max_regret" in refused(*arguments, "--max_regret=0.1")
    assert "--rule" in refused(*arguments, "--rule=fly")


def test_few_prompts_are_refused(
    refused: Callable[..., str], models: list[str], tmp_path: Path
) -> None:
    few = tmp_path / "few.txt"
    few.write_text("Ada\nBoris\n")
    path = tmp_path / "found.toml"
    sentence = refused(*calibrate(models, few, path, "--max_regret=0.1"))
    assert "2 prompts" in sentence
    assert "8" in sentence


def test_a_bound_that_nothing_meets(
    models: list[str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.toml"
    arguments = calibrate(models, prompts, path, "--rule=margin", "--max_disagreement=0.0001")
    assert main(arguments) == 2
    assert "0.01 rescues in 100 tokens" in capsys.readouterr().err.splitlines()[-1]
    assert not path.exists()


def test_an_interrupted_search_writes_nothing(
    models: list[str],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Interrupted(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            raise KeyboardInterrupt

    monkeypatch.setattr(gate, "tqdm", Interrupted)
    path = tmp_path / "found.toml"
    assert main(calibrate(models, prompts, path, "--rule=margin", "--max_regret=0.1")) == 130
    assert "Nothing was written; begin again with: python -m" in capsys.readouterr().err
    assert not path.exists()
