"""Meshes are parsed and fitted to the devices; the rules table gives each array its place.

And which of several processes this is; what several of them do is tested in tests/launch.
"""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import layout_on, pod_layout
from jax._src.clusters import cloud_tpu_cluster
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from launch_types import Patch
from refusals import assert_refused

from fly_jax import FlyJaxError, preset
from fly_jax.models.architectures import ParameterSpec, parameter_specs
from fly_jax.models.cache import CACHE_AXES, cache_shape
from fly_jax.sharding import mesh
from fly_jax.sharding.mesh import MeshSpec, create_mesh, describe, parse_mesh, prepare_devices
from fly_jax.sharding.processes import ProcessInfo, broadcast, detect_process, gather, joint_errors

BOTH = ("x", "y")


def test_405b_on_64_devices() -> None:
    pod, specs = pod_layout("8x8"), parameter_specs(preset("llama-3.1-405b"))
    placed = {name: pod.spec(spec.axes, spec.shape) for name, spec in specs.items()}
    assert placed["embedding"] == P(BOTH, None)
    assert placed["query"] == P(None, None, BOTH, None)
    assert placed["key"] == placed["value"] == P(None, None, "x", None)
    assert placed["output"] == P(None, BOTH, None, None)
    assert placed["gate"] == placed["up"] == P(None, None, BOTH)
    assert placed["down"] == P(None, BOTH, None)
    assert placed["unembedding"] == P(None, BOTH)
    assert placed["final_norm"] == P(None)
    assert pod.fallbacks(specs) == []


def test_cache_by_rows_or_by_positions() -> None:
    """And a draft that is replicated has its rows over data alone."""

    def placed(rows: int, *layout: str) -> P:
        shape = cache_shape(preset("llama-3.1-405b"), rows, 8192)
        return pod_layout(*layout).spec(CACHE_AXES, shape)

    assert placed(16, "8x8") == P(None, "y", "x", None, None)
    assert placed(1, "8x8") == P(None, None, "x", None, None)
    assert placed(1, "8x8", "tensor_long") == P(None, None, "x", "y", None)
    assert placed(16, "2x8x8") == P(None, ("data", "y"), "x", None, None)
    assert placed(2, "2x8x8") == P(None, "data", "x", None, None)
    assert placed(16, "2x8x8", "replicated") == P(None, "data", None, None, None)
    draft = pod_layout("2x8x8", "replicated")
    for spec in parameter_specs(preset("llama-3.2-1b")).values():
        assert set(draft.spec(spec.axes, spec.shape)) == {None}
    assert draft.spec(("rows", None), (16, 5)) == P("data", None)


@pytest.mark.parametrize(("mesh", "axes", "shape", "expected"), [
    # What does not divide loses the last axes.
    *(("2x4", ("ffw",), (size,), P(BOTH)) for size in (16, 8)),
    *(("2x4", ("ffw",), (size,), P("x")) for size in (6, 4)), ("2x4", ("ffw",), (3,), P(None)),
    # An axis is used once, and none that the mesh lacks or that holds one device.
    ("2x4", ("cache_batch", None, "vocab"), (4, 1, 8), P("y", None, "x")),
    ("2x4", ("vocab", "ffw"), (8, 8), P(BOTH, None)),
    ("2x4", ("vocab", "ffw"), (6, 4), P("x", "y")),  # the second may, what the first cannot
    ("8", ("ffw", "cache_batch"), (8, 8), P("x", None)),
    ("1x8", ("ffw", "kv_heads"), (8, 8), P("y", None)),
    ("1x1", ("ffw", "cache_batch"), (8, 8), P(None, None)),
])  # fmt: skip
def test_how_axes_are_divided(
    mesh: str, axes: tuple[str, ...], shape: tuple[int, ...], expected: P
) -> None:
    assert layout_on(mesh).spec(axes, shape) == expected


