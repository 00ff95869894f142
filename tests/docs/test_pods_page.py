"""What docs/pods.md launches with has the form that GKE, Slurm and fly_jax itself expect."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fly_jax.launch.flags import Flags
from fly_jax.launch.generate import GenerateFlags
from fly_jax.sharding.mesh import parse_mesh

DOCS = Path(__file__).parents[2] / "docs"

# The fields of each kind of object on the way from a JobSet (jobset.x-k8s.io/v1alpha2) over a Job
# (batch/v1) to a container (v1): what the API server knows, as far as one would write it by hand.
# A field by another name is refused there, and so it is here. "!" marks what must be given.
METADATA = {"name": str, "namespace": str, "labels": {str: str}, "annotations": {str: str}}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str}],
    "ports": [{"containerPort!": int, "name": str}],
    "resources": {"requests": {str: int}, "limits": {str: int}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
CLAIM = {"claimName!": str, "readOnly": bool}
POD = {
    "containers!": [CONTAINER],
    "volumes": [{"name!": str, "persistentVolumeClaim": CLAIM}],
    "nodeSelector": {str: str},
    "restartPolicy!": str,  # a Job's pods may not have the default, Always
    "hostNetwork": bool,
    "dnsPolicy": str,
    "subdomain": str,
}
JOB = {
    "completionMode": str,
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "activeDeadlineSeconds": int,
    "template!": {"metadata": METADATA, "spec!": POD},
}
SPEC = {
    "network": {"enableDNSHostnames": bool, "subdomain": str},
    "failurePolicy": {"maxRestarts": int},
    "successPolicy": {"operator!": str, "targetReplicatedJobs": [str]},
    "replicatedJobs!": [
        {"name!": str, "replicas": int, "template!": {"metadata": METADATA, "spec!": JOB}}
    ],
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
JOBSET = {"apiVersion!": str, "kind!": str, "metadata!": METADATA, "spec!": SPEC}


def faults(value: Any, schema: Any, at: str = "") -> list[str]:
    """What the schema does not allow, each with its place."""
    if isinstance(schema, type):
        right = isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
        return [] if right else [f"{at} is {value!r}, not {schema.__name__}"]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [
            fault
            for index, one in enumerate(value)
            for fault in faults(one, schema[0], f"{at}[{index}]")
        ]
    if not isinstance(value, dict):
        return [f"{at} is no object"]
    if list(schema) == [str]:
        return [
            fault for key, one in value.items() for fault in faults(one, schema[str], f"{at}.{key}")
        ]
    known = {key.rstrip("!"): inner for key, inner in schema.items()}
    needed = {key.rstrip("!") for key in schema if key.endswith("!")}
    return [
        *(f"{at}.{key} is missing" for key in needed - value.keys()),
        *(f"{at}.{key} is no field" for key in value.keys() - known.keys()),
        *(
            fault
            for key in value.keys() & known.keys()
            for fault in faults(value[key], known[key], f"{at}.{key}")
        ),
    ]


@pytest.fixture
def jobset() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DOCS / "jobset_v5e_64.yaml").read_text()))
    assert len(documents) == 1
    return documents[0]


def test_jobset_has_the_fields_of_a_jobset(jobset: dict[str, Any]) -> None:
    assert faults(jobset, JOBSET) == []
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    # The longest name that is made of these, that of a pod, must be a DNS label.
    pod = f"{jobset['metadata']['name']}-{job['name']}-0-15-abcde"
    assert re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", pod)
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod_spec = spec["template"]["spec"]
    assert pod_spec["restartPolicy"] in ("Never", "OnFailure")
    (container,) = pod_spec["containers"]
    volumes = {volume["name"] for volume in pod_spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda spec: spec.pop("replicatedJobs"), ".spec.replicatedJobs is missing"),
        (lambda spec: spec.update(failurePolicy={"maxRestart": 0}), "maxRestart is no field"),
        (lambda spec: spec["replicatedJobs"][0].update(replicas="1"), "replicas is '1', not int"),
    ],
)
def test_the_check_sees_faults(jobset: dict[str, Any], spoil: Any, fault: str) -> None:
    spoil(jobset["spec"])
    assert fault in "; ".join(faults(jobset, JOBSET))


def test_jobset_is_one_v5e_64_slice(jobset: dict[str, Any]) -> None:
    """The pods, the chips of each, the topology and the mesh are those of 64 chips."""
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["requests"]["google.com/tpu"] == chips
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == chips * spec["parallelism"] == 64
    assert container["command"] == ["python", "-m", "fly_jax.launch"]
    assert parse_mesh(generate_flags(container["args"]).mesh).num_devices == 64


def generate_flags(arguments: list[str]) -> GenerateFlags:
    """The flags as the command reads them: a name that it lacks is an error."""
    values = Flags("generate", GenerateFlags).parse(arguments, "")
    assert values is not None
    return values


def test_slurm_script() -> None:
    """Bash reads it, it has a task for each GPU, and the command takes its flags."""
    script = DOCS / "slurm_gpus.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    words = shlex.split(text[text.index("srun") :].replace("\\\n", " "))
    arguments = words[words.index("fly_jax.launch") + 1 :]
    mesh = parse_mesh(generate_flags(arguments).mesh)
    assert mesh.num_devices == int(asked["nodes"]) * int(asked["gpus-per-node"])


def test_the_page_types_no_unknown_flag() -> None:
    page = (DOCS / "pods.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"-m fly_jax\.launch ([^\"\n`&]*)", page)
    assert len(commands) == 3
    for command in commands:
        generate_flags(shlex.split(command))
