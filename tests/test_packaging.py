"""What a built wheel carries, and that it works outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_SOURCES = ("setup.py", "pyproject.toml", "LICENSE", "CHANGELOG.md", "README.md")
_FOLDERS = ("fly_jax", "configs", "drafters", "tests")
_LINKS = ("models", "sharding", "launch")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built from a copy so that nothing is left behind in it."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in _SOURCES:
        shutil.copy2(_ROOT / name, source / name)
    left_out = shutil.ignore_patterns("__pycache__")
    for name in _FOLDERS:
        shutil.copytree(_ROOT / name, source / name, symlinks=True, ignore=left_out)
    for name in _LINKS:
        (source / name).symlink_to((_ROOT / name).readlink())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


def test_wheel_has_the_package_and_nothing_else(unpacked: Path) -> None:
    top = {path.name for path in unpacked.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"fly_jax"}
    modules = {path.relative_to(unpacked) for path in unpacked.rglob("*.py")}
    expected = {path.relative_to(_ROOT) for path in (_ROOT / "fly_jax").rglob("*.py")}
    assert modules == expected
    assert (unpacked / "fly_jax" / "py.typed").is_file()


def test_wheel_has_the_configs(unpacked: Path) -> None:
    carried = {path.name: path for path in (unpacked / "fly_jax" / "configs").iterdir()}
    sources = {path.name: path for path in (_ROOT / "configs").iterdir()}
    assert carried.keys() == sources.keys()
    assert "fly_llama3_70b.toml" in carried
    for name, path in carried.items():
        assert path.read_bytes() == sources[name].read_bytes()


def test_wheel_has_the_embedded_pair_and_the_pages(unpacked: Path) -> None:
    embedded = _ROOT / "fly_jax" / "models" / "embedded"
    pair = [path.relative_to(_ROOT) for path in embedded.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in pair)
    assert sum((unpacked / path).stat().st_size for path in pair) <= 25 * 2**20
    pages = [
        Path("fly_jax/serving/http/page.html"),
        *(Path("fly_jax/launch") / name for name in ("page.html", "report.html")),
    ]
    for path in (*pair, *pages):
        assert (unpacked / path).read_bytes() == (_ROOT / path).read_bytes()


def test_metadata(unpacked: Path) -> None:
    (directory,) = unpacked.glob("*.dist-info")
    metadata = HeaderParser().parsestr((directory / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Name"] == "fly_jax"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = {"test", "tpu", "cuda", "notebooks", "serve"}
    assert set(metadata.get_all("Provides-Extra", [])) >= extras
    assert list(directory.rglob("LICENSE"))


def test_wheel_imports_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    program = (
        "import json, pathlib, fly_jax; "
        "root = pathlib.Path(fly_jax.__file__).parent; "
        "print(json.dumps([str(root), sorted(path.name for path in (root / 'configs').iterdir())]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    said = subprocess.check_output(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, text=True
    )
    root, configs = json.loads(said)
    assert Path(root) == unpacked / "fly_jax"
    assert "fly_llama3_70b.toml" in configs


@pytest.mark.parametrize("path", sorted((_ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_config_is_headed_by_its_command(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# python -m fly_jax.launch ")
    assert f"--config configs/{path.name}" in text.splitlines()[0]
    assert tomllib.loads(text)["rule"] == ("margin" if path.stem == "embedded_pair" else "fly")