def test_fallbacks_say_which_dimension() -> None:
    """And an unknown axis or a wrong rank is not passed over."""
    specs = {
        "query": ParameterSpec((2, 6), ("embed", "q_heads")),
        "gate": ParameterSpec((3, 8), ("embed", "ffw")),
        "key": ParameterSpec((2, 3), ("embed", "kv_heads")),
        "output": ParameterSpec((6, 2), ("q_heads", "embed")),
    }
    assert layout_on("2x4").fallbacks(specs) == [
        "query, output: q_heads of 6 does not divide over 8 devices (x, y), split over 2",
        "key: kv_heads of 3 does not divide over 2 devices (x), replicated",
    ]
    assert layout_on("1x1").fallbacks(specs) == []
    with pytest.raises(AttributeError, match="vocabulary"):
        layout_on("2x4").spec(("vocabulary",), (8,))
    with pytest.raises(ValueError, match="zip"):
        layout_on("2x4").spec(("vocab",), (8, 8))


def test_placement_and_constraint() -> None:
    here = layout_on("2x4")
    values = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    placed = jax.device_put(values, here.sharding(("ffw", None), values.shape))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    doubled = jax.jit(lambda x: here.constrain(x * 2, ("kv_heads", None)))(placed)
    assert {shard.data.shape for shard in doubled.addressable_shards} == {(8, 3)}
    np.testing.assert_array_equal(doubled, values * 2)


def test_a_layout_is_static_under_jit() -> None:
    total = Mock(wraps=lambda x, where: where.constrain(x, ("ffw",)).sum())
    run = jax.jit(lambda x, where: total(x, where), static_argnames="where")
    for _ in range(2):
        assert run(jnp.arange(8.0), where=layout_on("2x4")) == 28
    run(jnp.arange(8.0), where=layout_on("2x4", "replicated"))
    assert total.call_count == 2
    assert isinstance(layout_on("2x4").mesh, Mesh)


READABLE = {
    "8x8": (("x", 8), ("y", 8)), "1x1": (("x", 1), ("y", 1)), "8": (("x", 8),),
    **dict.fromkeys(("2x8x8", "data=2,x=8,y=8"), (("data", 2), ("x", 8), ("y", 8))),
    "data=2, x=4": (("data", 2), ("x", 4)), "y=16": (("y", 16),),
}  # fmt: skip


@pytest.mark.parametrize("text", READABLE)
def test_a_mesh_is_read_and_its_text_is_read_back(text: str) -> None:
    spec = parse_mesh(text)
    assert spec == MeshSpec(READABLE[text]) == parse_mesh(str(spec))
    assert hash(spec) == hash(parse_mesh(str(spec)))


@pytest.mark.parametrize("text", [
    "", "x", "8x", "x8", "0x8", "8x0", "-1x8", "8x-8", "axb", "8X8", "8*8", "1.5x2", "2x2x2x2",
    "x=8,x=8", "z=8", "x=0", "x=-2", "x=", "=8", "x=8,8", "x=8,", "x=two", "x=8=8",
    "99999999999999999999", "\u0668x8",
])  # fmt: skip
def test_anything_else_is_an_error_that_quotes_it(text: str) -> None:
    assert_refused(re.escape(f"'{text}' is not a mesh"), parse_mesh, text)


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
    assert_refused("mesh 8x8 needs 64 devices and JAX has started with 8", create_mesh, spec)


def _machine(monkeypatch: Patch, count: int) -> list[SimpleNamespace]:
    """Has JAX see so many accelerators, and give those of a mesh for it; returns them."""
    devices = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite") for _ in range(count)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(mesh, "mesh_over", lambda devices, _: devices)
    return devices


def test_accelerators_that_fit_or_do_not(monkeypatch: Patch) -> None:
    """Several processes need a mesh of all their devices."""
    for text, count in (("8x8", 8), ("2x2", 8), ("8", 4), ("2x1", 1)):
        _machine(monkeypatch, count)
        spec = parse_mesh(text)
        needs = f"mesh {text} needs {spec.num_devices} devices and this machine has {count} "
        assert_refused(needs, create_mesh, spec)
    devices = _machine(monkeypatch, 8)
    for text, number in (("1x1", 1), ("2x4", 8)):
        assert create_mesh(parse_mesh(text)) == devices[:number]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for text in ("1x1", "2x2", "4x4"):
        assert_refused(
            f"mesh {text} needs .* and the 2 processes have 8 ", create_mesh, parse_mesh(text)
        )
    for text in ("1x1", "3x3"):
        undivided = f"mesh {text} does not divide over 2 processes"
        assert_refused(undivided, prepare_devices, parse_mesh(text), 2)
    assert create_mesh(parse_mesh("2x4")) == devices


