"""Eight simulated devices for every test, and one folder for what any of them compiles.

Both are set before any JAX backend exists. The folder lives as long as the run: workers and the
commands that tests start take each other's programs from it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "FLY_JAX_TESTS" not in os.environ:  # workers inherit it
    os.environ["FLY_JAX_TESTS"] = tempfile.mkdtemp(prefix="fly_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["FLY_JAX_TESTS"], ignore_errors=True)
os.environ["FLY_JAX_COMPILATION_CACHE"] = os.environ["FLY_JAX_TESTS"]

import jax
import pytest

from fly_jax.compilation_cache import enable_compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
enable_compilation_cache()
# Programs that compile faster than this are not worth a file.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module_alone() -> Iterator[None]:
    """Forgets compiled programs: all of them together take more memory maps than Linux allows."""
    yield
    jax.clear_caches()
