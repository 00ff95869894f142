"""The shape of the repository: which room may import which, the root links, the version."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

from fly_jax.verification.sampling import sample

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "fly_jax"

# From the bottom up: a room imports only from rooms before it. "api" is fly_jax/__init__.py and
# whatever else lies beside the rooms; `errors` is below all.
_LAYERS = (
    "errors", "parameters", "sharding", "verification", "models", "decoding", "engine", "planning",
    "training", "evaluation", "serving", "integrations", "api", "launch",
)  # fmt: skip
_LINKS = ("models", "sharding", "launch")
_MAX_LINES = 700

_FILES = sorted(_PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


_MODULES = {_module(path): path for path in _FILES}


def _layer(module: str) -> str:
    name = module.split(".")[1] if "." in module else "api"
    return name if name in _LAYERS else "api"


def _named(node: ast.AST) -> set[str]:
    """The modules that one statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    assert node.level == 0, f"{ast.unparse(node)} is a relative import"
    submodules = {f"{node.module}.{alias.name}" for alias in node.names}
    within = submodules & _MODULES.keys()
    return within | ({str(node.module)} if within != submodules else set())


def _imports(path: Path) -> set[str]:
    """The modules of fly_jax that a file imports, wherever in the file it does so."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = {module for node in nodes for module in _named(node)}
    return {module for module in found if module.split(".")[0] == "fly_jax"}


@pytest.mark.parametrize("module", _MODULES)
def test_imports_point_one_way(module: str) -> None:
    """So verification stands without models: another engine calls the rules with its own logits."""
    layer = _layer(module)
    for imported in _imports(_MODULES[module]):
        assert _LAYERS.index(_layer(imported)) <= _LAYERS.index(layer), f"it imports {imported}"


def test_there_is_no_circle_between_files() -> None:
    """Imports inside functions and for type checkers only count too."""
    left = {module: _imports(path) & set(_MODULES) for module, path in _MODULES.items()}
    while any(not imported for imported in left.values()):
        done = {module for module, imported in left.items() if not imported}
        left = {module: left[module] - done for module in left if module not in done}
    assert not left, f"these import one another: {sorted(left)}"


def test_the_layers_are_seen() -> None:
    """Guards the test above against passing because it finds no imports."""
    assert "fly_jax.models.architectures" in _imports(_PACKAGE / "models" / "llama.py")
    assert {_layer(module) for module in _MODULES} >= {"errors", "sharding", "models", "decoding"}


def test_the_extra_serve_is_asked_for_in_one_room() -> None:
    """fly_jax and all other commands work without it. Adapters have what their engines bring."""
    extra = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}
    room = "fly_jax.serving.http"
    asked: set[str] = set()
    for module, path in _MODULES.items():
        if _layer(module) == "integrations":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {name.split(".")[0] for node in ast.walk(tree) for name in _named(node)}
        asked |= named & extra
        assert module.startswith(room) or not named & extra, f"{module} imports {named & extra}"
        if not module.startswith(room):
            at_once = {name for node in tree.body for name in _named(node)}
            within = {name for name in at_once if name.startswith(room)}
            assert not within, f"{module} imports {within} when it is imported"
    assert asked == extra


@pytest.mark.parametrize("name", _LINKS)
def test_root_link(name: str) -> None:
    link = _ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("fly_jax", name)
    assert (link / "__init__.py").is_file()


def test_configs_link() -> None:
    assert (_PACKAGE / "configs").readlink() == Path("..", "configs")
    assert list((_PACKAGE / "configs").glob("*.toml"))


@pytest.mark.parametrize("folder", ["fly_jax", "tests", "benchmarks", "recipes"])
def test_files_are_short(folder: str) -> None:
    for path in (_ROOT / folder).rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= _MAX_LINES, f"{path.relative_to(_ROOT)} has {lines} lines"


def test_version_is_in_one_place() -> None:
    setup = (_ROOT / "setup.py").read_text(encoding="utf-8")
    versions = re.findall(r'^ +version="([^"]+)"', setup, re.MULTILINE)
    for path in _FILES:
        assert not re.search(r"__version__\s*=\s*[\"']", path.read_text(encoding="utf-8")), path
    pyproject = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "project" not in pyproject
    changes = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *_ = re.findall(r"^## \[([^]]+)\]", changes, re.MULTILINE)
    assert [newest] == versions


def test_shapes_are_checked() -> None:
    """Guards the hook in tests/conftest.py: what an annotation names is what a call gets."""
    with pytest.raises(jaxtyping.TypeCheckError, match="lead"):
        sample(np.zeros((2, 8), np.float32), keys=jax.random.split(jax.random.key(0), 3))