SLURM = {"JOB_ID": "4096", "STEP_NODELIST": "gpu[03-04]", "STEP_NUM_NODES": "2", "NTASKS": "16"}
SLURM |= {"PROCID": "9", "LOCALID": "1"}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: Patch) -> None:
    others = ("OMPI_MCA_orte_hnp_uri", "PRTE_LAUNCHED", "KUBERNETES_SERVICE_HOST")
    for name in (*others, *(f"SLURM_{one}" for one in SLURM)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", False)


def in_slurm(monkeypatch: Patch, **changes: str) -> None:
    for name, value in (SLURM | changes).items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_alone_or_as_it_is_typed() -> None:
    assert detect_process() is None
    assert detect_process(num_processes=1) is None
    assert broadcast({"a": 1}) == {"a": 1}
    assert gather("b") == ["b"]
    with pytest.raises(FlyJaxError, match=r"^It is broken; mend it\.$"), joint_errors():
        raise FlyJaxError("It is broken; mend it.")
    for given in (("host-a:8476", 4, 3), ("[::1]:8476", 2, 0)):  # what is typed
        assert detect_process(*given) == ProcessInfo(*given)


@pytest.mark.parametrize(("given", "words"), [
    (("host-a:8476", None, None), "--num_processes and --process_id must be given too"),
    (("host-a:8476", 4, None), "--process_id must be given too"),
    ((None, 4, 0), "--coordinator_address must be given too"),
    (("host-a:8476", 4, 4), "--process_id is 4.*from 0 to 3"),
    *(
        ((address, 4, 0), f"'{address}'.*10.0.0.1:8476")
        for address in ("host-a", "host-a:port", "host-a:0", "host-a:65536", ":8476")
    ),
])  # fmt: skip
def test_what_does_not_fit(given: tuple[str | None, int | None, int | None], words: str) -> None:
    assert_refused(words, detect_process, *given)


def test_slurm(monkeypatch: Patch) -> None:
    in_slurm(monkeypatch)
    process = detect_process()
    host, _, port = process.coordinator_address.partition(":")
    assert host == "gpu03"
    assert 0 < int(port) < 2**16
    assert process == ProcessInfo(process.coordinator_address, 16, 9, (1,))
    assert detect_process("other:8476") == ProcessInfo("other:8476", 16, 9, (1,))
    assert detect_process(num_processes=1) is None
    in_slurm(monkeypatch, NTASKS="1", PROCID="0")
    assert detect_process() is None  # a task alone, which keeps all its devices
    # Silence where nothing is typed means alone; what is typed needs the rest of the answer.
    in_slurm(monkeypatch, NTASKS="many")
    assert detect_process() is None
    assert_refused("--num_processes=1 for this process alone", detect_process, "host-a:8476")


def test_gke(monkeypatch: Patch) -> None:
    """16 pods of one slice; `localhost` stands for the first, which must have an address."""
    hosts = ["localhost", *(f"fly-jax-slice-0-{index}.fly-jax" for index in range(1, 16))]
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(jax._src.clusters.cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(hosts))
    monkeypatch.setenv("TPU_WORKER_ID", "7")
    # One slice; what is not in the environment would be asked of a metadata server.
    for name, value in {"NUM_SLICES": "1", "SLICE_ID": "0", "COORDINATOR_ADDRESS": ""}.items():
        monkeypatch.setenv(f"MEGASCALE_{name}", value)
    process = detect_process()
    assert process.coordinator_address.startswith("localhost:")
    assert (process.num_processes, process.process_id, process.local_device_ids) == (16, 7, None)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "somewhere-that-has-no-address")
    assert detect_process() is None
