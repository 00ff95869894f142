"""Meshes are parsed, fitted to the devices and described."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

from fly_jax.errors import FlyJaxError
from fly_jax.sharding.mesh import MeshSpec, create_mesh, describe, parse_mesh, prepare_devices

Patch = pytest.MonkeyPatch
READABLE = {
    "8x8": (("x", 8), ("y", 8)),
    "1x1": (("x", 1), ("y", 1)),
    "8": (("x", 8),),
    **dict.fromkeys(("2x8x8", "data=2,x=8,y=8"), (("data", 2), ("x", 8), ("y", 8))),
    "data=2, x=4": (("data", 2), ("x", 4)),
    "y=16": (("y", 16),),
}


@pytest.mark.parametrize("text", READABLE)
def test_a_mesh_is_read_and_its_text_is_read_back(text: str) -> None:
    spec = parse_mesh(text)
    assert spec == MeshSpec(READABLE[text]) == parse_mesh(str(spec))
    assert hash(spec) == hash(parse_mesh(str(spec)))


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "8x", "x8", "0x8", "8x0", "-1x8", "8x-8", "axb", "8X8", "8*8", "1.5x2", "2x2x2x2",
        "x=8,x=8", "z=8", "x=0", "x=-2", "x=", "=8", "x=8,8", "x=8,", "x=two", "x=8=8",
        "99999999999999999999", "\u0668x8",
    ],
)  # fmt: skip
def test_anything_else_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(FlyJaxError, match=re.escape(f"'{text}' is not a mesh")) as error:
        parse_mesh(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["1x1", "2x4", "8", "2x2x2", "data=2,x=2"])
def test_a_mesh_is_created_and_described(text: str) -> None:
    spec = parse_mesh(text)
    mesh = create_mesh(spec)
    assert tuple(mesh.shape.items()) == spec.axes
    assert mesh.axis_types == (AxisType.Auto,) * len(spec.axes)
    assert set(mesh.devices.flat) == set(jax.devices()[: spec.num_devices])
    number = {1: "1 device"}.get(mesh.size, f"{mesh.size} simulated devices")
    assert describe(mesh) == f"{number} (CPU) as mesh {text}"


def test_too_late_to_simulate_more() -> None:
    spec = parse_mesh("8x8")
    prepare_devices(spec, 1)
    assert len(jax.devices()) == 8
    with pytest.raises(FlyJaxError, match="mesh 8x8 needs 64 devices and JAX has started with 8"):
        create_mesh(spec)


def _machine(monkeypatch: Patch, count: int) -> list[SimpleNamespace]:
    """Has JAX see so many accelerators, and give those of a mesh for it; returns them."""
    devices = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite") for _ in range(count)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "make_mesh", lambda *_, devices, **__: devices)
    return devices


@pytest.mark.parametrize(("text", "count"), [("8x8", 8), ("2x2", 8), ("8", 4), ("2x1", 1)])
def test_wrong_number_of_accelerators(monkeypatch: Patch, text: str, count: int) -> None:
    _machine(monkeypatch, count)
    spec = parse_mesh(text)
    needs = f"mesh {text} needs {spec.num_devices} devices and this machine has {count} "
    with pytest.raises(FlyJaxError, match=needs):
        create_mesh(spec)


def test_accelerators_that_fit(monkeypatch: Patch) -> None:
    devices = _machine(monkeypatch, 8)
    assert create_mesh(parse_mesh("1x1")) == devices[:1]
    assert create_mesh(parse_mesh("2x4")) == devices


def test_several_processes_need_a_mesh_of_all_their_devices(monkeypatch: Patch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    _machine(monkeypatch, 8)
    for text in ("1x1", "2x2", "4x4"):
        with pytest.raises(FlyJaxError, match=f"mesh {text} needs .* and the 2 processes have 8 "):
            create_mesh(parse_mesh(text))
    for text in ("1x1", "3x3"):
        with pytest.raises(FlyJaxError, match=f"mesh {text} does not divide over 2 processes"):
            prepare_devices(parse_mesh(text), 2)
    assert len(create_mesh(parse_mesh("2x4"))) == 8


def test_a_cpu_only_machine_simulates_the_mesh() -> None:
    """In a process of its own, because the number is settled when the backend starts."""
    program = """if True:
        from fly_jax.sharding.mesh import create_mesh, describe, parse_mesh, prepare_devices
        spec = parse_mesh("8x8")
        prepare_devices(spec, 1)
        print(describe(create_mesh(spec)))
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    shown = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert shown == "64 simulated devices (CPU) as mesh 8x8\n"
