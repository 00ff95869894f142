"""The command as its users see it, on a tiny random pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_types import Captured, Decoded, Patch, Refused

from fly_jax.evaluation.problems import Problem
from fly_jax.launch import inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import Prompt
from fly_jax.models.tokenizer import load_tokenizer

KEYS = {
    "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "rule", "num_rounds",
    "mean_accepted_tokens", "num_draft_tokens", "num_accepted_tokens", "num_rescued_tokens",
    "num_rollbacks", "tokens_per_second", "why",
}  # fmt: skip
PROMPTS = ["Ada has 3 apples", "Boris"]
SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]


def given(*prompts: str) -> list[str]:
    return [f"--prompt={prompt}" for prompt in prompts]


def test_several_drafts(models: list[str], tiny_pair: tuple[Path, Path], decoded: Decoded) -> None:
    """The target as a draft below the draft: the same text."""
    below = [f"--draft={tiny_pair[0]}", "--level_speculative_tokens=2"]
    found = decoded(*models, *below, *given(*PROMPTS), *SIZES)
    alone = decoded(*models, *given(*PROMPTS), *SIZES)
    kept = ("token_ids", "why", "num_rounds")
    assert [[record[key] for key in kept] for record in found] == [
        [record[key] for key in kept] for record in alone
    ]


def test_json_objects(models: list[str], tiny_pair: tuple[Path, Path], decoded: Decoded) -> None:
    tokenizer = load_tokenizer(tiny_pair[0])
    found = decoded(*models, *given(*PROMPTS), *SIZES)
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


def test_exact_gives_the_tokens_of_autoregressive(models: list[str], decoded: Decoded) -> None:
    rules = [
        decoded(*models, *given(*PROMPTS), f"--rule={rule}", *batch, *SIZES)
        for rule, batch in (("autoregressive", []), ("exact", []), ("exact", ["--batch_size=2"]))
    ]
    one, exact, batched = ([record["token_ids"] for record in found] for found in rules)
    assert one == exact == batched
    assert all(set(record["why"]) == {"b"} for record in rules[0])
    assert all(record["num_rounds"] == len(record["token_ids"]) for record in rules[0])
    assert sum(record["num_rounds"] for record in rules[1]) < sum(map(len, one))


def test_text_is_what_json_says(models: list[str], decoded: Decoded, capsys: Captured) -> None:
    found = decoded(*models, *given(*PROMPTS), *SIZES)
    assert main([*models, *given(*PROMPTS), *SIZES]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{one['prompt']}{one['text']}\n\n" for one in found)
    assert "[2/2]" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_sampling_is_the_seeds(models: list[str], decoded: Decoded) -> None:
    arguments = [*models, *given("Boris"), "--rule=sampled"]
    first, again, other = (
        decoded(*arguments, f"--seed={seed}", *SIZES)[0]["token_ids"] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_comparison_leaves_stdout_to_json(models: list[str], capsys: Captured) -> None:
    assert main([*models, *given("Boris"), *SIZES, "--compare", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert json.loads(captured.out)["prompt"] == "Boris"
    rules = [line.split()[0] for line in captured.err.splitlines()[-3:]]
    assert rules == ["autoregressive", "exact", "fly"]


def test_without_prompts_and_models(
    tiny_pair: tuple[Path, Path], monkeypatch: Patch, capsys: Captured
) -> None:
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


def test_a_config_is_overridden_by_flags(
    models: list[str], tmp_path: Path, decoded: Decoded
) -> None:
    config = tmp_path / "slow.toml"
    config.write_text('rule = "autoregressive"\n')
    arguments = [*models, *given("Boris"), f"--config={config}"]
    assert decoded(*arguments, *SIZES)[0]["rule"] == "autoregressive"
    assert decoded(*arguments, "--rule=exact", *SIZES)[0]["rule"] == "exact"


def test_bad_lines_are_skipped_on_request(
    models: list[str], tmp_path: Path, capsys: Captured
) -> None:
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


def test_a_mesh_changes_no_token(models: list[str], decoded: Decoded) -> None:
    """In a process of its own, where the devices have to be simulated."""
    single = decoded(*models, *given(*PROMPTS), *SIZES)
    command = [sys.executable, "-m", "fly_jax.launch", *models, *given(*PROMPTS), *SIZES]
    finished = subprocess.run(
        [*command, "--json", "--mesh=8x8"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert finished.returncode == 0, finished.stderr
    assert "64 simulated devices" in finished.stderr.splitlines()[0]
    sharded = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [one["token_ids"] for one in sharded] == [one["token_ids"] for one in single]


def test_auto_depth_is_a_word_for_k(tiny_pair: tuple[Path, Path], capsys: Captured) -> None:
    target, draft = map(str, tiny_pair)
    flags = [f"--target={target}", f"--draft={draft}", "--prompt=Ada has 3", "--rule=exact"]
    tokens = []
    for k in ("auto", "4"):
        assert main([*flags, f"--num_speculative_tokens={k}", "--max_new_tokens=12", "--json"]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert tokens[0] == tokens[1]


LOOKED_UP = ["--prompt=Ada has 3 apples and Ada has 3", "--max_new_tokens=12"]
EXACT = ["--rule=exact", "--num_speculative_tokens=4"]


def test_the_lookup_or_nothing_drafts(
    tiny_pair: tuple[Path, Path], decoded: Decoded, capsys: Captured
) -> None:
    target = [*LOOKED_UP, f"--target={tiny_pair[0]}", "--dtype=float32"]
    assert main([*target, "--json"]) == 0
    captured = capsys.readouterr()
    alone = json.loads(captured.out)
    assert alone["rule"] == "autoregressive"
    assert captured.err.count("one token at a time") == 1
    assert main([*target, "--draft=ngram", *EXACT, "--json"]) == 0
    captured = capsys.readouterr()
    named = json.loads(captured.out)
    assert "one token at a time" not in captured.err
    (implied,) = decoded(*target, "--prompt_lookup_max=4", *EXACT)
    assert named["token_ids"] == implied["token_ids"] == alone["token_ids"]
    assert named["num_draft_tokens"] == implied["num_draft_tokens"] > 0


def test_the_embedded_target_takes_the_lookup(decoded: Decoded) -> None:
    (found,) = decoded(*LOOKED_UP, "--draft=ngram", *EXACT)
    (expected,) = decoded(*LOOKED_UP, "--rule=autoregressive")
    assert found["token_ids"] == expected["token_ids"]
    assert found["num_draft_tokens"] > 0


def test_what_proposes_alone_stands_alone(tiny_pair: tuple[Path, Path], refused: Refused) -> None:
    drafts = ["--draft=ngram", f"--draft={tiny_pair[1]}"]
    refused("--prompt=x", f"--target={tiny_pair[0]}", *drafts, words=["proposes alone"])
