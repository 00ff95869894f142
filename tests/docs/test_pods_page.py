"""What docs/pods.md launches with has the form that GKE, Slurm and fly_jax itself expect."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from fly_jax.launch.flags import Flags
from fly_jax.launch.generate import GenerateFlags
from fly_jax.sharding.mesh import parse_mesh

DOCS = Path(__file__).parents[2] / "docs"

# The fields of each kind of object on the way from a JobSet (jobset.x-k8s.io/v1alpha2) over a Job
# (batch/v1) to a container (v1): those of the API server that are used, and no others, since one by
# another name is refused there. "!" marks what must be given.
METADATA = {"name": str, "annotations": {str: str}}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "ports": [{"containerPort!": int}],
    "resources": {"requests": {str: int}, "limits": {str: int}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
CLAIM = {"claimName!": str, "readOnly": bool}
POD = {
    "containers!": [CONTAINER],
    "volumes": [{"name!": str, "persistentVolumeClaim": CLAIM}],
    "nodeSelector": {str: str},
    "restartPolicy!": str,  # a Job's pods may not have the default, Always
}
JOB = {
    "completionMode": str,
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "template!": {"metadata": METADATA, "spec!": POD},
}
SPEC = {
    "network": {"enableDNSHostnames": bool},
    "failurePolicy": {"maxRestarts": int},
    "replicatedJobs!": [
        {"name!": str, "replicas": int, "template!": {"metadata": METADATA, "spec!": JOB}}
    ],
}
JOBSET = {"apiVersion!": str, "kind!": str, "metadata!": METADATA, "spec!": SPEC}


def typed(schema: Any) -> Any:
    """The type of what a schema allows."""
    if isinstance(schema, list):
        return list[typed(schema[0])]
    if isinstance(schema, type):
        return schema
    if list(schema) == [str]:
        return dict[str, schema[str]]
    fields = {
        name.rstrip("!"): (typed(one), ... if name.endswith("!") else None)
        for name, one in schema.items()
    }
    config = pydantic.ConfigDict(extra="forbid", strict=True)
    return pydantic.create_model("Fields", __config__=config, **fields)


@pytest.fixture
def jobset() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DOCS / "jobset_v5e_64.yaml").read_text())
    return document


def test_jobset_has_the_fields_of_a_jobset(jobset: dict[str, Any]) -> None:
    typed(JOBSET).model_validate(jobset)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    # The longest name that is made of these, that of a pod, must be a DNS label.
    pod = f"{jobset['metadata']['name']}-{job['name']}-0-15-abcde"
    assert re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", pod)
    spec = job["template"]["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    pod_spec = spec["template"]["spec"]
    assert pod_spec["restartPolicy"] in ("Never", "OnFailure")
    (container,) = pod_spec["containers"]
    volumes = {volume["name"] for volume in pod_spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda spec: spec.pop("replicatedJobs"), "spec.replicatedJobs\n  Field required"),
        (lambda spec: spec.update(failurePolicy={"maxRestart": 0}), "maxRestart\n  Extra inputs"),
        (lambda spec: spec["replicatedJobs"][0].update(replicas=True), "should be a valid integer"),
    ],
)
def test_the_check_sees_faults(jobset: dict[str, Any], spoil: Any, fault: str) -> None:
    spoil(jobset["spec"])
    with pytest.raises(pydantic.ValidationError, match=fault):
        typed(JOBSET).model_validate(jobset)


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
