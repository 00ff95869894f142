"""Shared by the scripts: how they start, and what a result file says of the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, logging

from fly_jax.evaluation.machine import describe

logging.set_verbosity(logging.WARNING)  # absl.app would show what every library does

RESULTS = Path(__file__).parent / "results"


def run(main: Callable[[], object]) -> None:
    """Runs a script that takes flags and nothing else."""

    def checked(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"'{argv[1]}' is no flag; see --help and the head of the script.")
        main()

    app.run(checked)


def write(name: str, result: dict[str, Any]) -> Path:
    """Writes `results/name.json` with the machine it was measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=2) + "\n")
    return path
