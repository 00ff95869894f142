"""The command opens and reads each thing once: checkpoints, tokenizers, the mesh, the prompts."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_types import Decoded, Folders, Patch

from fly_jax.decoding import pair
from fly_jax.decoding.pair import CheckedPrompt, load_pair, open_pair
from fly_jax.engine import engine
from fly_jax.engine.batch import generate
from fly_jax.errors import FlyJaxError
from fly_jax.launch import inputs
from fly_jax.launch.__main__ import main
from fly_jax.models import tokenizer
from fly_jax.models.checkpoints import hugging_face, load
from fly_jax.verification.rules import Exact

SIZES = ["--max_new_tokens=6", "--num_speculative_tokens=4", "--window_size=2", "--json"]
Counts = collections.Counter[str]


@pytest.fixture
def counted(monkeypatch: Patch) -> Counts:
    """How often what is opened, read, parsed or checked is: by its name and first argument."""
    counts = Counts()

    def count(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[f"{name} {args[0]}"] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("HuggingFaceSource", "load_tokenizer"):
        count(load, name)
    count(tokenizer, "_sentence_piece_vocabulary")
    count(hugging_face, "read_config")
    for owner in (inputs, pair):
        count(owner, "parse_mesh")
        count(owner, "create_mesh")
    return counts


@pytest.mark.parametrize("command", ["generate", "calibrate"])
def test_everything_is_opened_once(
    counted: Counts, models: list[str], tiny_pair: Folders, tmp_path: Path, command: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Ada has 3 apples\n")
    own = {
        "generate": ["--compare", *SIZES],
        "calibrate": [f"--memory={tmp_path / 'memory.npz'}", *SIZES[:2]],
    }
    assert main([command, *models, "--mesh=2x2", f"--prompts_file={prompts}", *own[command]]) == 0
    expected = {"parse_mesh 2x2", "create_mesh 2x2"}
    for folder in tiny_pair:
        opening = ("HuggingFaceSource", "read_config", "load_tokenizer")
        expected |= {f"{name} {folder}" for name in opening}
        expected.add(f"_sentence_piece_vocabulary {folder / 'tokenizer.model'}")
    assert dict(counted) == dict.fromkeys(expected, 1)


def test_each_prompt_is_encoded_and_checked_once(of_pair: Decoded, monkeypatch: Patch) -> None:
    """The command says which prompt it was, and its decoders believe it, in a comparison too."""
    encoded: list[str] = []
    checked: list[str] = []
    encode, check = tokenizer.Tokenizer.encode, pair.check_prompt

    def encoding(self: tokenizer.Tokenizer, text: str, add_bos: bool = True) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_bos)

    def checking(*args: Any, name: str = "") -> CheckedPrompt:
        if not isinstance(args[0], CheckedPrompt):
            checked.append(name)
        return check(*args, name=name)

    monkeypatch.setattr(tokenizer.Tokenizer, "encode", encoding)
    for owner in (pair, engine):
        monkeypatch.setattr(owner, "check_prompt", checking)
    found = of_pair("--prompt=Ada", "--prompt=Boris", "--rule=exact", "--compare", *SIZES)
    assert [one["prompt"] for one in found] == encoded == ["Ada", "Boris"]
    assert checked == ["Prompt 1", "Prompt 2"]


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


def test_what_is_open_decodes_as_its_folders_do(tiny_pair: Folders, monkeypatch: Patch) -> None:
    expected = generate(load_pair(*tiny_pair, dtype="float32"), ["Ada"], max_new_tokens=8)
    opened = open_pair(*tiny_pair)

    for name in ("HuggingFaceSource", "load_tokenizer"):
        monkeypatch.delattr(load, name)  # nothing is opened twice
    found = generate(load_pair(opened, dtype="float32"), ["Ada"], max_new_tokens=8)
    assert found[0].token_ids == expected[0].token_ids
    with pytest.raises(FlyJaxError, match="drafts of its own"):
        load_pair(opened, tiny_pair[1])
