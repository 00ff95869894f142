"""Eight simulated devices for every test, and programs that compile fast.

All is set before any JAX backend exists. Nearly all the time of the tests is that of compiling
small programs, and what they compute does not depend on how well LLVM does it. None is kept on
disk: it would take as long to read. Most imports are in fixtures, since the process that hands out
the tests reads this file too, while the others wait.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["FLY_JAX_COMPILATION_CACHE"] = "off"
os.environ["FLY_JAX_WEIGHTS_CACHE"] = "off"

import jax
import jaxlib
import jaxtyping
import pytest
import shape_checks

shape_checks.install()

if TYPE_CHECKING:
    from launch_types import Captured, Folders, Ran, Refused

    from fly_jax.decoding.pair import Pair
    from fly_jax.decoding.programs import Programs
    from fly_jax.decoding.state import DecodeState

# A module in one piece: cutting it into pieces for more cores is work of its own. Reductions are
# not split into two kernels, which would run faster: that is a quarter of a round's compile time.
added = ["--xla_cpu_parallel_codegen_split_count=1"]
added += ["--xla_disable_hlo_passes=tree_reduction_rewriter"]
if jaxlib.version.__version_info__ < (0, 11):  # later ones do not know the flag
    added.append("--xla_cpu_use_fusion_emitters=false")
given = [one for one in os.environ.get("XLA_FLAGS", "").split() if one not in added]
os.environ["XLA_FLAGS"] = " ".join([*given, *added])

# Tracing makes many objects and little garbage: the default of 700 takes a tenth of the time.
gc.set_threshold(1_000_000, 20, 50)
# Every HTTP client reads 140 certificates for its own, and no test needs one.
ssl.create_default_context = functools.cache(ssl.create_default_context)
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # from now on no command that a test runs in this process changes their number


_TESTS = Path(__file__).parent
_MOST_MAPS = 50_000  # of 65,530; a file of tests adds some thousand
# The longest come first, then the largest files: at the end no worker waits long for another.
_SLOW = (
    "planning/test_compiled_plans.py", "planning/test_no_copies_on_slices.py",
    "planning/test_no_copies.py", "launch/test_many_processes.py", "docs/test_readme.py",
    "docs/test_pages.py", "docs/test_notebook.py", "decoding/test_mesh_decoding.py",
    "decoding/test_steady_state.py",
)  # fmt: skip


def pytest_sessionfinish() -> None:
    """Leaves what is still there to the end of the process: looking through it takes seconds."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the slow files, which are marked as such."""
    places: dict[pytest.Item, tuple[int, int, str]] = {}
    for item in items:
        name = item.path.relative_to(_TESTS).as_posix()
        place = _SLOW.index(name) if name in _SLOW else len(_SLOW)
        places[item] = place, -item.path.stat().st_size, name
        if name in _SLOW:
            item.add_marker("slow")
    items.sort(key=places.__getitem__)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    from tiny_pair import write_pair

    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def chatty_pair(tiny_pair: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """That pair; the target has a chat template."""
    from tiny_pair import TEMPLATE

    target = shutil.copytree(tiny_pair[0], tmp_path_factory.mktemp("chat") / "target")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target, tiny_pair[1]


@pytest.fixture(scope="session")
def pair(tiny_pair: Folders) -> Pair:
    from fly_jax.decoding.pair import load_pair

    return load_pair(*tiny_pair, dtype="float32")


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


@pytest.fixture
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Messages about what has been compiled since the last call."""

    def since() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [message for message in messages if message.startswith("Finished XLA compilation")]

    jax.config.update("jax_log_compiles", True)  # in all threads
    with caplog.at_level(logging.WARNING):
        yield since
    jax.config.update("jax_log_compiles", False)


@pytest.fixture
def ran(capsys: Captured) -> Ran:
    """Runs a command line that must end with this status; gives its `out` and its `err`."""
    from fly_jax.launch.__main__ import main

    def run(*arguments: str, status: int = 0) -> Any:
        capsys.readouterr()
        assert main(arguments) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(ran: Ran) -> Refused:
    """Runs a command line that must end with status 2 and one sentence, and returns that."""

    def run(*arguments: str, words: Sequence[str] = ()) -> str:
        out, sentence = ran(*arguments, status=2)
        assert (out, sentence.count("\n"), sentence[-2:]) == ("", 1, ".\n")
        assert "Traceback" not in sentence
        for word in words:
            assert word in sentence
        return str(sentence)

    return run


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each row, of every pass that has run some of a prompt."""
    return _watched(
        monkeypatch, "prefill_chunk", lambda before, _, size, *rest: (len(before.length), size)
    )


@pytest.fixture
def dispatches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DecodeState, DecodeState]]:
    """The state before and after every dispatch of rounds."""
    return _watched(monkeypatch, "run", lambda before, result, *rest: (before, result[0]))


def _watched(monkeypatch: pytest.MonkeyPatch, name: str, seen: Callable[..., Any]) -> list[Any]:
    """What is seen of each call of a method of Programs that is not a trace."""
    from fly_jax.decoding.programs import Programs

    found, method = list[Any](), getattr(Programs, name)

    def watched(self: Programs, state: DecodeState, *rest: Any, **given: Any) -> Any:
        result = method(self, state, *rest, **given)
        if not self._traces:
            found.append(seen(state, result, *rest))
        return result

    monkeypatch.setattr(Programs, name, watched)
    return found


@pytest.fixture(autouse=True, scope="module")
def _programs_that_the_maps_allow() -> Iterator[None]:
    """Keeps compiled programs for the next file, up to as many memory maps as Linux allows."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
