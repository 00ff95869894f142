"""Compiled programs kept on disk, so that the second start of a command compiles nothing.

The commands turn this on; a library leaves it to the program that imports it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import jax

from fly_jax.errors import FlyJaxError

OFF = ("off", "none")
VARIABLE = "FLY_JAX_COMPILATION_CACHE"
_LEAST_SECONDS_OF_JAX = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# What was not read for longest goes when the programs take more than this.
_MOST_BYTES = 4 * 2**30


def enable_compilation_cache(folder: str | Path | None = None) -> Path | None:
    """Keeps every program that is compiled from now on in a folder, and takes it from there.

    JAX's variable JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS leaves out those that compile faster.
    Call it before anything is compiled. The folder must be one that only trusted people can write
    to: what lies in it is run.

    Args:
      folder: "off" or "none" for no cache. None takes the environment variable
        FLY_JAX_COMPILATION_CACHE, else the folder of JAX_COMPILATION_CACHE_DIR as it is, else one
        of the user's own.

    Returns:
      Where the programs of this JAX and this kind of machine lie; None where there is no cache.

    Raises:
      FlyJaxError: the folder cannot be written.
    """
    wanted = str(folder or os.environ.get(VARIABLE) or "")
    if wanted.lower() in OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not wanted and given:
        path = Path(given)
    else:
        path = (Path(wanted).expanduser() if wanted else _user_folder(os.environ)) / _kind()
        _make(path)
        jax.config.update("jax_compilation_cache_dir", str(path))
        _forget_oldest(path)
    if _LEAST_SECONDS_OF_JAX not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def _user_folder(environment: Mapping[str, str]) -> Path:
    """In the user's folder for what can be made again."""
    given = environment.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()
    return base / "fly_jax" / "xla"


def _kind() -> str:
    """Names what programs depend on and JAX's own keys leave out.

    A program for a CPU may have instructions that another CPU lacks, and home folders are shared.
    """
    features = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    text = f"{platform.machine()} {platform.processor()} {features}"
    return f"jax-{jax.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise FlyJaxError(
            f"Compiled programs cannot be kept in {path} ({reason}); give --compilation_cache "
            "another folder, or off."
        )


def _forget_oldest(path: Path) -> None:
    """Removes programs until the others are few enough.

    Once for each command: JAX's own limit looks at every file before each program that it keeps
    (a tenth of a second a program where a thousand lie there).
    """
    found = []
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another command removed it
            stat = file.stat()
            found.append((stat.st_atime, stat.st_size, file))
    kept = 0
    for _, size, file in sorted(found, reverse=True):
        kept += size
        if kept > _MOST_BYTES:
            file.unlink(missing_ok=True)
