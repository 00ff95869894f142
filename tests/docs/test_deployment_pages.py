"""docs/serving.md, docs/pods.md and the dashboard name what there is, as it is expected there.

What pods are launched with has the form of GKE, Slurm and fly_jax; the page at / stands alone.
"""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.engine.depth_costs import DepthCosts
from fly_jax.engine.slots import Slots
from fly_jax.launch import serve
from fly_jax.launch.flags import Flags
from fly_jax.launch.generate import GenerateFlags
from fly_jax.serving.http.app import HEADERS, page
from fly_jax.serving.http.limits import ServerLimits
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.serving.http.protocol import ChatRequest, CompletionRequest, FlyFields
from fly_jax.sharding.mesh import MeshSpec, parse_mesh
from fly_jax.verification.rules import VLLM_NAMES, Exact

_ROOT = Path(__file__).parents[2]
DOCS = _ROOT / "docs"
_PAGE = (DOCS / "serving.md").read_text(encoding="utf-8")
_NAME = re.compile(r"fly_jax:\w+")


def samples() -> set[str]:
    """The names of all samples, and of histograms without their endings."""
    spec = RoundSpec(Exact(), RoundStatic(2, depths=(0, 2)))
    engine: Any = SimpleNamespace(spec=spec, slots=Slots((1,)), num_waiting=0)
    engine.costs = DepthCosts((0, 2))
    text = ServerMetrics(engine).text().decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)", text, re.MULTILINE)
    assert len(families) > 20
    endings = {"counter": ("",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
    return {name + ending for name, kind in families for ending in endings[kind]}


def test_the_page_and_the_dashboard_have_every_metric() -> None:
    """And no others."""
    metrics = samples()
    listed = set(re.findall(r"^\| `(fly_jax:\w+)`", _PAGE, re.MULTILINE))
    endings = ("_created", "_bucket", "_sum", "_count")
    assert listed == {name for name in metrics if not name.endswith(endings)}
    board = json.loads((_ROOT / "configs" / "grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    asked = {name for query in queries for name in _NAME.findall(query)}
    assert {name for name in metrics if name.endswith("_total")} <= asked <= metrics
    assert all(query.count("(") == query.count(")") for query in queries)
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_flags_and_fields_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    flags = re.findall(r"^  --([a-z_]+)", capsys.readouterr().out, re.MULTILINE)
    # Other tools have flags of their own.
    ours = re.sub(r"^## Other tools\n.*?(?=^## )", "", _PAGE, flags=re.MULTILINE | re.DOTALL)
    assert ours != _PAGE
    named = set(re.findall(r"--([a-z_]+)", ours))
    assert {"num_slots", "max_queue", "grace_period"} <= named <= set(flags)
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, "stream_options"}
    taken = _PAGE[_PAGE.index("Taken are") : _PAGE.index("The i-th of")]
    assert set(re.findall(r"`([a-z_]+)[`.]", taken)) <= fields
    own = _PAGE[_PAGE.index("## The field `fly`") : _PAGE.index("All rules that requests")]
    found = re.findall(r"^\| `(\w+)`|`([a-z]+_[a-z_]+)`", own, re.MULTILINE)
    assert {"".join(names) for names in found} <= {*FlyFields.model_fields, *VLLM_NAMES}
    flags, limits = serve.ServeFlags, ServerLimits()
    assert (limits.max_queue, limits.max_body) == (flags.max_queue, flags.max_body)


def test_the_page_at_the_root_stands_by_itself() -> None:
    before, script, after = re.split("</?script>", page())
    links = re.findall(r"""\b(?:src|href|action)\s*=\s*["']?([^"'\s>]*)""", before + after)
    assert links == ["data:,"]
    ids = re.findall(r'\bid="(\w+)"', before + after)
    assert len(set(ids)) == len(ids) == (before + after).count(" id=")
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= set(ids)
    assert "http" not in script
    assert "innerHTML" not in script  # what a model writes is text
    for kind in ("matched", "rescued", "corrected", "bonus"):
        assert f'"{kind}": {{"letter"' in script
    assert "--r-back" in page()
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]


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


def fits(schema: Any, value: Any) -> bool:
    """Whether a value is what a schema allows, with all that must be given and nothing else."""
    if isinstance(schema, type):
        return type(value) is schema
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(schema[0], one) for one in value)
    if list(schema) == [str]:
        return all(type(key) is str and fits(schema[str], one) for key, one in value.items())
    types = {name.rstrip("!"): one for name, one in schema.items()}
    given = all(name.rstrip("!") in value for name in schema if name.endswith("!"))
    return given and all(key in types and fits(types[key], one) for key, one in value.items())


@pytest.fixture
def jobset() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DOCS / "jobset_v5e_64.yaml").read_text())
    return document


def test_jobset_is_a_jobset_of_one_slice(jobset: dict[str, Any]) -> None:
    assert fits(JOBSET, jobset)
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
