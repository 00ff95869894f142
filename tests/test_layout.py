"""The shape of the repository: which room imports which, the links, and what a wheel carries."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
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
    "errors", "shapes", "parameters", "sharding", "verification", "models", "decoding", "engine",
    "planning", "training", "evaluation", "serving", "integrations", "api", "launch",
)  # fmt: skip
_LINKS = ("models", "sharding", "launch")
_MAX_LINES = 700

_MODULES = {
    ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(_PACKAGE.rglob("*.py"))
}


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
    # Imports are found, and rooms: without them all would pass.
    assert "fly_jax.models.architectures" in left["fly_jax.models.llama"]
    assert {_layer(module) for module in left} >= {"errors", "sharding", "models", "decoding"}
    while done := {module for module, imported in left.items() if not imported}:
        left = {module: left[module] - done for module in left if module not in done}
    assert not left, f"these import one another: {sorted(left)}"


def test_the_extra_serve_is_asked_for_in_one_room() -> None:
    """fly_jax and all other commands work without it. Adapters have what their engines bring."""
    extra = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}
    room = "fly_jax.serving.http"
    asked: set[str] = set()
    for module, path in _MODULES.items():
        if _layer(module) == "integrations":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = extra & {name.split(".")[0] for node in ast.walk(tree) for name in _named(node)}
        asked |= found
        if not module.startswith(room):
            assert not found, f"{module} imports {found}"
            at_once = {name for node in tree.body for name in _named(node)}
            within = {name for name in at_once if name.startswith(room)}
            assert not within, f"{module} imports {within} when it is imported"
    assert asked == extra


@pytest.mark.parametrize(("link", "to", "holds"), [
    *((name, Path("fly_jax", name), "__init__.py") for name in _LINKS),
    ("fly_jax/configs", Path("..", "configs"), "*.toml"),
])  # fmt: skip
def test_link(link: str, to: Path, holds: str) -> None:
    assert (_ROOT / link).readlink() == to
    assert list((_ROOT / link).glob(holds))


@pytest.mark.parametrize("folder", ["fly_jax", "tests", "benchmarks", "recipes"])
def test_files_are_short(folder: str) -> None:
    for path in (_ROOT / folder).rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= _MAX_LINES, f"{path.relative_to(_ROOT)} has {lines} lines"


def test_version_is_in_one_place() -> None:
    setup = (_ROOT / "setup.py").read_text(encoding="utf-8")
    versions = re.findall(r'^ +version="([^"]+)"', setup, re.MULTILINE)
    for path in _MODULES.values():
        assert not re.search(r"__version__\s*=\s*[\"']", path.read_text(encoding="utf-8")), path
    assert "project" not in tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changes = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *_ = re.findall(r"^## \[([^]]+)\]", changes, re.MULTILINE)
    assert [newest] == versions


def test_shapes_are_checked() -> None:
    """Guards the hook in tests/conftest.py: what an annotation names is what a call gets."""
    with pytest.raises(jaxtyping.TypeCheckError, match="lead"):
        sample(np.zeros((2, 8), np.float32), keys=jax.random.split(jax.random.key(0), 3))


_SOURCES = ("setup.py", "pyproject.toml", "LICENSE", "CHANGELOG.md", "README.md")
_FOLDERS = ("fly_jax", "configs", "drafters", "tests")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built from a copy so that nothing is left behind in it."""
    directory = tmp_path_factory.mktemp("wheel")
    source, left_out = directory / "source", shutil.ignore_patterns("__pycache__")
    for name in _FOLDERS:
        shutil.copytree(_ROOT / name, source / name, symlinks=True, ignore=left_out)
    for name in (*_SOURCES, *_LINKS):
        shutil.copy2(_ROOT / name, source / name, follow_symlinks=False)
    build = f"from setuptools import build_meta as it; it.build_wheel({str(directory)!r})"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=source, stdout=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


def test_wheel_has_the_package_and_nothing_else(unpacked: Path) -> None:
    top = {path.name for path in unpacked.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"fly_jax"}
    modules = {path.relative_to(unpacked) for path in unpacked.rglob("*.py")}
    assert modules == {path.relative_to(_ROOT) for path in _MODULES.values()}
    assert (unpacked / "fly_jax" / "py.typed").is_file()


def test_wheel_has_the_configs_the_embedded_pair_and_the_pages(unpacked: Path) -> None:
    configs = [path.relative_to(unpacked) for path in (unpacked / "fly_jax/configs").iterdir()]
    assert {path.name for path in configs} == {path.name for path in (_ROOT / "configs").iterdir()}
    embedded = _PACKAGE / "models" / "embedded"
    pair = [path.relative_to(_ROOT) for path in embedded.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in pair)
    assert sum((unpacked / path).stat().st_size for path in pair) <= 25 * 2**20
    kinds = (".html", ".css", ".toml")
    beside = [path.relative_to(_ROOT) for path in _PACKAGE.rglob("*") if path.suffix in kinds]
    some = {"page.html", "chips.toml", "protocol.toml", "try_it.html"}
    assert some < {path.name for path in beside}
    for path in (*pair, *configs, *beside):
        assert (unpacked / path).read_bytes() == (_ROOT / path).read_bytes()


def test_metadata(unpacked: Path) -> None:
    (directory,) = unpacked.glob("*.dist-info")
    metadata = HeaderParser().parsestr((directory / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Name"] == "fly_jax"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras >= {"test", "tpu", "cuda", "notebooks", "serve"}
    assert list(directory.rglob("LICENSE"))


def test_wheel_imports_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import fly_jax; print(fly_jax.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
    given = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
    found = Path(subprocess.check_output(command, **given).strip())
    assert found.parent == unpacked / "fly_jax"


@pytest.mark.parametrize("path", sorted((_ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_config_is_headed_by_its_command(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# python -m fly_jax.launch ")
    assert f"--config configs/{path.name}" in text.splitlines()[0]
    assert tomllib.loads(text)["rule"] == ("margin" if path.stem == "embedded_pair" else "fly")
