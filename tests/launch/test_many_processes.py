"""Several processes on this machine, over Gloo: the same tokens, and no end without a word."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import decode_together
import httpx
import jax
import numpy as np
import pytest
from launch_types import Decoded, Folders, Patch, Refused
from local_processes import PATIENCE, Job

from fly_jax.decoding.pair import load_pair
from fly_jax.launch import crash_handler
from fly_jax.launch.__main__ import main
from fly_jax.launch.crash_handler import lost_processes
from fly_jax.models.tokenizer import Tokenizer
from fly_jax.sharding import processes

SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2", "--json"]
HOST = socket.gethostname()
Results = dict[str, list[list[object]]]


@pytest.fixture(scope="module")
def alone(tiny_pair: Folders) -> Results:
    return decode_together.results(load_pair(*tiny_pair, dtype="float32"))


def test_tokens_are_those_of_one(tiny_pair: Folders, alone: Results, tmp_path: Path) -> None:
    """Of four processes with a device each, between which both axes of the mesh lie."""
    target, draft = tiny_pair
    arguments = [f"--target={target}", f"--draft={draft}", "--mesh=2x2", f"--folder={tmp_path}"]
    job = Job(tmp_path, *arguments, program=[decode_together.__file__], number=4)
    assert job.statuses() == [0] * 4, job.err(0)
    assert len({rounds for *_, rounds in alone["fly"]}) > 1, "all rows end at once"
    for index in range(4):
        assert json.loads((tmp_path / f"results_{index}.json").read_text()) == alone


def test_process_0_reads_and_is_heard(models: list[str], tmp_path: Path, of_pair: Decoded) -> None:
    """Rows over two processes, each of which has two devices for them."""
    prompts = ["Ada has 3 apples", "Boris", "Vera's"]
    expected = of_pair(*SIZES, *(f"--prompt={prompt}" for prompt in prompts))
    audit = tmp_path / "audit.jsonl"
    mesh = ["--mesh=data=2,x=2", "--batch_size=2"]
    arguments = [*models, *SIZES, "--prompts_file=-", *mesh, f"--audit={audit}"]
    job = Job(tmp_path, *arguments, stdin="\n".join(prompts))
    assert job.statuses() == [0, 0], job.err(0) + job.err(1)
    found = [json.loads(line) for line in job.out(0).splitlines()]
    for one, other in zip(expected, found, strict=True):
        assert other.pop("tokens_per_second") > 0
        assert other == {name: one[name] for name in other}
    assert "4 simulated devices (CPU) as mesh data=2,x=2 over 2 processes" in job.err(0)
    assert job.out(1) == job.err(1) == ""
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    texts = [one["prompt_text"] for one in events if one["event"] == "prompt"]
    assert texts == prompts


def test_they_fill_one_memory(models: list[str], tmp_path: Path) -> None:
    models = [one for one in models if not one.startswith("--dtype")]  # which is then found out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Ada has {number} apples\n" for number in range(8)))
    arguments = ["calibrate", *models, f"--prompts_file={prompts}", *SIZES[:2], "--batch_size=4"]
    assert main([*arguments, f"--memory={tmp_path / 'alone.npz'}"]) == 0
    job = Job(tmp_path, *arguments, f"--memory={tmp_path / 'both.npz'}", "--mesh=1x2")
    assert job.statuses() == [0, 0], job.err(0) + job.err(1)
    assert job.err(1) == ""
    files = [np.load(tmp_path / name) for name in ("alone.npz", "both.npz")]
    for name in ("pairs", "counts"):
        assert files[0][name].tolist() == files[1][name].tolist()


def test_process_0_serves_for_all(
    models: list[str], tokenizer: Tokenizer, alone: Results, tmp_path: Path
) -> None:
    arguments = ["serve", *models, *SIZES[1:3], "--rule=fly", "--rules=margin", "--mesh=1x2"]
    arguments += ["--num_slots=2", "--max_length=64", "--prefill_chunk=32", "--port=0"]
    job = Job(tmp_path, *arguments)
    try:
        job.wait_for(job.err, "Ready on ")
        url = re.findall(r"http://[\d.]+:\d+", job.err(0))[-1] + "/v1/completions"
        texts = decode_together.PROMPTS
        asked = {"max_tokens": decode_together.MAX_NEW_TOKENS, "temperature": 0}
        with concurrent.futures.ThreadPoolExecutor() as clients:  # more than there are slots
            fly = clients.map(lambda text: _reply(url, asked | {"prompt": text}), texts)
            given = asked | {"fly": {"rule": "exact"}}
            exact = clients.map(lambda text: _reply(url, given | {"prompt": text}), texts)
            own = asked | {"prompt": "Ada", "temperature": 0.7, "seed": 3, "top_k": 9}
            own |= {"stop": ["zzz"], "fly": {"rule": "margin", "risk_budget": 1.5}}
            other = clients.submit(_reply, url, own)
            stream = {"prompt": "Ada", "max_tokens": 60, "stream": True}
            with httpx.stream("POST", url, json=stream, timeout=PATIENCE) as reply:
                next(reply.iter_lines())  # and leaves: the request is cancelled
        for name, found in (("fly", fly), ("exact", exact)):
            for text, (ids, *_) in zip(found, alone[name], strict=True):
                assert text == tokenizer.decode(ids, continues=True)
        assert other.result()
        for process in job.processes:  # as where machines are taken back
            process.send_signal(signal.SIGTERM)
        assert job.statuses() == [0, 0], job.err(0) + job.err(1)
        assert "Stopping" in job.err(0)
        assert job.err(1) == ""
    finally:
        job.end()


def _reply(url: str, asked: dict[str, object]) -> str:
    reply = httpx.post(url, json=asked, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@pytest.fixture(scope="module", autouse=True)
def bereaved(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Job]]:
    """Two jobs, of which one process was killed in the middle of decoding.

    JAX misses it after half a minute, in which the other tests of this file run. Without a draft
    they compile half as much.
    """
    target, _, dtype = models
    arguments = [target, dtype, "--rule=autoregressive", "--json", "--mesh=1x2"]
    jobs = []
    for victim in range(2):
        folder = tmp_path_factory.mktemp(f"victim_{victim}")
        prompts = folder / "prompts.txt"
        prompts.write_text("".join(f"Ada has {number} apples\n" for number in range(3_000)))
        job = Job(folder, *arguments, f"--prompts_file={prompts}")
        jobs.append(job)
        job.wait_for(job.out)
        job.processes[victim].send_signal(signal.SIGKILL)
    yield jobs
    for job in jobs:
        job.end()


class Service:
    """The coordination service, as one of two processes sees it.

    The other has said what is given, and all is well there where nothing is.
    """

    def __init__(self, heard: Mapping[str, str]) -> None:
        self.heard, self.said = heard, dict[str, str]()

    def key_value_set(self, key: str, value: str) -> None:
        self.said[key] = value

    def blocking_key_value_get(self, key: str, _: int) -> str:
        of_each_process = key.count("/") == 3
        other = [HOST, None] if of_each_process else {"max_new_tokens": 128}
        return self.said.get(key) or self.heard.get(key, json.dumps(other))


WRONG = {
    "--prompts_file=/nowhere/prompts.txt": (0, "The prompts file /nowhere/prompts.txt"),
    "--max_new_tokens=7": (1, "--max_new_tokens is 7 here and 128 on process 0"),
    "--draft=/nowhere/draft": (1, "'/nowhere/draft' is neither a folder that exists"),
}


@pytest.mark.parametrize("flag", WRONG)
def test_what_is_wrong_on_one_of_them(
    models: list[str], refused: Refused, monkeypatch: Patch, flag: str
) -> None:
    """It ends them all with the same sentence: the other one hears what this one has said."""
    wrong, words = WRONG[flag]
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    monkeypatch.setattr(crash_handler, "install", lambda *_: SimpleNamespace(connected=list))

    def sentence(process: int, heard: Mapping[str, str], *flags: str) -> tuple[str, dict[str, str]]:
        service = Service(heard)
        state = SimpleNamespace(num_processes=2, process_id=process, client=service)
        monkeypatch.setattr(processes, "distributed", SimpleNamespace(global_state=state))
        monkeypatch.setattr(processes, "_turns", itertools.count())
        place = [
            "--coordinator_address=127.0.0.1:8476", "--num_processes=2", f"--process_id={process}",
        ]  # fmt: skip
        given = [] if "--prompts_file" in flag else ["--prompt=x"]
        return refused(models[0], *given, *place, "--mesh=1x2", *flags), service.said

    here, said = sentence(wrong, {}, flag)
    assert here.startswith(f"Process {wrong} ({HOST}): {words}")
    well = {"--max_new_tokens=7": [], "--draft=/nowhere/draft": [models[1]]}.get(flag, [flag])
    there, _ = sentence(1 - wrong, said, *well)
    assert there == here


@pytest.fixture(scope="module", autouse=True)
def lonely(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Job]]:
    """Two jobs of one process, which wait while the other tests of this file run.

    Nobody comes to process 0, and nobody answers process 1.
    """
    arguments = [*models, "--prompt=x", "--mesh=1x2", "--coordinator_timeout=3"]
    jobs = [Job(tmp_path_factory.mktemp("lonely"), *arguments, absent=one) for one in (1, 0)]
    yield jobs
    for job in jobs:
        job.end()


@pytest.mark.parametrize("index", [0, 1])
def test_others_that_do_not_come(lonely: list[Job], index: int) -> None:
    job = lonely[index]
    assert job.statuses() == [2]
    address = next(one for one in job.processes[0].args if "coordinator_address" in one)
    assert f"have not all met at {address.partition('=')[2]} within 3 seconds" in job.err(index)
    assert job.err(index).count("\n") == 1
    assert job.out(index) == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_stops_the_other(bereaved: list[Job], victim: int) -> None:
    """Where the other one waits for it."""
    job = bereaved[victim]
    statuses = job.statuses()
    survivor = 1 - victim
    assert (statuses[victim], statuses[survivor]) == (-signal.SIGKILL, 1)
    sentence = job.err(survivor).splitlines()[-1]
    beginning = f"Process {survivor} of 2 stops, since process {victim} ({HOST}) is gone"
    assert sentence.startswith(beginning)
    said = [line for line in job.err(survivor).splitlines() if "simulated devices" not in line]
    assert said == [sentence]
    kept = Path(sentence.rpartition("(")[2].split()[0])
    assert kept.parent == job.folder
    assert "coordination" in kept.read_text()


MESSAGES = {
    "killed": (
        "E1121 17:05:29 coordination_service.cc:1549] UNAVAILABLE: The following tasks are "
        "unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed. Check the task logs",
        {1},
    ),
    "two killed": (
        "absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending "
        "heartbeats):\n2\n13\nThe tasks have crashed.",
        {2, 13},
    ),
    "left alone": (
        "DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::42::0.\n# of tasks that reached the "
        "barrier: 1/2.\nThe first task at the barrier: 3. Some timed out task names:\n1\n",
        {3},
    ),
    "process 0 killed": (
        "absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either the leader "
        "task was preempted/died/restarted unexpectedly",
        {0},
    ),
    "process 0 silent": (
        "F1121 18:04:55 client.h:80] absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: "
        "/xla.coordination.CoordinationService/Heartbeat\n*** Check failure stack trace: ***",
        {0},
    ),
    "something else": ("F1121 18:04:55 client.h:80] Check failed: a == b", set()),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_lost_processes(name: str) -> None:
    native, lost = MESSAGES[name]
    assert lost_processes(native) == lost
