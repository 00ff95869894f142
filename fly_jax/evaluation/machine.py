"""The description of the machine that a result was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax


def describe() -> dict[str, Any]:
    """The date, the processor or accelerator, and the versions that matter."""
    packages, path = ("jax", "jaxlib", "flax", "numpy"), Path("/proc/cpuinfo")
    known = path.read_text() if path.exists() else ""  # of Linux; elsewhere vectors are not said
    names = re.findall(r"^model name\s*:\s*(.*)", known, re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": names[0].strip() if names else platform.processor(),
        "simd": next((one for one in ("avx512f", "avx2", "asimd") if f" {one} " in known), ""),
        "cpu_cores": len(os.sched_getaffinity(0)) if known else os.cpu_count(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
