"""What a result says of the machine it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax


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
