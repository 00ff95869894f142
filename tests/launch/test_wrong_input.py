"""Whatever is wrong is one sentence and status 2, before any weight is read."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from launch_types import Patch, Refused

from fly_jax.launch import serve

pytestmark = pytest.mark.usefixtures("no_weights")

Row = tuple[str, list[str], list[str]]
LLAMA, PARD = "--draft=llama-3.1-8b", "--draft=pard-llama-3.2-1b"
QWEN = [*(f"--{name}=qwen-3-8b" for name in ("target", "draft")), "--draft=dspark-qwen-3-8b"]
QWEN += ["--level_speculative_tokens=8"]
REFUSED = {
    "flags": [  # no models
        (["--rule=lucky"], ["lucky", "autoregressive", "exact", "sampled", "fly"]),
        (["--max_new_tokens=many"], ["max_new_tokens=many is no whole number"]),
        (["--batch_size=0"], ["batch_size", "0"]), (["convert", "--output=x"], ["--target"]),
        (["--seed=-1"], ["seed", "-1"]), (["convert", "--target=x"], ["--output"]),
        (["--prompt"], ["--prompt"]), (["--audit", "--json"], ["--audit needs a value", "--json"]),
        (["--json", "generate"], ["generate"]), (["calibrate", "--memory=x"], ["--prompts_file"]),
        (["train", "--mesh=8x8"], ["No --teacher"]), (["train", "--teacher=x"], ["--prompts_file"]),
        (["convert", "--target=/nowhere", "--output=x"], ["/nowhere"]),
        (["convert", "--target=x", "--output=x", "--dtype=int4"], ["dtype"]),
        (["bench", "serve", "--url=http://127.0.0.1:9"], ["127.0.0.1:9", "start the server"]),
        (["bench", "serve", "--extra_body=[]"], ["--extra_body", "JSON object"]),
        (["bench", "serve", "--concurrency=1,x"], ["--concurrency", "1,4,16"]),
    ],
    "chat": [([], ["no chat template"])],
    "train": [
        (["--head=medusa"], ["--head=medusa: value should be one of"]),
        (["--head=pard", "--num_layers=3"], ["the teacher has 2 layers"]),
        (["--temperature=-1"], ["--temperature is -1"]), (["--model=target"], ["--model"]),
        (["--prompts_file=/nowhere"], ["/nowhere"]),
    ],
    "generate": [
        (["--prompt="], ["Prompt 1", "empty"]), (["--prompt=" + "Ada " * 200], ["Prompt 1", "96"]),
        (["--prompt=x", "--prompt=\udcff"], ["Prompt 2", "Unicode"]),
        (["--prompts_file=/nowhere/prompts.txt"], ["/nowhere/prompts.txt"]),
        (["--config=/nowhere/config.toml"], ["/nowhere/config.toml"]),
        (["--prompt=x", "--chat"], ["no chat template"]),
        (["--prompt=x", "--system=Be short."], ["no prompt is a conversation"]),
    ],
    "generate x": [  # and a prompt
        (["--target=/nowhere/target"], ["/nowhere/target"]), (["--mesh=8y8"], ["8y8"]),
        (["--draft=/nowhere/draft"], ["/nowhere/draft"]), (["--draft=ngram"], ["proposes alone"]),
        (["--mesh=3x3"], ["9", "8"]), (["--rule=exact", "--temperature=0.5"], ["exact", "sampled"]),
        (["--rule=fly", "--num_speculative_tokens=6"], ["num_speculative_tokens=6", "window"]),
        (["--num_speculative_tokens=5000"], ["5000", "96"]),
        (["--draft_confidence=0.4"], ["draft_confidence is 0.4", "DSpark"]),
        (["--rule=sampled", "--temperature=0"], ["sampled", "exact"]), (["--top_p=0.5"], ["top_p"]),
        (["--rule=fly &"], ["fly &", "fly & margin"]),
        *(([f"--rule={one}"], ["joined by &"]) for one in ("fly + csd", "fly()", "")),
        (["--rule=csd", "--memory=/nowhere/memory.npz"], ["/nowhere/memory.npz"]),
        (["--rule=fly", "--memory=x"], ["--memory", "rule fly", "csd"]),
        (["--rule=csd", "--nocsd_memory", "--memory=x"], ["--memory", "csd", "leave"]),
        (["--rule=margin", "--update_memory"], ["--update_memory", "margin"]),
        (["--rule=csd", "--update_memory"], ["give --memory as well"]),
        (["--rule=csd", "--update_memory", "--memory=x", "--nocsd_online"], ["--csd_online"]),
        (["--rule=csd", "--csd_min_count=-1"], ["csd_min_count"]),
        (["--rule=lossy", "--lossy_threshold=0.7"], ["lossy_threshold", "0.5"]),
        (["--audit=/nowhere/audit.jsonl"], ["/nowhere/audit.jsonl", "cannot be written"]),
        (["--audit=FOLDER/prompts.txt"], ["no audit"]), (["--audit=FOLDER"], ["cannot be written"]),
        (["--noaudit_exact"], ["--audit"]),
    ],
    "plan": [
        (["--rule=autoregressive"], ["autoregressive", "every plan"]),
        (["--rule=fly", "--num_speculative_tokens=3"], ["window_size=6"]),
        (["--prompt_lookup_max=-1"], ["prompt_lookup_max is -1"]),
        (["--chip=v9"], ["no chip 'v9'", "v5e", "h200"]),
        (["--mesh=3x3"], ["mesh 3x3 needs 9 chips", "64"]), (["--draft=llama-2-7b"], ["vocabular"]),
        (["--target=llama-9"], ["no preset 'llama-9'", "llama-3.1-405b"]),
        (["--context=200000"], ["context is 200000", "131072"]),
        (["--prompt_length=8192"], ["8192", "context"]),
        (["--mean_accepted_tokens=30"], ["30", "1 to 26"]),
    ],
    "plan 70b": [  # for eight GPUs
        ([PARD, LLAMA, "--level_accepted_tokens=2"], ["pard_token"]),
        (["--draft=llama-3.2-1b", PARD], ["gives 1 to 5 tokens"]),
        ([LLAMA, PARD, "--level_accepted_tokens=6"], ["gives 1 to 5 tokens"]),
        ([LLAMA, PARD, "--level_accepted_tokens=0.5"], ["gives 1 to 5 tokens"]),
        (["--draft=self:int4", PARD, "--level_accepted_tokens=4"], ["propose alone"]),
        (["--target=eagle3-llama-3.1-8b"], ["The target is a head"]),
        (["--context=64", "--prompt_length=64"], ["it needs 1 to 63"]),
        (QWEN, ["level_speculative_tokens is 8", "at most 7 tokens"]),
    ],
    "evaluate": [
        (["--decode=fly truncate=margin"], ["truncate", "autoregressive or sampled"]),
        (["--decode=exact truncate=margin temperature=0"], ["truncate", "temperature"]),
        (["--decode=sampled truncate=csd"], ["truncate", "memory"]),
        (["--decode=sampled truncate=exact"], ["truncate", "loosened"]),
        (["--tasks=humanevil"], ["humanevil", "humaneval"]),
        (["--tasks=gsm8k"], ["gsm8k", "--data"]), (["--tasks=mbpp"], ["--allow_code_execution"]),
        (["--tasks=gsm8k", "--data=FOLDER"], ["gsm8k", "test.jsonl"]),
        (["--margin=0"], ["margin", "above 0"]),
    ],
    "bench": [
        (["--decode=exact:two"], ["exact:two", "whole numbers or auto"]),
        (["--decode=exakt:2"], ["exakt"]), (["--picture=nowhere/speed.svg"], ["nowhere", "folder"]),
        (["--decode=fly:2"], ["window"]), (["--decode=margin:2 margin_gab=1"], ["margin_gab"]),
        (["--decode=margin:2 margin_gap=x"], ["margin_gap", "'x'"]),
        (["--picture=speed.xyz"], ["speed.xyz", ".svg"]),
    ],
    "serve": [
        (["--num_slots=0"], ["num_slots"]), (["--rules=nonsense"], ["there is no rule 'nonsense'"]),
        (["--max_length=97"], ["at most 96, the target's context"]), (["--rules=csd"], ["memory"]),
        (["--prompt_lookup_earlier=64"], ["prompt_lookup_earlier is 64", "keeps no answers"]),
        (["--num_speculative_tokens=auto", "--rule=fly", "--window_size=20"], ["window_size=20"]),
        (["--window_size=9", "--rules=fly"], ["window_size=9"]), (["--api_key= "], ["is empty"]),
        (["--request_timeout=0"], ["--request_timeout is 0.0"]), (["--port=70000"], ["port"]),
        (["--host=no.such.host.invalid"], ["cannot listen on no.such.host.invalid"]),
        (["--memory=x"], ["no flag --memory"]),
    ],
    "gate": [  # that calibrate looks for
        (["--max_disagreement=0"], ["max_disagreement is 0", "0.02"]),
        (["--max_regret=-1"], ["max_regret is -1", "nats"]),
        ([], ["--max_disagreement or --max_regret"]),
        (["--max_disagreement=0.1", "--max_regret=0.1"], ["either"]),
        (["--max_regret=0.1", "--memory=x"], ["either --memory or --gate"]),
        (["--max_regret=0.1", "--rule=exact"], ["exact", "margin"]),
        (["--max_regret=0.1", "--rule=fly | csd"], ["fly | csd"]),
        (["--max_regret=0.1", "--window_size=6"], ["window_size=6"]),
        (["--max_regret=0.1", "--num_speculative_tokens=3"], ["window_size=4"]),
        (["--max_regret=0.1", "--gate=/nowhere/found.toml"], ["/nowhere/found.toml"]),
        (["--max_regret=0.1", "--gate=found.json"], ["found.json", ".toml"]),
        (["--max_regret=0.1", "--gate=FOLDER/there.toml"], ["there already"]),
    ],
}  # fmt: skip
PROMPTS = "".join(f"Ada has {number} apples\n" for number in range(12))


@pytest.fixture
def begun(models: list[str], tmp_path: Path) -> dict[str, list[str]]:
    """How the commands begin that have the flags above."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    (tmp_path / "there.toml").touch()
    serving = ["--num_speculative_tokens=4", "--rule=margin", "--num_slots=2", "--port=0"]
    gate = [f"--prompts_file={tmp_path / 'prompts.txt'}", f"--gate={tmp_path / 'found.toml'}"]
    return {
        "flags": [], "chat": ["chat", *models],
        "train": ["train", models[0].replace("target", "teacher", 1), gate[0]], "generate": models,
        "generate x": [*models, "--prompt=x"], "plan": ["plan"],
        "plan 70b": ["plan", "--chip=h200", "--mesh=8", "--target=llama-3.1-70b"],
        "evaluate": ["evaluate", *models, f"--output={tmp_path / 'out'}"],
        "bench": ["bench", *models], "serve": ["serve", *models, *serving, "--prefill_chunk=32"],
        "gate": ["calibrate", *models, *gate, "--num_speculative_tokens=6"],
    }  # fmt: skip


