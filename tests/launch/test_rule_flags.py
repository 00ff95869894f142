"""Every loosened rule from the command line, its limits, its memory, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_types import Captured, Decoded, Interrupted, Patch, Refused

from fly_jax.evaluation import calibration
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
    folder = tmp_path_factory.mktemp("memory")
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"Ada has {number} apples\n" for number in range(6)))
    path = folder / "corrections.npz"
    assert main(calibrate(models, prompts, path)) == 0
    return path


@pytest.fixture
def digest(tokenizer: Tokenizer) -> str:
    return tokenizer.digest


def calibrate(models: list[str], prompts: Path, path: Path, *more: str) -> list[str]:
    named = [f"--prompts_file={prompts}", f"--memory={path}"]
    return ["calibrate", *models, *named, *SIZES[:2], "--batch_size=2", *more]


def test_rules_by_name(memory: Path, of_pair: Decoded) -> None:
    """One with a memory, and one with evidence of its own; what each means is tested elsewhere."""
    exact = [one["token_ids"] for one in of_pair(*PROMPTS, "--rule=exact")]
    for rule, loose in (
        ("csd", [f"--memory={memory}", "--csd_min_count=0", "--csd_consistency=0"]),
        ("fly & margin | typical", []),
    ):
        found = of_pair(*PROMPTS, f"--rule={rule}", *loose, "--batch_size=2")
        assert [one["rule"] for one in found] == [rule] * 2
        assert sum(one["num_rescued_tokens"] for one in found) > 0, rule
        assert all(one["num_rescued_tokens"] == one["why"].count("r") for one in found)
        assert "regret" not in found[0]
    lossless = of_pair(*PROMPTS, f"--rule={rule}", *loose, "--risk_budget=0")
    assert [one["token_ids"] for one in lossless] == exact
    assert [one["regret"] for one in lossless] == [0, 0]


def test_a_budget_is_never_exceeded_and_reported(of_pair: Decoded) -> None:
    found, free = of_pair(*LAXEST, "--risk_budget=3"), of_pair(*LAXEST)
    assert all(0 < one["regret"] <= 3 for one in found)
    rescued = [sum(one["num_rescued_tokens"] for one in some) for some in (found, free)]
    assert rescued[0] < rescued[1]


def test_tokens_can_be_protected(tokenizer: Tokenizer, of_pair: Decoded) -> None:
    pieces = []
    for protect in ([], [r"--protect=[a-z]", r"--protect=[\x00-\x1f]"]):
        rescued = [
            token
            for one in of_pair(*LAXEST, *protect)
            for token, why in zip(one["token_ids"], one["why"], strict=True)
            if why == "r"
        ]
        texts = [tokenizer.vocabulary.token_bytes(token, False) for token in rescued]
        pieces.append(sum(re.search(b"[a-z]", text) is not None for text in texts))
    assert pieces[0] > 0
    assert pieces[1] == 0


def test_a_config_has_all_of_it(memory: Path, tmp_path: Path, of_pair: Decoded) -> None:
    config = tmp_path / "loose.toml"
    config.write_text(
        f'rule = "fly | csd"\nmemory = "{memory}"\ncsd_min_count = 0\ncsd_online = false\n'
        'risk_budget = 5.0\nprotect = ["\\\\d"]\n'
    )
    (one,) = of_pair(*SIZES, "--prompt=Boris", f"--config={config}")
    assert one["rule"] == "fly | csd"
    assert 0 <= one["regret"] <= 5


def test_what_is_learned_is_kept_if_asked_for(
    models: list[str], digest: str, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """In a file that is there or not, and when the decoding is interrupted; else nothing is."""
    path = tmp_path / "new" / "learned.npz"
    arguments = [*models, *PROMPTS, "--rule=csd", f"--memory={path}", "--csd_min_count=0"]
    assert main([*arguments, "--update_memory"]) == 0
    learned = load_memory(path, digest)
    assert len(learned) > 5
    assert main(arguments) == 0
    assert load_memory(path, digest)._counts == learned._counts
    assert main([*arguments, "--update_memory"]) == 0
    again = load_memory(path, digest)
    assert sum(again._counts.values()) > sum(learned._counts.values())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_record", interrupted)
    assert main([*arguments, "--json", "--update_memory"]) == 130
    assert sum(load_memory(path, digest)._counts.values()) > sum(again._counts.values())
    capsys.readouterr()
    assert main([*arguments, f"--memory={tmp_path}", "--update_memory"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_flag_goes_before_the_config(tmp_path: Path, of_pair: Decoded) -> None:
    """Whose memory the flag's rule does not use."""
    config = tmp_path / "some.toml"
    config.write_text('rule = "csd"\nmemory = "nowhere.npz"\n')
    (one,) = of_pair(*SIZES, "--prompt=Boris", f"--config={config}", "--rule=exact")
    assert one["rule"] == "exact"


