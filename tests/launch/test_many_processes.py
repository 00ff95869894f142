"""Several processes over Gloo: the same tokens, and no end without a word; and that of a server."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import decode_together
import httpx
import jax
import numpy as np
import pytest
from decode_together import MAX_NEW_TOKENS, PROMPTS
from launch_types import Captured, Decoded, Folders, Patch, Refused

import fly_jax
from fly_jax.decoding import pair
from fly_jax.launch import crash_handler, serve
from fly_jax.launch.__main__ import main
from fly_jax.launch.crash_handler import lost_processes
from fly_jax.serving.http.run import ServerFailed
from fly_jax.sharding import processes

# Far more than it takes, for machines that do other things as well.
PATIENCE = 300
SIZES = [f"--max_new_tokens={MAX_NEW_TOKENS}", "--num_speculative_tokens=4", "--window_size=2"]
HOST = socket.gethostname()
Alone = Callable[[str], list[dict[str, Any]]]


class Job:
    """Processes that run one command line in a folder, with files there for what they say.

    Where they meet, if several, is added to their arguments. Process 0 alone reads `stdin`.
    """

    def __init__(
        self, folder: Path, *arguments: str, program: Sequence[str] = ("-m", "fly_jax.launch"),
        stdin: str = "", number: int = 2, **variables: str,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.processes = []
        # No proxy, of which JAX would warn.
        kept = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
        environment = kept | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)} | variables
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        place = [f"--coordinator_address={address}", f"--num_processes={number}"]
        for index in range(number):
            (folder / f"in_{index}").write_text("" if index else stdin)
            own = [*place, f"--process_id={index}"] if number > 1 else []
            command = [sys.executable, *program, *arguments, *own]
            with contextlib.ExitStack() as files:
                streams = {
                    f"std{kind}": files.enter_context((folder / f"{kind}_{index}").open(mode))
                    for kind, mode in (("in", "r"), ("out", "w"), ("err", "w"))
                }
                self.processes.append(subprocess.Popen(command, env=environment, **streams))

    def out(self, index: int) -> str:
        """What a process has written to standard output."""
        return (self.folder / f"out_{index}").read_text()

    def err(self, index: int) -> str:
        """What a process has written to standard error."""
        return (self.folder / f"err_{index}").read_text()

    def wait_for(self, said: Callable[[int], str], words: str = "") -> None:
        """Until process 0 has said these words and the rest of their line."""
        for _ in range(PATIENCE * 10):
            if re.search(f"{words}.*\n", said(0)):
                return
            assert self.processes[0].poll() is None, self.err(0)
            time.sleep(0.1)
        raise AssertionError(self.err(0))

    def url(self) -> str:
        """Where a server answers, once it does."""
        self.wait_for(self.err, "Ready on ")
        return re.findall(r"http://[\d.]+:\d+", self.err(0))[-1]

    def statuses(self) -> list[int]:
        """How each process ended; whatever happens, none of them runs after this."""
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.end()

    def end(self) -> None:
        """Ends what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def alone(of_pair: Decoded) -> Alone:
    """What one process prints with a rule."""
    given = [*SIZES, *(f"--prompt={prompt}" for prompt in PROMPTS)]
    return lambda rule: of_pair(*given, f"--rule={rule}")


def test_tokens_of_each_are_those_of_one(models: list[str], alone: Alone, tmp_path: Path) -> None:
    """Through the library, which gives them to every process."""
    program = [decode_together.__file__]
    job = Job(tmp_path, *models[:2], "--mesh=1x2", f"--folder={tmp_path}", program=program)
    expected = [[one["token_ids"], one["num_rounds"]] for one in alone("fly")]
    assert job.statuses() == [0, 0], job.err(0)
    for index in range(2):
        assert json.loads((tmp_path / f"results_{index}.json").read_text()) == expected