@pytest.mark.parametrize("row", [(kind, *row) for kind, rows in REFUSED.items() for row in rows])
def test_flags(refused: Refused, begun: dict[str, list[str]], tmp_path: Path, row: Row) -> None:
    kind, flags, words = row
    refused(*begun[kind], *(one.replace("FOLDER", str(tmp_path)) for one in flags), words=words)
    assert (tmp_path / "prompts.txt").read_text() == PROMPTS, "it was written over"
    assert not (tmp_path / "out").exists()


NO_LIST = ['"Hello"', "[]", '[{"role": "user"}]', '[{"role": "user", "content": 3}]']
NO_LIST += ['[["user", "Hello"]]']
LINES: dict[bytes, list[str]] = {
    b'{"messages": %s}' % one.encode(): ["line 1 has messages that are not a list"]
    for one in NO_LIST
} | {
    b'{"prompt": "a"}\n\n{"prompt": \n': ["line 3", "JSON"],
    b'{"prompt": "a"}\n{"prompt": "\xff"}\n': ["line 2", "UTF-8"],
    b'{"prompt": "a"}\n{"text": "b"}\n': ["line 2", "prompt"],
    b'{"prompt": "a"}\n["b"]\n': ["line 2", "prompt"],
    b'{"prompt": "a"}\n{"prompt": 3}\n': ["line 2", "prompt"],
    b'{"prompt": ""}\n': ["line 1", "empty"], b'{"prompt": "\\ud800"}\n': ["line 1", "Unicode"],
    b"a\n\xe9\n": ["line 2", "UTF-8"], b"\n \n": ["no prompt"],
}  # fmt: skip


