"""The command serve: what it refuses before it begins, and its life as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jax
import pytest
from launch_types import Captured, Patch, Refused

from fly_jax.launch import crash_handler, serve
from fly_jax.serving.http.run import ServerFailed

SIZES = ["--num_speculative_tokens=4", "--rule=margin", "--num_slots=2", "--prefill_chunk=32"]
SHORT = "--max_length=50"  # few programs are compiled


def test_a_port_that_is_taken(refused: Refused, models: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused("serve", *models, *SIZES, f"--port={port}")
    assert f"cannot listen on 127.0.0.1, port {port}" in sentence


def test_without_the_extra(refused: Refused, models: list[str], monkeypatch: Patch) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'fly_jax[serve]'" in refused("serve", *models)


def test_it_serves_and_drains(models: list[str]) -> None:
    command = [sys.executable, "-m", "fly_jax.launch", "serve", *models, *SIZES, SHORT, "--port=0"]
    environment = {**os.environ, "FLY_JAX_API_KEY": "from the environment"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        ready = next(line for line in process.stderr if line.startswith("Ready on "))
        url = re.findall(r"http://[\d.]+:\d+", ready)[0]
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Ada"}).status_code == 401
        headers = {"Authorization": "Bearer from the environment"}
        body = {"prompt": "Ada has", "max_tokens": 80, "stream": True}
        asked = ("POST", f"{url}/v1/completions")
        with httpx.stream(*asked, json=body, headers=headers, timeout=60) as reply:
            process.send_signal(signal.SIGTERM)
            *events, end = [line[6:] for line in reply.iter_lines() if line]
        assert end == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        assert choices[-1]["finish_reason"] in ("length", "stop")
        assert process.wait() == 0
        rest = process.stderr.read()
        watchdog.cancel()
    assert "may go on for 30 s" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize("together", [True, False])
def test_where_another_process_may_be_gone_the_session_says_which(
    together: bool, monkeypatch: Patch, capsys: Captured
) -> None:
    cause = jax.errors.JaxRuntimeError("Gloo all-reduce failed")

    def failing(*_: object, **__: object) -> None:
        raise ServerFailed("The engine has failed") from cause

    monkeypatch.setattr("fly_jax.serving.http.run.run", failing)
    monkeypatch.setattr(crash_handler, "installed", object() if together else None)
    values: Any = SimpleNamespace(host="127.0.0.1", grace_period=1.0)
    limits = SimpleNamespace(api_keys=("a",))
    service: Any = SimpleNamespace(limits=limits, cancel=None)
    with pytest.raises(jax.errors.JaxRuntimeError if together else SystemExit) as caught:
        serve._answer(values, service, cast(Any, None))
    assert (caught.value is cause) == together
    assert ("The engine has failed" in capsys.readouterr().err) != together
