"""Which parts are trained, in which order, and where they go; the training itself is faked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from fly_jax.launch.__main__ import main
from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama
from fly_jax.training.pair import RECIPES, VOCAB_SIZE, Recipe

TINY = LlamaConfig(
    vocab_size=8, embed_size=4, ffw_size=4, num_layers=1, num_heads=1, num_kv_heads=1, head_size=4,
    max_context=8,
)  # fmt: skip
FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def train_tokenizer(folder: Path, vocab_size: int) -> None:
        assert vocab_size == VOCAB_SIZE
        calls.append("tokenizer")
        folder.mkdir(parents=True)
        for name in FILES:
            (folder / name).write_text(name)

    def train(recipe: Recipe, batches: Any, directory: Path) -> Llama:
        (tokenizer_model, *_) = batches.args
        assert tokenizer_model.read_text() == "tokenizer.model"
        calls.append((recipe, directory.parent.name))
        return Llama.random(TINY, jax.random.key(0))

    monkeypatch.setattr("fly_jax.training.tokenizer.train_tokenizer", train_tokenizer)
    monkeypatch.setattr("fly_jax.training.recipe.train", train)
    return calls


def test_everything(trained: list[object], tmp_path: Path) -> None:
    assert main(["train", f"--directory={tmp_path}"]) == 0
    assert trained == ["tokenizer", (RECIPES["target"], "target"), (RECIPES["draft"], "draft")]
    for model in ("target", "draft"):
        for name in FILES:
            assert (tmp_path / model / "hf" / name).read_text() == name


def test_one_model_with_the_tokenizer_that_is_there(trained: list[object], tmp_path: Path) -> None:
    assert main(["train", f"--directory={tmp_path}", "--model=tokenizer"]) == 0
    assert main(["train", f"--directory={tmp_path}", "--model=draft", "--num_steps=7"]) == 0
    assert trained[0] == "tokenizer"
    ((recipe, name),) = trained[1:]
    assert name == "draft"
    assert recipe.num_steps == 7
    assert recipe.config == RECIPES["draft"].config


def test_a_finished_model_is_left_as_it_is(
    trained: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train", f"--directory={tmp_path}", "--model=draft"]
    assert main(arguments) == 0
    number = len(trained)
    monkeypatch.setattr("fly_jax.training.recipe.steps_done", lambda _: RECIPES["draft"].last_step)
    assert main(arguments) == 0
    assert len(trained) == number
    assert "nothing was left to do" in capsys.readouterr().err
    (tmp_path / "draft" / "hf" / "tokenizer.json").unlink()  # it was ended before that was there
    assert main(arguments) == 0
    assert len(trained) == number + 1


def test_an_interrupted_run_says_how_to_go_on(
    trained: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> Llama:
        raise KeyboardInterrupt

    monkeypatch.setattr("fly_jax.training.recipe.train", interrupted)
    arguments = ["train", f"--directory={tmp_path}", "--model=target"]
    assert main(arguments) == 130
    assert "python -m fly_jax.launch " + " ".join(arguments) in capsys.readouterr().err
