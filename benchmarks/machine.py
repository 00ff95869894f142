"""Shared by the scripts: how they start, and what a result file says of the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, logging

logging.set_verbosity(logging.WARNING)  # absl.app would show what every library does

RESULTS = Path(__file__).parent / "results"


def run(main: Callable[[], object]) -> None:
    """Runs a script that takes flags and nothing else."""

    def checked(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"'{argv[1]}' is no flag; see --help and the head of the script.")
        main()

    app.run(checked)


def describe() -> dict[str, Any]:
    """The date, the processor or accelerator, and the versions that matter."""
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **_processor(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> dict[str, str]:
    """Its name and its widest vectors, which is empty where Linux does not say."""
    path = Path("/proc/cpuinfo")
    known = path.read_text() if path.exists() else ""
    lines = [line for line in known.splitlines() if line.startswith("model name")]
    name = lines[0].split(":", 1)[1].strip() if lines else platform.processor()
    simd = next((one for one in ("avx512f", "avx2", "asimd") if f" {one} " in known), "")
    return {"cpu": name, "simd": simd}


def write(name: str, result: dict[str, Any]) -> Path:
    """Writes `results/name.json` with the machine it was measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=2) + "\n")
    return path
