"""The command as its users see it, on a tiny random pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_types import Captured, Decoded, Folders, Patch, Refused

from fly_jax.evaluation.problems import Problem
from fly_jax.launch import inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import Prompt
from fly_jax.models.tokenizer import Tokenizer

KEYS = {
    "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "rule", "num_rounds",
    "mean_accepted_tokens", "num_draft_tokens", "num_accepted_tokens", "num_rescued_tokens",
    "num_rollbacks", "tokens_per_second", "why",
}  # fmt: skip
PROMPTS = ["Ada has 3 apples", "Boris"]
SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]
BORIS = ["--prompt=Boris", *SIZES]
BOTH = ["--rule=fly", f"--prompt={PROMPTS[0]}", *BORIS]


def test_several_drafts(tiny_pair: Folders, of_pair: Decoded) -> None:
    """The target as a draft below the draft: the same text."""
    found = of_pair(f"--draft={tiny_pair[0]}", "--level_speculative_tokens=2", *BOTH)
    for one, alone in zip(found, of_pair(*BOTH), strict=True):
        assert all(one[key] == alone[key] for key in ("token_ids", "why", "num_rounds"))


def test_json_objects(tokenizer: Tokenizer, of_pair: Decoded) -> None:
    found = of_pair(*BOTH)
    assert [record["prompt"] for record in found] == PROMPTS
    for record in found:
        assert record.keys() == KEYS
        assert record["rule"] == "fly"
        assert record["prompt_token_ids"] == tokenizer.encode(record["prompt"])
        assert record["text"] == tokenizer.decode(record["token_ids"])
        ends = record["token_ids"][-1] in tokenizer.eos_token_ids
        assert record["finish_reason"] == ("stop" if ends else "length")
        assert len(record["token_ids"]) == 20 or ends
        assert len(record["why"]) == len(record["token_ids"])
        assert set(record["why"]) <= set("mrcb")
        assert record["num_rescued_tokens"] >= record["why"].count("r")
        assert record["num_draft_tokens"] == 4 * record["num_rounds"]
        mean = len(record["token_ids"]) / record["num_rounds"]
        assert record["mean_accepted_tokens"] == pytest.approx(mean)
        assert record["tokens_per_second"] > 0
    assert "m" in "".join(record["why"] for record in found)


def test_exact_gives_the_tokens_of_autoregressive(of_pair: Decoded) -> None:
    plain, exact = of_pair(*BOTH, "--rule=autoregressive"), of_pair(*BOTH, "--rule=exact")
    batched = of_pair(*BOTH, "--rule=exact", "--batch_size=2")
    for one, other, third in zip(plain, exact, batched, strict=True):
        assert one["token_ids"] == other["token_ids"] == third["token_ids"]
        assert set(one["why"]) == {"b"}
        assert one["num_rounds"] == len(one["token_ids"])
    assert sum(one["num_rounds"] for one in exact) < sum(one["num_rounds"] for one in plain)


def test_text_is_what_json_says(models: list[str], of_pair: Decoded, capsys: Captured) -> None:
    found = of_pair(*BOTH)
    assert main([*models, *BOTH]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{one['prompt']}{one['text']}\n\n" for one in found)
    assert "[2/2]" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_sampling_is_the_seeds(of_pair: Decoded) -> None:
    found = [of_pair(*BORIS, "--rule=sampled", f"--seed={seed}") for seed in (1, 1, 2)]
    first, again, other = (one[0]["token_ids"] for one in found)
    assert first == again != other


def test_comparison_leaves_stdout_to_json(models: list[str], capsys: Captured) -> None:
    assert main([*models, *BORIS, "--compare", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert json.loads(captured.out)["prompt"] == "Boris"
    rules = [line.split()[0] for line in captured.err.splitlines()[-3:]]
    assert rules == ["autoregressive", "exact", "fly"]


def test_without_flags(tiny_pair: Folders, monkeypatch: Patch, capsys: Captured) -> None:
    """The built-in pair continues built-in prompts, and the table says how many were right."""
    monkeypatch.setattr("fly_jax.decoding.pair.EMBEDDED_PAIR", tiny_pair)
    problem = Problem("Boris", " buys 3.\nAnswer: 3", "3")
    prompts = [Prompt(problem.prompt, "A built-in prompt", problem), Prompt("Ada", "Another")]
    monkeypatch.setattr(inputs, "built_in_prompts", lambda: prompts)
    assert main(SIZES) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Boris")
    table = [line.split() for line in lines[-6:]]
    assert [row[0] for row in table[2:]] == ["autoregressive", "exact", "fly", "margin"]
    assert all("0/1" in row for row in table[2:])


def test_bad_lines_are_skipped(models: list[str], tmp_path: Path, capsys: Captured) -> None:
    long = json.dumps({"prompt": "Ada " * 200}).encode()
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "Boris"}\n{"prompt": \n\xff\n' + long + b'\n{"prompt": "Ada"}\n')
    arguments = [*models, f"--prompts_file={file}", *SIZES, "--json", "--skip_bad_prompts"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    found = [json.loads(line)["prompt"] for line in captured.out.splitlines()]
    assert found == ["Boris", "Ada"]
    for number in (2, 3, 4):
        assert f"line {number}" in captured.err


def test_a_mesh_changes_no_token(models: list[str], of_pair: Decoded) -> None:
    """In a process of its own, where the devices have to be simulated."""
    single = of_pair(*BOTH)
    command = [sys.executable, "-m", "fly_jax.launch", *models, *BOTH, "--json", "--mesh=8x8"]
    there = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=there
    )
    assert finished.returncode == 0, finished.stderr
    assert "64 simulated devices (CPU) as mesh 8x8" in finished.stderr.splitlines()[0]
    sharded = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [one["token_ids"] for one in sharded] == [one["token_ids"] for one in single]


def test_auto_depth_is_a_word_for_k(of_pair: Decoded) -> None:
    (found,) = of_pair(*BORIS, "--rule=exact", "--num_speculative_tokens=auto")
    (expected,) = of_pair(*BORIS, "--rule=exact")
    assert found["token_ids"] == expected["token_ids"]


LOOKED_UP = ["--prompt=Ada has 3 apples and Ada has 3", "--max_new_tokens=12"]
EXACT = ["--rule=exact", "--num_speculative_tokens=4"]


def test_lookup_or_nothing_drafts(tiny_pair: Folders, decoded: Decoded, capsys: Captured) -> None:
    target = [*LOOKED_UP, f"--target={tiny_pair[0]}", "--dtype=float32", "--json"]
    records = []
    for flags, count in (([], 1), (["--draft=ngram", *EXACT], 0)):
        assert main([*target, *flags]) == 0
        captured = capsys.readouterr()
        records.append(json.loads(captured.out))
        assert captured.err.count("one token at a time") == count
    alone, named = records
    assert alone["rule"] == "autoregressive"
    (implied,) = decoded(*target, "--prompt_lookup_max=4", "--num_speculative_tokens=4")
    assert implied["rule"] == "exact"  # where nobody says: copies are not loosened
    assert named["token_ids"] == implied["token_ids"] == alone["token_ids"]
    assert named["num_draft_tokens"] == implied["num_draft_tokens"] > 0


def test_the_embedded_target_takes_the_lookup(decoded: Decoded) -> None:
    (found,) = decoded(*LOOKED_UP, "--draft=ngram", *EXACT)
    (expected,) = decoded(*LOOKED_UP, "--rule=autoregressive")
    assert found["token_ids"] == expected["token_ids"]
    assert found["num_draft_tokens"] > 0


def test_what_proposes_alone_stands_alone(models: list[str], refused: Refused) -> None:
    refused("--prompt=x", "--draft=ngram", *models, words=["proposes alone"])
