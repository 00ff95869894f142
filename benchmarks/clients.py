"""Published clients against a live server: an evaluation by lm-eval, and a load by guidellm.

    pip install 'lm-eval[api]' guidellm    # in environments of their own
    python -m fly_jax.launch serve
    python benchmarks/clients.py --lm_eval .../bin/lm_eval --guidellm .../bin/guidellm

Word problems are read from local files, so that nothing is fetched. A server whose model has a chat
template is evaluated as a chat too. The results of each model are kept beside those of others.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
from absl import flags
from machine import RESULTS, describe, run
from texts import word_problems

_URL = flags.DEFINE_string("url", "http://localhost:8000", "of the server")
_LM_EVAL = flags.DEFINE_string("lm_eval", "lm_eval", "the command")
_GUIDELLM = flags.DEFINE_string("guidellm", "guidellm", "the command")
_NUMBER = flags.DEFINE_integer("num_problems", 24, "to ask", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 160, "of an answer", lower_bound=1)
_CLIENTS = flags.DEFINE_integer("clients", 4, "at a time", lower_bound=1)

_TASK = r"""
task: word_problems
dataset_path: json
dataset_kwargs: {data_files: {test: problems.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n\n"], max_gen_toks: %d, temperature: 0}
filter_list:
  - name: last_number
    filter: [{function: regex, regex_pattern: '(-?\d+)', group_select: -1}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
_MODELS = {"/v1/completions": "local-completions", "/v1/chat/completions": "local-chat-completions"}


def _run(folder: Path, *command: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env={**os.environ, **offline}, check=True)


def _evaluated(folder: Path, model: str, path: str) -> dict[str, Any]:
    """Scores by lm-eval at an endpoint."""
    output = folder / _MODELS[path]
    arguments = (
        f"model={model},base_url={_URL.value}{path},tokenizer_backend=None,"
        f"num_concurrent={_CLIENTS.value}"
    )
    command = [_LM_EVAL.value, "run", "--model", _MODELS[path], "--model_args", arguments]
    command += ["--tasks", "word_problems", "--include_path", ".", "--output_path", str(output)]
    if "chat" in path:
        command.append("--apply_chat_template")
    _run(folder, *command)
    (file,) = output.rglob("results_*.json")
    found = json.loads(file.read_text())
    result = found["results"]["word_problems"]
    return {
        "lm_eval": found["lm_eval_version"],
        "model": _MODELS[path],
        "num_problems": found["n-samples"]["word_problems"]["effective"],
        "exact_match": result["exact_match,last_number"],
    }


def _loaded(folder: Path) -> dict[str, Any]:
    """Load and latencies by guidellm."""
    _run(
        folder, _GUIDELLM.value, "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={_URL.value},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={_CLIENTS.value}",
        "--constraint", f"kind=max_requests,count={_NUMBER.value}",
        "--data", "kind=json_file,path=load.jsonl",
        "--output", "kind=json,path=guidellm.json",
    )  # fmt: skip
    report = json.loads((folder / "guidellm.json").read_text())
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    medians = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    return {
        "guidellm": report["metadata"]["guidellm_version"],
        "clients": _CLIENTS.value,
        "requests": metrics["request_totals"],
        "output_tokens": metrics["output_token_count"]["successful"]["total_sum"],
        "output_tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
        **{f"median_{name}": metrics[name]["successful"]["median"] for name in medians},
    }


def main() -> None:
    (model,) = httpx.get(f"{_URL.value}/v1/models").json()["data"]
    name, problems = model["id"], word_problems("held_out", _NUMBER.value)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "word_problems.yaml").write_text(_TASK % _NEW_TOKENS.value)
        for file, rows in {
            "problems": [{"prompt": one.prompt, "answer": one.answer} for one in problems],
            # Of mixed lengths, which the load generator demands with ignore_eos.
            "load": [
                {"prompt": one.prompt, "output_tokens_count": (16, 48, 96)[index % 3]}
                for index, one in enumerate(problems)
            ],
        }.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{file}.jsonl").write_text(lines)
        paths = list(_MODELS) if model["fly"]["has_chat_template"] else ["/v1/completions"]
        result = {
            "machine": describe(),
            "rule": model["fly"]["rule"],
            "evaluated": [_evaluated(folder, name, path) for path in paths],
            "loaded": _loaded(folder),
        }
    path = RESULTS / "clients.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {name: result}, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
