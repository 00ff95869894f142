"""Which folders a target and a draft lie in: local, on the Hugging Face hub, or embedded."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from fly_jax.errors import FlyJaxError
from fly_jax.models.config import LlamaConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
_NOT_FROM_HUB = ["original/*", "*.bin", "*.pth"]


def resolve(name_or_path: str) -> Path:
    """The folder of a checkpoint: a local one, else that of a hub id, downloaded if need be.

    Args:
      name_or_path: such as `./my-llama` or `meta-llama/Llama-3.1-8B-Instruct`.

    Raises:
      FlyJaxError: it is neither, or the hub is out of reach or refuses.
    """
    try:
        path = Path(name_or_path).expanduser()
        is_folder, is_file = bool(name_or_path) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise FlyJaxError(
            f"'{name_or_path}' cannot be looked up ({error}); give the folder of a checkpoint."
        ) from error
    if is_folder:
        return path
    if is_file:
        raise FlyJaxError(
            f"'{name_or_path}' is a file; fly_jax needs the folder of a checkpoint: give "
            f"'{path.parent}'."
        )
    if not _HUB_ID.fullmatch(name_or_path):
        raise FlyJaxError(
            f"'{name_or_path}' is neither a folder that exists nor a hub id; give the folder of a "
            "Llama checkpoint, or an id such as meta-llama/Llama-3.1-8B-Instruct."
        )
    return _download(name_or_path)


def embedded_pair() -> tuple[Path, Path]:
    """The folders of the target and the draft that come with the package."""
    folder = Path(str(importlib.resources.files("fly_jax.models"))) / "embedded"
    return folder / "target", folder / "draft"


def check_pair(target: LlamaConfig, draft: LlamaConfig) -> None:
    """Checks that both models number as many tokens.

    Raises:
      FlyJaxError: they do not.
    """
    if target.vocab_size != draft.vocab_size:
        raise FlyJaxError(
            f"The target has a vocabulary of {target.vocab_size} tokens and the draft one of "
            f"{draft.vocab_size}; they must share one: take a draft of the target's family."
        )


def _download(repository: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            repository, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_FROM_HUB
        )
    except errors.GatedRepoError as error:
        raise FlyJaxError(
            f"The hub model '{repository}' needs its licence accepted; do so on its page and log "
            "in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FlyJaxError(
            f"'{repository}' is neither a folder that exists nor a model on the hub; correct the "
            "name, or log in with `hf auth login` if the model is private."
        ) from error
    except Exception as error:  # the hub's HTTP library has errors of its own
        raise FlyJaxError(
            f"'{repository}' is no folder that exists, and the hub could not give it "
            f"({type(error).__name__}); connect to the network, or give a local folder."
        ) from error
    return Path(folder)