def test_process_0_reads_and_is_heard(models: list[str], tmp_path: Path, alone: Alone) -> None:
    """Four processes with a device each, between which rows and heads lie."""
    audit, expected = tmp_path / "audit.jsonl", alone("fly")
    arguments = [*models, *SIZES, "--rule=fly", "--prompts_file=-", "--mesh=data=2,x=2", "--json"]
    arguments += ["--batch_size=2", f"--audit={audit}"]
    job = Job(tmp_path, *arguments, stdin="\n".join(PROMPTS), number=4)
    assert job.statuses() == [0] * 4, job.err(0) + job.err(1)
    for one, line in zip(expected, job.out(0).splitlines(), strict=True):
        other = json.loads(line)
        assert other.pop("tokens_per_second") > 0
        assert other == {name: one[name] for name in other}
    assert len({one["num_rounds"] for one in expected}) > 1, "all rows end at once"
    assert "4 simulated devices (CPU) as mesh data=2,x=2 over 4 processes" in job.err(0)
    assert {job.out(index) + job.err(index) for index in (1, 2, 3)} == {""}
    events = map(json.loads, audit.read_text().splitlines())
    assert [one["prompt_text"] for one in events if one["event"] == "prompt"] == PROMPTS


def test_they_fill_one_memory(models: list[str], tmp_path: Path) -> None:
    arguments = ["calibrate", *models[:2], many_prompts(tmp_path, 8)]  # its dtype is found out
    arguments += [*SIZES[:2], "--batch_size=4"]
    assert main([*arguments, f"--memory={tmp_path / 'alone.npz'}"]) == 0
    job = Job(tmp_path, *arguments, f"--memory={tmp_path / 'both.npz'}", "--mesh=1x2")
    assert job.statuses() == [0, 0], job.err(0) + job.err(1)
    assert job.err(1) == ""
    files = [np.load(tmp_path / name) for name in ("alone.npz", "both.npz")]
    for name in ("pairs", "counts"):
        assert files[0][name].tolist() == files[1][name].tolist()