@pytest.mark.parametrize("content", LINES)
def test_lines_of_a_prompts_file(
    refused: Refused, models: list[str], tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    refused(*models, f"--prompts_file={file}", words=[str(file), *LINES[content]])


def test_serve(refused: Refused, models: list[str], monkeypatch: Patch) -> None:
    """Where its port is taken, and without the extra."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [f"cannot listen on 127.0.0.1, port {port}"]
        refused("serve", *models, "--rule=margin", f"--port={port}", words=words)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    refused("serve", *models, words=["pip install 'fly_jax[serve]'"])


def test_broken_or_missing_draft(refused: Refused, models: list[str], tmp_path: Path) -> None:
    """Truncated weights, and a vocabulary that is not the target's."""
    target, good, _ = models
    draft = shutil.copytree(good.partition("=")[2], tmp_path / "draft")
    flags = [target, f"--draft={draft}", "--prompt=x"]
    weights = draft / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(*flags, words=["model.safetensors"])
    weights.write_bytes(whole)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    refused(*flags, words=["300"])
    # The same below a good draft, and before any weight is read.
    refused(target, good, *flags[1:], words=["300"])
    refused(*flags, "--level_speculative_tokens=0", words=["at least 1"])
    refused(*flags, "--boundary=sometimes", words=["defer"])
    refused(target, "--prompt=x", "--rule=exact", words=["--draft"])
    refused("bench", target, "--decode=exact:2", words=["exact", "--draft"])
