"""Every loosened rule from the command line, its limits, its memory and its gate."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from launch_types import Decoded, Interrupted, Patch, Ran, Refused

from fly_jax.decoding.config import load_config
from fly_jax.evaluation import calibration, gate
from fly_jax.launch import generate
from fly_jax.launch.__main__ import main
from fly_jax.models.tokenizer import Tokenizer
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory

SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]
PROMPTS = ["--prompt=Ada has 3 apples", "--prompt=Boris", *SIZES]
LAXEST = [*PROMPTS, "--rule=margin", "--margin_gap=100"]


@pytest.fixture(scope="session")
def memory(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of the tiny pair, filled by the command."""
    prompts = tmp_path_factory.mktemp("memory") / "prompts.txt"
    prompts.write_text("".join(f"Ada has {number} apples\n" for number in range(6)))
    path = prompts.with_name("corrections.npz")
    assert main(calibrate(models, prompts, path)) == 0
    return path


def calibrate(models: list[str], prompts: Path, path: Path, *more: str) -> list[str]:
    named = [f"--prompts_file={prompts}", f"--memory={path}"]
    return ["calibrate", *models, *named, *SIZES[:2], "--batch_size=2", *more]


def test_rules_by_name(memory: Path, of_pair: Decoded) -> None:
    """One with a memory, and one with evidence of its own; what each means is tested elsewhere."""
    exact = [one["token_ids"] for one in of_pair(*PROMPTS, "--rule=exact")]
    loosest = [f"--memory={memory}", "--csd_min_count=0", "--csd_consistency=0"]
    for rule, loose in (("csd", loosest), ("fly & margin | typical", [])):
        found = of_pair(*PROMPTS, f"--rule={rule}", *loose, "--batch_size=2")
        assert [one["rule"] for one in found] == [rule] * 2
        assert sum(one["num_rescued_tokens"] for one in found) > 0, rule
        assert all(one["num_rescued_tokens"] == one["why"].count("r") for one in found)
        assert "regret" not in found[0]
    lossless = of_pair(*PROMPTS, f"--rule={rule}", *loose, "--risk_budget=0")
    assert [one["token_ids"] for one in lossless] == exact
    assert [one["regret"] for one in lossless] == [0, 0]


def test_a_budget_is_kept_and_tokens_are_protected(tokenizer: Tokenizer, of_pair: Decoded) -> None:
    free, found = of_pair(*LAXEST), of_pair(*LAXEST, "--risk_budget=3")
    assert all(0 < one["regret"] <= 3 for one in found)
    rescued = [sum(one["num_rescued_tokens"] for one in some) for some in (found, free)]
    assert rescued[0] < rescued[1]
    protected = of_pair(*LAXEST, r"--protect=[a-z]", r"--protect=[\x00-\x1f]")
    for some, expected in ((free, True), (protected, False)):
        texts = [
            tokenizer.vocabulary.token_bytes(token, False)
            for one in some
            for token, why in zip(one["token_ids"], one["why"], strict=True)
            if why == "r"
        ]
        assert any(re.search(b"[a-z]", text) for text in texts) == expected


def test_a_config_gives_way_to_flags(memory: Path, tmp_path: Path, of_pair: Decoded) -> None:
    """And so does its memory, which the flag's rule does not use."""
    config = tmp_path / "loose.toml"
    given = [*SIZES, "--prompt=Boris", f"--config={config}"]
    config.write_text(
        f'rule = "fly | csd"\nmemory = "{memory}"\ncsd_min_count = 0\ncsd_online = false\n'
        'risk_budget = 5.0\nprotect = ["\\\\d"]\n'
    )
    (one,) = of_pair(*given)
    assert one["rule"] == "fly | csd"
    assert 0 <= one["regret"] <= 5
    config.write_text('rule = "csd"\nmemory = "nowhere.npz"\n')
    (one,) = of_pair(*given, "--rule=exact")
    assert one["rule"] == "exact"