def many_prompts(folder: Path, number: int) -> str:
    """The flag for a file of so many prompts."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"Ada has {index} apples\n" for index in range(number)))
    return f"--prompts_file={path}"


def test_process_0_serves_for_all(models: list[str], alone: Alone, tmp_path: Path) -> None:
    expected = {name: [one["text"] for one in alone(name)] for name in ("fly", "exact")}
    arguments = ["serve", *models, *SIZES[1:3], "--rule=fly", "--rules=margin", "--mesh=1x2"]
    arguments += ["--num_slots=2", "--max_length=64", "--prefill_chunk=32", "--port=0"]
    job = Job(tmp_path, *arguments)
    try:
        url = job.url() + "/v1/completions"

        def ask(given: dict[str, object]) -> str:
            reply = httpx.post(url, json=given, timeout=PATIENCE)
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["text"])

        asked = {"max_tokens": MAX_NEW_TOKENS, "temperature": 0}
        given = [asked | {"prompt": text} for text in PROMPTS]
        with concurrent.futures.ThreadPoolExecutor() as clients:  # more than there are slots
            fly = clients.map(ask, given)
            exact = clients.map(ask, [one | {"fly": {"rule": "exact"}} for one in given])
            own = asked | {"prompt": "Ada", "temperature": 0.7, "seed": 3, "top_k": 9}
            own |= {"stop": ["zzz"], "fly": {"rule": "margin", "risk_budget": 1.5}}
            other = clients.submit(ask, own)
            stream = {"prompt": "Ada", "max_tokens": 60, "stream": True}
            with httpx.stream("POST", url, json=stream, timeout=PATIENCE) as reply:
                next(reply.iter_lines())  # and leaves: the request is cancelled
        assert {"fly": [*fly], "exact": [*exact]} == expected
        assert other.result()
        for process in job.processes:  # as where machines are taken back
            process.send_signal(signal.SIGTERM)
        assert job.statuses() == [0, 0], job.err(0) + job.err(1)
        assert "Stopping" in job.err(0)
        assert job.err(1) == ""
    finally:
        job.end()


@pytest.fixture(scope="module", autouse=True)
def bereaved(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Job]]:
    """Two jobs, one process of each killed while decoding; JAX misses it after half a minute."""
    target, _, dtype = models
    arguments = [target, dtype, "--rule=autoregressive", "--json", "--mesh=1x2"]
    jobs = []
    for victim in range(2):
        folder = tmp_path_factory.mktemp(f"victim_{victim}")
        jobs.append(job := Job(folder, *arguments, many_prompts(folder, 3_000)))
        job.wait_for(job.out)
        job.processes[victim].send_signal(signal.SIGKILL)
    yield jobs
    for job in jobs:
        job.end()


class Service:
    """What one of two processes sees of the service: what is heard of the other, or all is well."""

    def __init__(self, heard: Mapping[str, str]) -> None:
        self.heard, self.said = heard, dict[str, str]()

    def key_value_set(self, key: str, value: str) -> None:
        self.said[key] = value

    def blocking_key_value_get(self, key: str, _: int) -> str:
        of_each_process = key.count("/") == 3
        other = [HOST, None] if of_each_process else {"max_new_tokens": 128, "temperature": None}
        return self.said.get(key) or self.heard.get(key, json.dumps(other))


def place(index: int) -> list[str]:
    """The flags of one of two processes."""
    return ["--coordinator_address=127.0.0.1:8476", "--num_processes=2", f"--process_id={index}"]


WRONG = {
    "--prompts_file=/nowhere/prompts.txt": (0, "The prompts file /nowhere/prompts.txt"),
    "--max_new_tokens=7": (1, "--max_new_tokens is 7 here and 128 on process 0"),
    "--temperature=0.5": (1, "--temperature is 0.5 here and not given on process 0"),
    "--draft=/nowhere/draft": (1, "'/nowhere/draft' is neither a folder that exists"),
}


@pytest.mark.parametrize("flag", WRONG)
def test_what_is_wrong_on_one_of_them(
    models: list[str], refused: Refused, monkeypatch: Patch, flag: str
) -> None:
    """It ends them all with the same sentence: the other one hears what this one has said."""
    wrong, words = WRONG[flag]
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    monkeypatch.setattr(crash_handler, "installed", None)
    monkeypatch.setattr(crash_handler, "CrashHandler", lambda *_: SimpleNamespace(shutdown=int))

    def sentence(process: int, heard: Mapping[str, str], *flags: str) -> tuple[str, dict[str, str]]:
        service = Service(heard)
        state = SimpleNamespace(num_processes=2, process_id=process, client=service)
        monkeypatch.setattr(processes, "distributed", SimpleNamespace(global_state=state))
        monkeypatch.setattr(processes, "_turns", itertools.count())
        given = [] if "--prompts_file" in flag else ["--prompt=x"]
        return refused(models[0], *given, *place(process), "--mesh=1x2", *flags), service.said

    here, said = sentence(wrong, {}, flag)
    assert here.startswith(f"Process {wrong} ({HOST}): {words}")
    well = {"--prompts_file": [flag], "--draft": [models[1]]}.get(flag.partition("=")[0], [])
    there, _ = sentence(1 - wrong, said, *well)
    assert there == here


def test_all_must_have_the_same_files(tiny_pair: Folders, monkeypatch: Patch) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(pair, "num_processes", lambda: 2)
    monkeypatch.setattr(pair, "check_same", told.append)
    fly_jax.load_pair(*tiny_pair, mesh="1x2")
    fly_jax.load_pair(tiny_pair[0], tiny_pair[0], mesh="1x2")
    (one, other), (same, another) = (tuple(digests.values()) for digests in told)
    assert one == same == another != other


@pytest.mark.parametrize("index", [0, 1])
def test_others_that_do_not_come(
    models: list[str], monkeypatch: Patch, capfd: Captured, index: int
) -> None:
    """JAX says so by SIGABRT, here without the end of the process after it."""
    ends: list[int] = []

    def initialize(**given: object) -> None:
        assert given["initialization_timeout"] == 3
        signal.raise_signal(signal.SIGABRT)
        raise SystemExit(ends[0])

    kept, handled = [os.dup(1), os.dup(2)], signal.getsignal(signal.SIGINT)
    given = [*models, "--prompt=x", "--mesh=1x2", *place(index), "--coordinator_timeout=3"]
    with monkeypatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", initialize)
        patch.setattr(os, "_exit", ends.append)
        for module, name in ((crash_handler, "installed"), (sys, "stdout"), (sys, "stderr")):
            patch.setattr(module, name, getattr(module, name))  # which the command changes
        with pytest.raises(SystemExit):
            main(given)
        sys.stdout.close()
        sys.stderr.close()
    for stream, descriptor in enumerate(kept, 1):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    signal.signal(signal.SIGINT, handled)
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    assert ends[0] == 2
    out, said = capfd.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    assert "have not all met at 127.0.0.1:8476 within 3 seconds" in said


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_stops_the_other(bereaved: list[Job], victim: int) -> None:
    """Where the other one waits for it."""
    job, survivor = bereaved[victim], 1 - victim
    statuses = job.statuses()
    assert (statuses[victim], statuses[survivor]) == (-signal.SIGKILL, 1)
    said = job.err(survivor).splitlines()
    (sentence,) = (line for line in said if "simulated devices" not in line)
    assert sentence == said[-1]
    beginning = f"Process {survivor} of 2 stops, since process {victim} ({HOST}) is gone"
    assert sentence.startswith(beginning)
    kept = Path(sentence.rpartition("(")[2].split()[0])
    assert kept.parent == job.folder
    assert "coordination" in kept.read_text()


UNHEALTHY = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"
SERVICE_LOST = "absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either the "
BARRIER = "DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::42::0.\n# of tasks that reached the "
DEADLINE = "F1121 18:04:55 client.h:80] absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: "
HEARTBEAT = "/xla.coordination.CoordinationService/Heartbeat\n*** Check failure stack trace: ***"
TIMED_OUT = "barrier: 1/2.\nThe first task at the barrier: 3. Some timed out task names:\n1\n"
MESSAGES = {
    f"E1121 17:05:29 service.cc:1549] {UNHEALTHY}\n1\nThe tasks have crashed. Check the logs": {1},
    f"absl::Status: {UNHEALTHY}\n2\n13\nThe tasks have crashed.": {2, 13},
    BARRIER + TIMED_OUT: {3},  # left alone
    SERVICE_LOST + "leader task was preempted/died/restarted unexpectedly": {0},
    DEADLINE + HEARTBEAT: {0},  # process 0 is silent
    "F1121 18:04:55 client.h:80] Check failed: a == b": set(),
}


@pytest.mark.parametrize("native", MESSAGES)
def test_lost_processes(native: str) -> None:
    assert lost_processes(native) == MESSAGES[native]


SERVED = ["--num_speculative_tokens=4", "--rule=margin", "--num_slots=2", "--prefill_chunk=32"]
SERVED += ["--max_length=50", "--port=0"]  # so short that few programs are compiled


def test_it_serves_and_drains(models: list[str], tmp_path: Path) -> None:
    key = "from the environment"
    job = Job(tmp_path, "serve", *models, *SERVED, number=1, FLY_JAX_API_KEY=key)
    try:
        url = job.url()
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Ada"}).status_code == 401
        asked = {"headers": {"Authorization": f"Bearer {key}"}, "timeout": PATIENCE}
        asked["json"] = {"prompt": "Ada has", "max_tokens": 80, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as reply:
            job.processes[0].send_signal(signal.SIGTERM)
            *events, end = [line[6:] for line in reply.iter_lines() if line]
        assert end == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        assert choices[-1]["finish_reason"] in ("length", "stop")
        assert job.statuses() == [0]
    finally:
        job.end()
    assert "may go on for 30 s" in job.err(0)
    assert "Traceback" not in job.err(0)


@pytest.mark.parametrize("together", [True, False])
def test_where_another_process_may_be_gone_the_session_says_which(
    together: bool, monkeypatch: Patch, capsys: Captured
) -> None:
    failed = ServerFailed("The engine has failed")
    cause = failed.__cause__ = jax.errors.JaxRuntimeError("Gloo all-reduce failed")
    monkeypatch.setattr("fly_jax.serving.http.run.run", Mock(side_effect=failed))
    monkeypatch.setattr(crash_handler, "installed", object() if together else None)
    values: Any = SimpleNamespace(host="127.0.0.1", grace_period=1.0)
    service: Any = SimpleNamespace(limits=SimpleNamespace(api_keys=("a",)), cancel=None)
    with pytest.raises(jax.errors.JaxRuntimeError if together else SystemExit) as caught:
        serve._answer(values, service, cast(Any, None))
    assert (caught.value is cause) == together
    assert ("The engine has failed" in capsys.readouterr().err) != together
