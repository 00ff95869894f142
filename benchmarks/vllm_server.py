"""`vllm serve` with the plugin, on a CPU: does it answer an OpenAI client, and how does it refuse?

    pip install vllm-tpu==0.32.0 && pip install -e .
    python benchmarks/vllm_server.py

The embedded pair with FLy; what the engine lacks without a TPU is stood in for by
`vllm_stand_ins.py`, in each of the server's processes. Speeds would say nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import vllm_stand_ins
from machine import run, write

from fly_jax.models.checkpoints.source import EMBEDDED_PAIR

_TARGET, _DRAFT = map(str, EMBEDDED_PAIR)
_MODEL = {"method": "draft_model", "model": _DRAFT, "num_speculative_tokens": 15}
_PROMPT, _LIMIT, _PATIENCE = "import os\n\ndef main():\n", 64, 900
_COUNTERS = ("accepted_tokens", "rescued_tokens")


def _command(port: int, fly_jax: dict[str, Any]) -> list[str]:
    arguments = {
        "port": port,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 256,
        "speculative-config": json.dumps(_MODEL),
        "additional-config": json.dumps(vllm_stand_ins.SHARDING | {"fly_jax": fly_jax}),
        **{name.replace("_", "-"): value for name, value in vllm_stand_ins.ENGINE.items()},
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", _TARGET, *flags]


def _environment(folder: Path) -> dict[str, str]:
    """Python runs `sitecustomize` first, in each process."""
    site, counters = folder / "site", folder / "counters"
    site.mkdir()
    counters.mkdir()
    (site / "sitecustomize.py").write_text("import vllm_stand_ins; vllm_stand_ins.install()\n")
    paths = [str(site), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PROMETHEUS_MULTIPROC_DIR": str(counters),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(_PATIENCE):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except (urllib.error.URLError, OSError):
            if server.poll() is not None:
                sys.exit("The server ended; its output is in vllm_server.log.")
            time.sleep(1)
        else:
            return
    sys.exit(f"The server did not answer within {_PATIENCE} s.")


def _asked(port: int) -> dict[str, Any]:
    """Answers that a client gets: FLy, one request that is exact, and one with a wrong rule."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    def complete(rule: dict[str, Any] | None) -> str:
        extra = None if rule is None else {"vllm_xargs": {"fly_jax": json.dumps(rule)}}
        answer = client.completions.create(
            model=_TARGET, prompt=_PROMPT, max_tokens=_LIMIT, temperature=0, extra_body=extra
        )
        return answer.choices[0].text

    found: dict[str, Any] = {"fly": complete(None), "exact": complete({"rule": "exact"})}
    try:
        complete({"rule": "margin"})
    except openai.BadRequestError as error:
        found["refused"] = error.body["message"] if isinstance(error.body, dict) else str(error)
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    for line in metrics.splitlines():
        for name in _COUNTERS:
            if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                found[name] = found.get(name, 0) + float(line.rsplit(" ", 1)[1])
    return found


def _exact_text() -> str:
    """The continuation of the prompt by fly_jax's own engine."""
    import fly_jax

    pair = fly_jax.load_pair(_TARGET)
    (one,) = fly_jax.generate(pair, [_PROMPT], rule="autoregressive", max_new_tokens=_LIMIT)
    return pair.tokenizer.decode(one.token_ids, continues=True)


def main() -> None:
    versions = vllm_stand_ins.versions("vllm-tpu", "tpu-inference")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, Path("vllm_server.log").open("wb") as log:
        environment = _environment(Path(folder))
        command = _command(port, {"rule": "fly"})
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait(port, server)
            found = _asked(port)
        finally:
            server.terminate()
            server.wait()
        refused = subprocess.run(
            _command(port, {"rule": "flie"}), env=environment, capture_output=True, text=True
        )
    found |= {
        "as_fly_jax": found["exact"] == _exact_text(),
        "wrong_setting": refused.stderr.splitlines()[-1],
        "wrong_setting_status": refused.returncode,
    }
    print(json.dumps(found, indent=2))
    print(write("vllm_server", {**versions, "answers": found}))


if __name__ == "__main__":
    run(main)
