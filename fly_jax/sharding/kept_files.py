"""Folders of the user's own for what can be made again: where they lie, and how they stay small."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fly_jax.errors import FlyJaxError

OFF = ("off", "none")


def kept_folder(given: str | Path | None, variable: str, name: str) -> Path | None:
    """The folder that was asked for, or the user's own one of a name; None for none at all.

    Args:
      given: "off" or "none" for none. None takes the environment variable, else the user's folder.
    """
    wanted = str(given or os.environ.get(variable) or "")
    if wanted.lower() in OFF:
        return None
    if wanted:
        return Path(wanted).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "fly_jax" / name


def make_folder(path: Path, what: str, flag: str) -> None:
    """Makes a folder that only its user reads, unless it is there.

    Raises:
      FlyJaxError: it cannot be written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise FlyJaxError(
            f"{what} cannot be kept in {path} ({reason}); give --{flag} another folder, or off."
        )


def forget_oldest(path: Path, most_bytes: int) -> None:
    """Removes what was not read for longest until the other files are few enough."""
    found = []
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another command removed it
            stat = file.stat()
            found.append((stat.st_atime, stat.st_size, file))
    kept = 0
    for _, size, file in sorted(found, reverse=True):
        kept += size
        if kept > most_bytes:
            file.unlink(missing_ok=True)