def test_what_is_learned_is_kept_if_asked_for(
    models: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    """In a file that is there or not, and when the decoding is interrupted; else nothing is."""
    path = tmp_path / "new" / "learned.npz"
    arguments = [*models, *PROMPTS, "--rule=csd", f"--memory={path}", "--csd_min_count=0"]

    def counts(*more: str, status: int = 0) -> dict[tuple[int, int], int]:
        ran(*arguments, *more, status=status)
        return load_memory(path, tokenizer.digest)._counts

    learned = counts("--update_memory")
    assert len(learned) > 5
    assert counts() == learned
    again = counts("--update_memory")
    assert sum(again.values()) > sum(learned.values())
    monkeypatch.setattr(generate, "_record", Mock(side_effect=KeyboardInterrupt))
    more = counts("--json", "--update_memory", status=130)
    assert sum(more.values()) > sum(again.values())
    wrong = ran(*arguments, f"--memory={tmp_path}", "--update_memory", status=2)
    assert "cannot be read" in wrong.err


def test_calibrating_goes_on_where_it_was(
    models: list[str], memory: Path, tokenizer: Tokenizer, tmp_path: Path, ran: Ran
) -> None:
    whole = load_memory(memory, tokenizer.digest)
    assert len(whole) > 10
    path = tmp_path / "corrections.npz"
    arguments = calibrate(models, memory.with_name("prompts.txt"), path)
    with Patch.context() as patch:
        patch.setattr(calibration, "tqdm", Interrupted)
        patch.setattr(calibration, "_BATCHES", 1)
        assert "Go on where it was with" in ran(*arguments, status=130).err
    assert 0 < len(load_memory(path, tokenizer.digest)) < len(whole)
    for said in (f"counts {len(whole)} pairs", ""):  # the second time nothing is left to count
        assert said in ran(*arguments).err
        found = load_memory(path, tokenizer.digest)
        assert (found.keys() == whole.keys()).all()
        assert found._counts == whole._counts


def test_what_is_refused(refused: Refused, models: list[str], memory: Path, tmp_path: Path) -> None:
    """By calibrate, and memories by generate."""
    prompts, path = memory.with_name("prompts.txt"), tmp_path / "a.npz"
    given, target = f"--prompts_file={prompts}", models[0]
    refused("calibrate", given, words=["--memory"])
    refused("calibrate", target, given, "--memory=x", words=["--draft"])
    for more in ("--max_new_tokens=19", "--dtype=int8"):
        refused(*calibrate(models, prompts, memory, more), words=["another run"])
    itself = [target, target.replace("--target", "--draft"), "--dtype=float32"]
    refused(*calibrate(itself, prompts, memory), words=["another run"])
    long = tmp_path / "long.txt"
    long.write_text("Ada " * 200)
    refused(*calibrate(models, long, path), words=["context"])
    refused(*calibrate(models, prompts, path, "--num_speculative_tokens=5000"), words=["5000"])
    refused(*calibrate(models, prompts, prompts / "c.npz"), words=["written"])
    arguments = [*models, "--prompt=x", "--rule=fly | csd", f"--memory={path}"]
    path.write_bytes(memory.read_bytes()[:-50])
    refused(*arguments, words=["damaged"])
    CorrectionMemory("another").save(path)
    refused(*arguments, words=["another vocabulary"])


LEARN = [f"{name} {number} apples" for name in ("Ada has", "Boris buys") for number in range(6)]
SHORT = ["--max_new_tokens=20", "--batch_size=3"]
Calibrate = Callable[..., list[str]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(LEARN))
    return path


@pytest.fixture
def begun(models: list[str], prompts: Path) -> Calibrate:
    """The command line that writes to a path."""
    given = ["calibrate", *models, f"--prompts_file={prompts}", *SHORT]
    return lambda path, *more: [*given, "--num_speculative_tokens=6", f"--gate={path}", *more]


def test_what_is_written_meets_the_bound(
    begun: Calibrate, tmp_path: Path, of_pair: Decoded, ran: Ran
) -> None:
    """And a laxer bound is worth no fewer tokens a pass."""
    accepted = []
    for limit in (0.4, 0.2):
        path = tmp_path / f"found_{limit}.toml"
        arguments = begun(path, "--rule=margin", f"--max_disagreement={limit}")
        said, text = ran(*arguments).err, path.read_text()
        command = shlex.split(text.splitlines()[0].removeprefix("# "))
        assert command == ["python", "-m", "fly_jax.launch", *arguments]
        accepted.append(float(re.findall(r"([0-9.]+) mean accepted tokens", text)[0]))
    assert accepted[0] >= accepted[1]
    config = load_config(path)
    assert (config.rule, config.num_speculative_tokens) == ("margin", 6)
    assert f"margin_gap = {config.to_dict()['margin_gap']}" in text
    # On the prompts that the setting was checked with.
    given = [f"--prompt={prompt}" for prompt in LEARN[1::2]]
    found = of_pair(f"--config={path}", *given, *SHORT)
    tokens = sum(len(one["token_ids"]) for one in found)
    rescues = sum(one["num_rescued_tokens"] for one in found)
    assert 0 < rescues / tokens <= limit
    figure = f"{100 * rescues / tokens:.2f} rescues in 100 tokens"
    assert f"({tokens} tokens): {figure}" in text
    mean = tokens / sum(one["num_rounds"] for one in found)
    assert f"{mean:.2f} mean accepted tokens" in text
    assert figure in said


def test_windows_are_tried_and_other_values_kept(begun: Calibrate, tmp_path: Path) -> None:
    base, path = tmp_path / "base.toml", tmp_path / "found.toml"
    base.write_text('rule = "fly | margin"\nentropy_top_k = 2\nprotect = ["\\\\d"]\n')
    assert main(begun(path, f"--config={base}", "--max_regret=0.2")) == 0
    found = load_config(path)
    assert (found.rule, found.limits.protect) == ("fly | margin", ("\\d",))
    assert (found.fly.entropy_top_k, found.fly.window_size) == (2, 4), "no others fit K = 6"
    regret = re.findall(r"tokens\): ([0-9.]+) nats a token", path.read_text())
    assert 0 < float(regret[0]) <= 0.2


def test_what_a_gate_refuses(
    refused: Refused, begun: Calibrate, models: list[str], prompts: Path, tmp_path: Path
) -> None:
    """A gate where a memory is filled, configs that have none, and too few prompts."""
    base = tmp_path / "base.toml"
    for line in ('boundary = "defer"', "risk_budget = 3.0", "temperature = 0.5"):
        base.write_text(line)
        arguments = begun(tmp_path / "found.toml", f"--config={base}", "--max_regret=0.1")
        refused(*arguments, words=[line.split()[0]])
    arguments = ["calibrate", *models, f"--prompts_file={prompts}", "--memory=x.npz"]
    refused(*arguments, "--max_regret=0.1", words=["--max_regret"])
    refused(*arguments, "--rule=fly", words=["--rule"])
    (few := tmp_path / "few.txt").write_text("Ada\nBoris\n")
    arguments = begun(tmp_path / "found.toml", "--max_regret=0.1", f"--prompts_file={few}")
    refused(*arguments, words=["2 prompts", "8"])


def test_a_search_that_finds_nothing_writes_nothing(
    begun: Calibrate, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    """Since nothing meets the bound, or since it is interrupted."""
    path = tmp_path / "found.toml"
    said = ran(*begun(path, "--rule=margin", "--max_disagreement=0.0001"), status=2).err
    assert "0.01 rescues in 100 tokens" in said.splitlines()[-1]
    assert not path.exists()
    monkeypatch.setattr(gate, "tqdm", Interrupted)
    said = ran(*begun(path, "--rule=margin", "--max_regret=0.1"), status=130).err
    assert "Nothing was written; begin again with: python -m" in said
    assert not path.exists()