def test_a_comparison_has_the_rule_that_was_asked_for(models: list[str], capsys: Captured) -> None:
    assert main([*models, "--prompt=Boris", "--rule=lossy", *SIZES, "--compare"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert names == ["autoregressive", "exact", "fly", "lossy"]


def test_bad_memories(refused: Refused, models: list[str], memory: Path, tmp_path: Path) -> None:
    path = tmp_path / "memory.npz"
    arguments = [*models, "--prompt=x", "--rule=fly | csd", f"--memory={path}"]
    path.write_bytes(memory.read_bytes()[:-50])
    refused(*arguments, words=["damaged"])
    CorrectionMemory("another").save(path)
    refused(*arguments, words=["another vocabulary"])


def test_calibrating_goes_on_where_it_was(
    models: list[str], memory: Path, digest: str, tmp_path: Path, capsys: Captured
) -> None:
    whole = load_memory(memory, digest)
    assert len(whole) > 10
    prompts, path = memory.with_name("prompts.txt"), tmp_path / "corrections.npz"
    with Patch.context() as patch:
        patch.setattr(calibration, "tqdm", Interrupted)
        patch.setattr(calibration, "_BATCHES", 1)
        assert main(calibrate(models, prompts, path)) == 130
    assert "Go on where it was with" in capsys.readouterr().err
    part = load_memory(path, digest)
    assert 0 < len(part) < len(whole)
    assert main(calibrate(models, prompts, path)) == 0
    found = load_memory(path, digest)
    assert (found.keys() == whole.keys()).all()
    assert found._counts == whole._counts
    assert f"counts {len(whole)} pairs" in capsys.readouterr().err
    # Once it is done, there is nothing left to count.
    assert main(calibrate(models, prompts, path)) == 0
    assert load_memory(path, digest)._counts == whole._counts


def test_help_says_what_the_shipped_pair_is_decoded_with(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "; fly if not given, margin with the pair that ships with the package --num" in shown
    assert "; 0.3 if not given, 1.0 with the pair that ships with the package Limits" in shown
    assert r"; none if not given, \d with the pair that ships with the package;" in shown


def test_what_calibrate_refuses(
    refused: Refused, models: list[str], memory: Path, tmp_path: Path
) -> None:
    prompts, path = memory.with_name("prompts.txt"), tmp_path / "a.npz"
    given, target = f"--prompts_file={prompts}", models[0]
    refused("calibrate", "--memory=x", words=["--prompts_file"])
    refused("calibrate", given, words=["--memory"])
    refused("calibrate", target, given, "--memory=x", words=["--draft"])
    for more in ("--max_new_tokens=19", "--dtype=int8"):
        refused(*calibrate(models, prompts, memory, more), words=["another run"])
    itself = [target, target.replace("--target", "--draft"), "--dtype=float32"]
    refused(*calibrate(itself, prompts, memory), words=["another run"])
    long = tmp_path / "long.txt"
    long.write_text("Ada " * 200)
    refused(*calibrate(models, long, path), words=["context"])
    deep = "--num_speculative_tokens=5000"
    refused(*calibrate(models, prompts, path, deep), words=["5000"])
    refused(*calibrate(models, prompts, prompts / "c.npz"), words=["written"])
