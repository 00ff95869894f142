"""Eight simulated devices for every test, programs that compile fast, and one folder for them.

All is set before any JAX backend exists. The folder lives as long as the run: workers and the
commands that tests start take each other's programs from it. Nearly all the time of the tests is
that of compiling small programs, and what they compute does not depend on how well LLVM does it.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if "FLY_JAX_TESTS" not in os.environ:  # workers inherit it
    os.environ["FLY_JAX_TESTS"] = tempfile.mkdtemp(prefix="fly_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["FLY_JAX_TESTS"], ignore_errors=True)
os.environ["FLY_JAX_COMPILATION_CACHE"] = os.environ["FLY_JAX_TESTS"]
# Programs that compile faster are not worth a file: with each, JAX looks at all that are there.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"

import jax
import jaxlib
import jaxtyping
import pytest

jaxtyping.install_import_hook("fly_jax", "shape_checks.checked")

from fly_jax.sharding.mesh import enable_compilation_cache  # noqa: E402

# A module in one piece: cutting it into pieces for more cores is work of its own.
added = ["--xla_cpu_parallel_codegen_split_count=1"]
if jaxlib.version.__version_info__ < (0, 11):  # later ones do not know the flag
    added.append("--xla_cpu_use_fusion_emitters=false")
given = [one for one in os.environ.get("XLA_FLAGS", "").split() if one not in added]
os.environ["XLA_FLAGS"] = " ".join([*given, *added])

# Tracing makes many objects and little garbage: the default of 700 takes a tenth of the time.
gc.set_threshold(100_000, 20, 50)
jax.config.update("jax_num_cpu_devices", 8)
enable_compilation_cache()


_MOST_MAPS = 40_000  # of 65,530; a file of tests adds some thousand
_LONGEST_FILES = ("planning", "docs", "launch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest files, so that no worker waits for another's last one."""
    items.sort(key=lambda item: item.path.parent.name not in _LONGEST_FILES)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """For tests of what fly_jax itself says of shapes that do not fit."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compiled_well() -> Iterator[None]:
    """For tests that look at a program, which must be the one that users run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def _programs_that_the_maps_allow() -> Iterator[None]:
    """Keeps compiled programs for the next file, up to as many memory maps as Linux allows."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
