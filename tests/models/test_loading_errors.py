"""Whatever is wrong with a checkpoint is one sentence that names the file, and a known tensor."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, layout_on
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from refusals import assert_refused, sentence
from safetensors.numpy import load_file, save_file

from fly_jax.decoding.pair import open_pair
from fly_jax.models.checkpoints.hugging_face import HuggingFaceSource
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.source import resolve
from fly_jax.models.checkpoints.write import convert

UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, np.ndarray]
Change = Callable[[Path], object]
Complaint = Callable[[Path], str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint in two files with an index; `UP` lies in the second."""
    path = shutil.copytree(GOLDEN / "llama2", tmp_path / "llama")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_file({UP: tensors.pop(UP)}, path / "b.safetensors")
    save_file(tensors, path / "a.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {UP: "b.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    open_weights(path)
    return path


@pytest.fixture
def complaint(monkeypatch: pytest.MonkeyPatch) -> Complaint:
    """What is said about a folder before any weight is read: by the check and by loading."""

    def said(folder: Path) -> str:
        text = sentence(open_weights, folder)
        assert sentence(load_llama, folder) == text
        return text

    failing = Mock(side_effect=AssertionError("weights were read"))
    monkeypatch.setattr(HuggingFaceSource, "read", failing)
    return said


def without(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def with_bytes(file: str, content: bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content)


def with_tensors(file: str, change: Callable[[Tensors], Tensors]) -> Change:
    return lambda folder: save_file(change(load_file(folder / file)), folder / file)


def with_up(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return with_tensors("b.safetensors", lambda tensors: {UP: change(tensors[UP])})


def header(content: object) -> bytes:
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(encoded).to_bytes(8, "little") + encoded


FOUR = {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}
HEADERS = {
    "large file pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "not JSON": header(b"{'a': 1}"),
    "a list in place of an entry": header({"a": ["I8", [0], [0, 0]]}),
    "an object in place of a type": header({"a": FOUR | {"dtype": {"I8": None}}}) + bytes(4),
    "lines in a name": header({"a\nb": FOUR}),
}
GONE = without("b.safetensors")
FEWER = with_tensors("a.safetensors", lambda tensors: dict(sorted(tensors.items())[:-2]))
TURNED, ROUNDED = with_up(lambda up: up.T.copy()), with_up(lambda up: up.astype(np.int8))
NO_JSON = ["{0}/config.json is not valid JSON"]
# What is wrong, and what is said of it, where {0} is the folder and {1} its second file.
FAULTS: dict[str, tuple[Change, list[str]]] = {
    "no config": (without("config.json"), ["{0}/config.json does not exist"]),
    "the index names an absent file": (GONE, ["{1} does not exist, but " + INDEX]),
    "missing tensors": (FEWER, ["{0} lacks the tensor model.norm.weight and 1 more"]),
    "a wrong shape": (TURNED, [UP + " in {1} has shape [32, 56]", "asks for [56, 32]"]),
    "a quantised tensor": (ROUNDED, [UP + " in {1} is stored as I8"]),
    "a tensor in two files": (
        lambda folder: shutil.copy(folder / "b.safetensors", folder / "c.safetensors"),
        [UP, "both in {1} and in {0}/c.safetensors"],
    ),
    **{
        f"header: {name}": (with_bytes("b.safetensors", content), ["{1} is no whole safetensors"])
        for name, content in HEADERS.items()
    },
    **{
        f"index: {content!r}": (with_bytes(INDEX, content), ["{0}/" + INDEX + " is not an index"])
        for content in (b"", b"{", b"\xff", b"[]", b"{}", b'{"weight_map": 3}')
    },
    **{
        f"config: {content!r}": (with_bytes("config.json", content), NO_JSON)
        for content in (b'{"vocab_size": 96,', b'{"a": "\xff"}', b"")
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(folder: Path, complaint: Complaint, name: str) -> None:
    change, words = FAULTS[name]
    change(folder)
    text = complaint(folder)
    assert all(one.format(folder, folder / "b.safetensors") in text for one in words), text


def test_a_folder_without_weights(folder: Path, tmp_path: Path, complaint: Complaint) -> None:
    assert f"{tmp_path / 'x'} does not exist" in complaint(tmp_path / "x")
    file = folder / "a.safetensors"
    assert f"{file} is a file" in complaint(file)
    assert sentence(resolve, str(file)).endswith(f"give '{folder}'.")
    assert f"{tmp_path} holds no weights" in complaint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert re.search("only pytorch_model.bin.*needs safetensors", complaint(tmp_path))


def test_a_file_of_another_length(folder: Path, complaint: Complaint) -> None:
    file, content = folder / "b.safetensors", (folder / "b.safetensors").read_bytes()
    for changed in (*(content[:left] for left in (0, 5, 8, 40, -1)), content + b"\0"):
        file.write_bytes(changed)
        assert f"{file} is no whole safetensors file" in complaint(folder)


def test_a_header_is_not_read_beyond_its_limit(folder: Path, complaint: Complaint) -> None:
    """A sparse file of 8 TB that says all of it is header: no memory is asked for."""
    file = folder / "b.safetensors"
    for length in (100_000_001, 2**43):
        with file.open("wb") as stream:
            stream.write(length.to_bytes(8, "little") + b"{")
            stream.truncate(8 + length)
        tracemalloc.start()
        text = complaint(folder)
        assert tracemalloc.get_traced_memory()[1] < 2**22
        tracemalloc.stop()
        assert f"{file} is no whole safetensors file" in text
        assert "header too large" in text


@pytest.mark.parametrize(("value", "mesh"), [(np.nan, None), (np.inf, "2x4"), (-np.inf, None)])
def test_weights_that_are_not_finite(folder: Path, value: float, mesh: str | None) -> None:
    def spoil(values: np.ndarray) -> np.ndarray:
        values[7, 3] = value
        return values

    with_up(spoil)(folder)
    open_weights(folder)
    text = sentence(load_llama, folder, layout=layout_on(mesh), dtype=jnp.bfloat16)
    assert f"{UP} in {folder / 'b.safetensors'} holds NaN or infinite weights" in text
    assert sentence(convert, folder, folder.parent / "output", "int8") == text


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize("name", ["", " ", "llama", "/absent/llama", "./llama", "a/b/c", "../a"])
def test_neither_a_folder_nor_a_hub_id(name: str) -> None:
    told = f"'{name}' is neither a folder that exists nor a hub id"
    assert_refused(re.escape(told), resolve, name)


REPOSITORY = [
    "README.md", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "chat_template.jinja",
    "model.safetensors.index.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.fp16.safetensors", "pytorch_model.bin",
    "consolidated.safetensors", "consolidated.00.pth", "onnx/config.json",
    "onnx/model.onnx", "original/params.json", "original/consolidated.00.pth",
    "original/tokenizer.model", "tf_model.h5", "model.gguf", "params.json",
]  # fmt: skip
NEEDED = REPOSITORY[1:10]


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its files only those that are needed; and nothing by a revision that cannot be meant."""
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        files = filter_repo_objects(REPOSITORY, allow_patterns=allow_patterns)
        asked.append((repository, revision, list(files)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    name = "meta-llama/Llama-3.1-8B"
    assert resolve(name) == resolve(name, "v1.0") == resolve(f"{name}@refs/pr/7") == tmp_path
    expected = [(name, wanted, NEEDED) for wanted in (None, "v1.0", "refs/pr/7")]
    twice = "names a revision, and 'v1' was given as well"
    assert_refused(twice, resolve, "org/name@main", "v1")
    assert_refused("only hub ids have revisions", resolve, str(tmp_path), "v1")
    assert_refused("neither a folder that exists nor a hub id", resolve, "org/name@")
    assert_refused("given without a target", open_pair, revision="v1")
    assert asked == expected


ADVICE: dict[type[Exception], str] = {
    errors.GatedRepoError: "needs its licence accepted",
    errors.RepositoryNotFoundError: "nor a model on the hub",
    errors.RevisionNotFoundError: "has no revision 'v9'",
}


def test_a_hub_out_of_reach_or_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("org/name", "org/na--me", "org/na..me"):
        told = f"'{name}' is no folder that exists, and the hub could not give it"
        assert_refused(re.escape(told), resolve, name)
    for error, advice in ADVICE.items():
        refused = Mock(side_effect=error.__new__(error))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
        assert_refused(f"'org/name'.*{advice}", resolve, "org/name", "v9")
