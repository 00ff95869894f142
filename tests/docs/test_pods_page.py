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
from fly_jax.sharding.mesh import MeshSpec, parse_mesh

DOCS = Path(__file__).parents[2] / "docs"

# The fields of each kind of object on the way from a JobSet (jobset.x-k8s.io/v1alpha2) over a Job
# (batch/v1) to a container (v1): those of the API server that are used, and no others, since one by
# another name is refused there. "!" marks what must be given.
METADATA: dict[str, Any] = {"name": str, "annotations": {str: str}}
CONTAINER = {"name!": str, "image!": str, "command": [str], "args": [str]}
CONTAINER |= {"ports": [{"containerPort!": int}]}
CONTAINER |= {"resources": {"requests": {str: int}, "limits": {str: int}}}
CONTAINER |= {"volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}]}
CLAIM = {"claimName!": str, "readOnly": bool}
POD = {"containers!": [CONTAINER], "volumes": [{"name!": str, "persistentVolumeClaim": CLAIM}]}
POD |= {"nodeSelector": {str: str}, "restartPolicy!": str}  # a Job's may not be Always, the default
JOB = {"completionMode": str, "parallelism": int, "completions": int, "backoffLimit": int}
JOB |= {"template!": {"metadata": METADATA, "spec!": POD}}
JOBS = {"name!": str, "replicas": int, "template!": {"metadata": METADATA, "spec!": JOB}}
SPEC = {"network": {"enableDNSHostnames": bool}, "failurePolicy": {"maxRestarts": int}}
SPEC |= {"replicatedJobs!": [JOBS]}
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
    return pydantic.create_model("Fields", __config__={"extra": "forbid", "strict": True}, **fields)


@pytest.fixture
def jobset() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DOCS / "jobset_v5e_64.yaml").read_text())
    return document


def test_jobset_is_a_jobset_of_one_slice(jobset: dict[str, Any]) -> None:
    typed(JOBSET).model_validate(jobset)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    # The longest name that is made of these, that of a pod, must be a DNS label.
    name = f"{jobset['metadata']['name']}-{job['name']}-0-15-abcde"
    assert re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    spec = job["template"]["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    # The pods, the chips of each, the topology and the mesh are those of one v5e-64.
    assert job["replicas"] == 1
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["requests"]["google.com/tpu"] == chips
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == chips * spec["parallelism"] == 64
    assert container["command"] == ["python", "-m", "fly_jax.launch"]
    assert mesh_of(container["args"]).num_devices == 64


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"replicatedJobs": None}, "spec.replicatedJobs\n  Field required"),
        ({"failurePolicy": {"maxRestart": 0}}, "maxRestart\n  Extra inputs"),
        ({"replicatedJobs": [{"replicas": True}]}, "should be a valid integer"),
    ],
)
def test_the_check_sees_faults(jobset: dict[str, Any], changes: dict, fault: str) -> None:
    spec = {name: one for name, one in (jobset["spec"] | changes).items() if one is not None}
    with pytest.raises(pydantic.ValidationError, match=fault):
        typed(JOBSET).model_validate(jobset | {"spec": spec})


def mesh_of(arguments: list[str]) -> MeshSpec:
    """The mesh of a command: a flag that it lacks is an error."""
    return parse_mesh(Flags("generate", GenerateFlags).parse(arguments, "").mesh)


def test_slurm_script_and_typed_commands() -> None:
    """Bash reads it, it has a task for each GPU, and each command takes its flags."""
    script = DOCS / "slurm_gpus.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    words = shlex.split(text[text.index("srun") :].replace("\\\n", " "))
    mesh = mesh_of(words[words.index("fly_jax.launch") + 1 :])
    assert mesh.num_devices == int(asked["nodes"]) * int(asked["gpus-per-node"])
    page = (DOCS / "pods.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"-m fly_jax\.launch ([^\"\n`&]*)", page)
    assert len(commands) == 3
    for command in commands:
        mesh_of(shlex.split(command))
