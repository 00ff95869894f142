"""The place, the identity and the interface of a checkpoint, whatever its format."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Array

from fly_jax.errors import FlyJaxError, file_trouble
from fly_jax.models.architectures import Group, LlamaConfig, ParameterSpec
from fly_jax.sharding.rules import Layout

# Bytes that a reader may hold beyond the arrays that it fills.
READ_BUFFER_BYTES = 256 * 2**20

# A parameter as it is stored: an array, or the parts of a quantised matrix by their names.
Stored = Array | dict[str, Array]
Arranging = Callable[[str, Any, ParameterSpec], Array]


class Source(Protocol):
    """A checkpoint of which everything was checked that can be without reading a weight."""

    config: LlamaConfig
    int8: bool

    @property
    def arranged(self) -> Arranging:
        """Makes a parameter of what is stored, under `jit`; equal where arranged alike."""

    def read(self, group: Group, layout: Layout | None) -> Mapping[str, Stored]:
        """The group's parameters as stored, by name; raises FlyJaxError for a damaged file."""

    def describe(self, group: Group, name: str) -> str:
        """The place of a parameter of a group, in words that begin a sentence."""


_EMBEDDED = Path(__file__).parents[1] / "embedded"
# The target and the draft that come with the package.
EMBEDDED_PAIR = (_EMBEDDED / "target", _EMBEDDED / "draft")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Files that decoding reads; a repository often has its weights in other formats, too.
_HUB_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
]  # fmt: skip
_HUB_WEIGHTS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]


def is_gguf(path: Path) -> bool:
    """Tells whether a checkpoint is a GGUF file, and no folder."""
    return path.suffix == ".gguf" and path.is_file()


def resolve(name_or_path: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Finds a checkpoint: a local folder or GGUF file, else what a hub id gives.

    FlyJaxError where it is neither, has two revisions or is local and has one, or no hub gives it.

    Args:
      name_or_path: such as `./my-llama`, `meta-llama/Llama-3.1-8B-Instruct`, or an id with its
        revision, `meta-llama/Llama-3.1-8B-Instruct@main`.
      revision: branch, tag or commit of a hub id that names none itself.
      weights: whether a hub is to give the weights as well.
    """
    try:
        path = Path(name_or_path).expanduser()
        is_folder, is_file = bool(name_or_path) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise FlyJaxError(
            f"'{name_or_path}' cannot be looked up ({error}); give the folder of a checkpoint."
        ) from error
    if is_folder or is_gguf(path):
        if revision is not None:
            raise FlyJaxError(
                f"The revision '{revision}' was given for '{name_or_path}'; only hub "
                "ids have revisions: leave it out, or give a hub id."
            )
        return path
    if is_file:
        raise FlyJaxError(
            f"'{name_or_path}' is a file; fly_jax needs a GGUF file or the folder of a checkpoint: "
            f"give '{path.parent}'."
        )
    repository, _, own = name_or_path.partition("@")
    if own and revision is not None:
        raise FlyJaxError(
            f"'{name_or_path}' names a revision, and '{revision}' was given as well; give one of "
            "the two."
        )
    if not _HUB_ID.fullmatch(repository) or name_or_path.endswith("@"):
        raise FlyJaxError(
            f"'{name_or_path}' is neither a folder that exists nor a hub id; give the folder of a "
            "checkpoint, a GGUF file that exists, or an id such as "
            "meta-llama/Llama-3.1-8B-Instruct."
        )
    return _download(repository, own or revision, weights)


def _download(repository: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_HUB_FILES + _HUB_WEIGHTS * weights
        )
    except Exception as error:  # the hub's HTTP library has errors of its own
        said = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        told = {
            errors.GatedRepoError: f"The hub model '{repository}' needs its licence accepted; do "
            "so on its page and log in with `hf auth login`.",
            errors.RevisionNotFoundError: f"The hub model '{repository}' has no revision "
            f"'{revision}'; give a branch, a tag or a commit that its page lists.",
            errors.RepositoryNotFoundError: f"'{repository}' is neither a folder that exists nor a "
            "model on the hub; correct the name, or log in with `hf auth login` if it is private.",
            Exception: f"'{repository}' is no folder that exists, and the hub could not give it "
            f"({type(error).__name__}: {said}); connect to the network, or give a local folder.",
        }
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise FlyJaxError(file_trouble(error)) from error
        raise FlyJaxError(next(told[kind] for kind in told if isinstance(error, kind))) from error
    if not Path(folder).is_dir():
        raise FlyJaxError(
            f"The hub model '{repository}' has no file that fly_jax reads in a folder, such as "
            "model.safetensors; give another, or fetch a GGUF file of it and give its path."
        )
    return Path(folder)


def fingerprint(source: Path) -> dict[str, list[int]]:
    """Size and time of change of each file of a checkpoint that bears on its weights."""
    files = [*source.glob("[!.]*.safetensors"), *source.glob("co*.json")]
    files += [source] if is_gguf(source) else []
    stats = {str(file.resolve()): file.stat() for file in sorted(files)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


_SAMPLE_BYTES = 2**16


def identity(path: Path) -> str:
    """A digest that is the same for copies of a checkpoint and differs between checkpoints.

    It is made of the configuration and of each weight file's name, size, beginning, middle and end:
    a fine-tuned model has its parent's names and sizes, and other numbers in them.
    """
    folder, files = path, [path / "config.json"]
    files += [*path.glob("[!.]*.safetensors"), *path.glob("orbax/**/*")]
    if path.is_file():
        folder, files = path.parent, [path]
    digest = hashlib.sha256()
    for one in sorted(file for file in files if file.is_file()):
        size = one.stat().st_size
        digest.update(f"{one.relative_to(folder).as_posix()} {size}\n".encode())
        with one.open("rb") as file:
            for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                file.seek(max(start, 0))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
