"""The command as its users see it, on a tiny random pair; each thing is opened and read once."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_types import Decoded, Folders, Patch, Ran

from fly_jax.decoding import pair
from fly_jax.decoding.pair import load_pair
from fly_jax.engine.generation import generate
from fly_jax.evaluation.problems import Problem
from fly_jax.launch import inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import Prompt
from fly_jax.models import tokenizer
from fly_jax.models.checkpoints import hugging_face, load
from fly_jax.models.tokenizer import Tokenizer
from fly_jax.verification.rules import Exact

KEYS = {
    "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "rule", "num_rounds",
    "mean_accepted_tokens", "num_draft_tokens", "num_accepted_tokens", "num_rescued_tokens",
    "num_rollbacks", "tokens_per_second", "why",
}  # fmt: skip
PROMPTS = ["Ada has 3 apples", "Boris"]
SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]
BORIS = ["--prompt=Boris", *SIZES]
BOTH = ["--rule=fly", f"--prompt={PROMPTS[0]}", *BORIS]


def test_json_and_text(
    models: list[str], tiny_pair: Folders, tokenizer: Tokenizer, of_pair: Decoded, ran: Ran
) -> None:
    """And the same text with the target as a draft below the draft."""
    found = of_pair(*BOTH)
    out, said = ran(*models, *BOTH)
    assert out == "".join(f"{one['prompt']}{one['text']}\n\n" for one in found)
    assert "[2/2]" in said
    assert "\x1b" not in out + said
    stack = of_pair(f"--draft={tiny_pair[0]}", "--level_speculative_tokens=2", *BOTH)
    for key in ("token_ids", "why", "num_rounds"):
        assert [one[key] for one in stack] == [one[key] for one in found]
    assert [record["prompt"] for record in found] == PROMPTS
    for record in found:
        ids = record["token_ids"]
        assert (record.keys(), record["rule"]) == (KEYS, "fly")
        assert record["prompt_token_ids"] == tokenizer.encode(record["prompt"])
        assert record["text"] == tokenizer.decode(ids)
        ends = ids[-1] in tokenizer.eos_token_ids
        assert record["finish_reason"] == ("stop" if ends else "length")
        assert len(ids) == 20 or ends
        assert len(record["why"]) == len(ids)
        assert set(record["why"]) <= set("mrcb")
        assert record["num_rescued_tokens"] >= record["why"].count("r")
        assert record["num_draft_tokens"] == 4 * record["num_rounds"]
        assert record["mean_accepted_tokens"] == pytest.approx(len(ids) / record["num_rounds"])
        assert record["tokens_per_second"] > 0
    assert "m" in "".join(record["why"] for record in found)


def test_sampling_is_the_seeds(of_pair: Decoded) -> None:
    found = [of_pair(*BORIS, "--rule=sampled", f"--seed={seed}") for seed in (1, 1, 2)]
    first, again, other = (one[0]["token_ids"] for one in found)
    assert first == again != other


def test_comparison_leaves_stdout_to_json(models: list[str], ran: Ran) -> None:
    """And has the rule that was asked for."""
    out, said = ran(*models, *BORIS, "--rule=lossy", "--compare", "--json")
    assert len(out.splitlines()) == 1
    assert json.loads(out)["prompt"] == "Boris"
    names = [line.split()[0] for line in said.splitlines()[-4:]]
    assert names == ["autoregressive", "exact", "fly", "lossy"]


def test_without_flags(tiny_pair: Folders, monkeypatch: Patch, ran: Ran) -> None:
    """The built-in pair continues built-in prompts, and the table says how many were right."""
    monkeypatch.setattr("fly_jax.decoding.pair.EMBEDDED_PAIR", tiny_pair)
    problem = Problem("Boris", " buys 3.\nAnswer: 3", "3")
    prompts = [Prompt(problem.prompt, "A built-in prompt", problem), Prompt("Ada", "Another")]
    monkeypatch.setattr(inputs, "built_in_prompts", lambda: prompts)
    lines = ran(*SIZES).out.splitlines()
    assert lines[0].startswith("Boris")
    table = [line.split() for line in lines[-6:]]
    assert [row[0] for row in table[2:]] == ["autoregressive", "exact", "fly", "margin"]
    assert all("0/1" in row for row in table[2:])


def test_bad_lines_are_skipped(models: list[str], tmp_path: Path, ran: Ran) -> None:
    long = json.dumps({"prompt": "Ada " * 200}).encode()
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "Boris"}\n{"prompt": \n\xff\n' + long + b'\n{"prompt": "Ada"}\n')
    out, said = ran(*models, f"--prompts_file={file}", *SIZES, "--json", "--skip_bad_prompts")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Boris", "Ada"]
    assert all(f"line {number}" in said for number in (2, 3, 4))
    file.write_text("nonsense\n")
    ran(*models, f"--prompts_file={file}", "--skip_bad_prompts", status=2)  # nothing is left


def test_a_mesh_changes_no_token(models: list[str], of_pair: Decoded) -> None:
    """In a process of its own, where the devices have to be simulated."""
    command = [sys.executable, "-m", "fly_jax.launch", *models, *BOTH, "--json", "--mesh=8x8"]
    there = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, capture_output=True, text=True, input="", env=there)
    assert finished.returncode == 0, finished.stderr
    assert "64 simulated devices (CPU) as mesh 8x8" in finished.stderr.splitlines()[0]
    sharded = [json.loads(line)["token_ids"] for line in finished.stdout.splitlines()]
    assert sharded == [one["token_ids"] for one in of_pair(*BOTH)]


LOOKED_UP = ["--prompt=Ada has 3 apples and Ada has 3", "--max_new_tokens=12"]
EXACT = ["--rule=exact", "--num_speculative_tokens=4"]


def test_lookup_or_nothing_drafts(tiny_pair: Folders, decoded: Decoded, ran: Ran) -> None:
    target = [*LOOKED_UP, f"--target={tiny_pair[0]}", "--dtype=float32", "--json"]
    said = [ran(*target), ran(*target, "--draft=ngram", *EXACT)]
    assert [one.err.count("one token at a time") for one in said] == [1, 0]
    alone, named = (json.loads(one.out) for one in said)
    assert alone["rule"] == "autoregressive"
    (implied,) = decoded(*target, "--prompt_lookup_max=4", "--num_speculative_tokens=4")
    assert implied["rule"] == "exact"  # where nobody says: copies are not loosened
    assert named["token_ids"] == implied["token_ids"] == alone["token_ids"]
    assert named["num_draft_tokens"] == implied["num_draft_tokens"] > 0
    # And with the embedded target.
    (found,) = decoded(*LOOKED_UP, "--draft=ngram", *EXACT)
    (expected,) = decoded(*LOOKED_UP, "--rule=autoregressive")
    assert found["token_ids"] == expected["token_ids"]
    assert found["num_draft_tokens"] > 0


FEW = ["--max_new_tokens=6", "--num_speculative_tokens=4", "--window_size=2", "--json"]
Counts = collections.Counter[str]


@pytest.fixture
def counted(monkeypatch: Patch) -> Counts:
    """How often what is opened, read, parsed or encoded is: by its name and first argument."""
    counts = Counts()

    def count(owner: Any, name: str, at: int = 0) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[f"{name} {args[at]}"] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("HuggingFaceSource", "load_tokenizer"):
        count(load, name)
    count(tokenizer, "_sentence_piece_vocabulary")
    count(tokenizer.Tokenizer, "encode", 1)
    count(hugging_face, "read_config")
    for owner in (inputs, pair):
        count(owner, "parse_mesh")
        count(owner, "create_mesh")
    return counts


@pytest.mark.parametrize("command", ["generate", "calibrate"])
def test_everything_is_opened_once(
    counted: Counts, models: list[str], tiny_pair: Folders, tmp_path: Path, command: str
) -> None:
    """Each prompt is encoded once too, whatever is compared."""
    (prompts := tmp_path / "prompts.txt").write_text("Ada has 3 apples\nBoris\n")
    memory = [f"--memory={tmp_path / 'memory.npz'}", *FEW[:2]]
    own = ["--compare", *FEW] if command == "generate" else memory
    assert main([command, *models, "--mesh=2x2", f"--prompts_file={prompts}", *own]) == 0
    expected = ["parse_mesh 2x2", "create_mesh 2x2", *(f"encode {one}" for one in PROMPTS)]
    for folder in tiny_pair:
        opening = ("HuggingFaceSource", "read_config", "load_tokenizer")
        expected += [f"{name} {folder}" for name in opening]
        expected += [f"_sentence_piece_vocabulary {folder / 'tokenizer.model'}"]
    assert dict(counted) == dict.fromkeys(expected, 1)


def test_the_library_and_the_command_decode_alike(decoded: Decoded) -> None:
    """With the embedded pair and nothing else said, and with a rule alone."""
    embedded = load_pair()
    prompt = "Problem: Mia has 12 shells and finds 9 more. How many has she?\nSolution:"
    for flags, given in (([], {}), (["--rule=exact"], {"rule": Exact()})):
        (record,) = decoded(f"--prompt={prompt}", "--max_new_tokens=24", *flags)
        (one,) = generate(embedded, [prompt], max_new_tokens=24, **given)
        assert record["token_ids"] == one.token_ids
        assert record["why"] == "".join(why.letter for why in one.why)
        assert record["num_draft_tokens"] == one.num_draft_tokens
