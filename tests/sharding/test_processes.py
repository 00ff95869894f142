"""Which of several processes this is; what several of them do is tested in tests/launch."""

from __future__ import annotations

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster
from launch_types import Patch
from refusals import assert_refused

from fly_jax.errors import FlyJaxError
from fly_jax.sharding.processes import ProcessInfo, broadcast, detect_process, gather, joint_errors

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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("host-a:8476", None, None), "--num_processes and --process_id must be given too"),
        (("host-a:8476", 4, None), "--process_id must be given too"),
        ((None, 4, 0), "--coordinator_address must be given too"),
        (("host-a:8476", 4, 4), "--process_id is 4.*from 0 to 3"),
        *(
            ((address, 4, 0), f"'{address}'.*10.0.0.1:8476")
            for address in ("host-a", "host-a:port", "host-a:0", "host-a:65536", ":8476")
        ),
    ],
)
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
