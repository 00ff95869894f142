"""The command serve: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch import inputs
from fly_jax.launch.crash_handler import EXIT_FAILED
from fly_jax.launch.flags import DecodingFlags, Flags, ModelFlags, ProcessFlags, flag_group
from fly_jax.launch.inputs import load_opened, open_models, say
from fly_jax.parameters import parameter
from fly_jax.sharding.processes import joint_errors, process_id

if TYPE_CHECKING:  # what loads models takes seconds to import; and the extra [serve]
    from fly_jax.decoding.pair import Pair
    from fly_jax.engine.engine import Engine
    from fly_jax.serving.http.limits import ServerLimits
    from fly_jax.serving.http.request_builder import RequestBuilder
    from fly_jax.serving.http.service import Service

_HELP = """\
python -m fly_jax.launch serve [flags]

A server with the endpoints of OpenAI's API, and a page to try it at /. Without --target it serves
the pair that ships with the package. Decoding flags are for requests that do not say otherwise;
docs/serving.md has what a request may say.

Examples:
  python -m fly_jax.launch serve
  python -m fly_jax.launch serve --target model.gguf --draft self:int4 --num_slots 16
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "import os\\n", "max_tokens": 32}'
"""

_Engine = TypeVar("_Engine", bound="Engine")

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_KEY = "FLY_JAX_API_KEY"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SHARED_BLOCK = 64  # so that nobody can guess a prompt token by token


@flag_group("Server")
class ServeFlags(ModelFlags, DecodingFlags, ProcessFlags):
    """Flags of the command `serve`."""

    host: str = parameter("127.0.0.1", "address to listen on; 0.0.0.0 for all that there are")
    port: int = parameter(8000, "port to listen on; 0 for any that is free", low=0, high=65535)
    served_model_name: str | None = parameter(None, "model's name; that of --target if not given")
    api_key: tuple[str, ...] = parameter(
        (),
        "key that requests have to bring, of several any one; if neither this nor --api_keys_file "
        f"is given, that of the environment variable {_KEY}, where other users of this machine do "
        "not see it; else none",
    )
    api_keys_file: str | None = parameter(None, "file of keys besides, one in each line")
    allowed_hosts: tuple[str, ...] = parameter(
        (),
        "name by which the server may be called, '*' for any; if not given, any, but on loopback "
        "without a key only localhost, 127.0.0.1, [::1] and --host, which keeps out pages of other "
        "sites",
    )
    num_slots: int = parameter(8, "requests decoded at a time", low=1)
    max_length: int | None = parameter(
        None,
        "most tokens of a request with its answer; 2048, or the model's context if that is less, "
        "if not given",
        kind=int, low=2,
    )  # fmt: skip
    prefill_chunk: int = parameter(256, "prompt tokens taken in between two rounds", low=1)
    rules: tuple[str, ...] = parameter(
        (), "a loosened rule that requests may ask for, such as 'fly & margin'; else fly and margin"
    )
    max_logprobs: int = parameter(
        0,
        "most probable tokens at each position that requests may have the log-probabilities of; "
        "none are computed with 0",
        low=0, high=20,
    )  # fmt: skip
    load_may_change_text: bool = parameter(
        False,
        "with --num_speculative_tokens=auto, K is chosen for loosened and drawn requests too, so "
        "that what they give depends on what else is decoded",
    )
    prefix_sharing: bool = parameter(
        True,
        f"a prompt's beginning that a request with the same key brought is not run again, by "
        f"{_SHARED_BLOCK} tokens",
    )
    max_queue: int = parameter(256, "requests that may wait for a slot", low=0)
    max_body: int = parameter(2 * 2**20, "bytes of a request's body", low=1)
    max_connections: int = parameter(512, "connections that may be open at a time", low=1)
    request_timeout: float = parameter(
        600.0, "seconds a request may take; it has to arrive within 60 of them", above=0.0
    )
    client_timeout: float = parameter(30.0, "seconds a client has to take what is sent", above=0.0)
    grace_period: float = parameter(
        30.0, "seconds running requests get when it is told to stop (SIGTERM, Ctrl-C)", above=0.0
    )


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    without = ("memory", "csd_min_count", "csd_online")  # the server takes no memory
    values = Flags("serve", ServeFlags, without).parse(arguments, _HELP)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise FlyJaxError(
            f"The server needs {' and '.join(missing)}, which are not installed; install them with "
            "pip install 'fly_jax[serve]'."
        )
    with inputs.distributed_session(values):
        _serve(values, values.proposing(values.to_config(values)))


def _serve(values: ServeFlags, config: DecodingConfig) -> None:
    from fly_jax.decoding.config import RoundSpec
    from fly_jax.engine.engine import Engine
    from fly_jax.engine.request import check_spec
    from fly_jax.serving.async_engine import AsyncEngine
    from fly_jax.serving.http.request_builder import RequestBuilder
    from fly_jax.serving.http.run import bound
    from fly_jax.serving.http.service import Service
    from fly_jax.serving.lockstep import LeadingEngine, follow

    # Errors are found before weights are read, as far as possible.
    builder = RequestBuilder.of(config, values.rules or None)
    spec = RoundSpec.of(builder.for_engine, num_drafts=1)
    check_spec(spec, builder.kinds)
    if any(rule.uses_memory for rule in (spec.rule, *builder.kinds)):
        raise FlyJaxError(
            "The rule csd looks mismatches up in a memory, which the server does not take; leave "
            "it out of --rule and --rules, or decode with generate, or Engine(..., memory=...)."
        )
    if config.lookup.num_earlier_tokens:
        raise FlyJaxError(
            f"prompt_lookup_earlier is {config.lookup.num_earlier_tokens}, and the server keeps no "
            "answers: another client could tell one from how its drafts fare. Leave it out."
        )
    if process_id() != 0:
        with joint_errors():
            pass  # what only process 0 looks at
        _, follower = _made(values, builder, Engine)
        for number in (signal.SIGTERM, signal.SIGINT):  # process 0 gets it too, and drains first
            signal.signal(number, signal.SIG_IGN)
        follow(follower)
        return
    with contextlib.ExitStack() as stack:
        with joint_errors():
            listening = stack.enter_context(contextlib.closing(bound(values.host, values.port)))
            limits = _limits(values, listening.getsockname()[0])
        pair, engine = _made(values, builder, LeadingEngine)
        stack.callback(engine.end)
        path = Path(values.target or "fly_jax-embedded")  # or a hub id, which stays as it is
        name = values.served_model_name or (path.resolve().name if path.exists() else str(path))
        _answer(values, Service(name, AsyncEngine(engine), pair, builder, limits), listening)


def _answer(values: ServeFlags, service: Service, listening: socket.socket) -> None:
    from fly_jax.serving.http.run import ServerFailed, run, serve

    if not service.limits.api_keys and not _is_loopback(listening.getsockname()[0]):
        say(f"Whoever reaches {values.host} may ask; --api_key or {_KEY} demands a key.")
    say("Compiling, which is quick where programs were kept from an earlier start.")
    with tqdm(unit="program", desc="Warming up", leave=False, disable=None) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if bar.disable and 4 * done // total > 4 * (done - 1) // total:
                say(f"{done} of {total} programs are there.")  # in a log a bar would fill pages
            if done == total:
                bar.close()

        def cut_off() -> None:
            if service.state == "starting":  # what compiles or is timed cannot be interrupted
                os._exit(130)
            service.cancel()

        try:
            serving = functools.partial(
                serve, service, listening, grace_period=values.grace_period, say=say,
                on_progress=on_progress,
            )  # fmt: skip
            run(serving, cut_off)
        except ServerFailed as error:
            cause = error.__cause__
            if cause is not None and inputs.is_of_another(cause):
                raise cause from None  # the session waits to hear which process is gone
            traceback.print_exception(cause)
            say(str(error))
            sys.exit(EXIT_FAILED)


def _made(values: ServeFlags, builder: RequestBuilder, kind: type[_Engine]) -> tuple[Pair, _Engine]:
    """Opens the models, checks the sizes, reads the weights, and makes an engine of them."""
    from fly_jax.engine.engine import DEFAULT_LENGTH
    from fly_jax.engine.request import check_sizes

    models, mesh = open_models(values, builder.config)
    rows, context = values.num_slots, models.max_context
    length = values.max_length or min(DEFAULT_LENGTH, context)
    check_sizes(rows, values.prefill_chunk, length, context)
    pair = load_opened(values, builder.config, models, mesh, rows=rows, longest=length)
    engine = kind.of(
        pair, builder.for_engine, num_slots=rows, max_length=length,
        prefill_chunk=values.prefill_chunk, rules=builder.kinds, audits=True,
        max_logprobs=values.max_logprobs, load_may_change_text=values.load_may_change_text,
        shared_block=_SHARED_BLOCK if values.prefix_sharing else 0,
    )  # fmt: skip
    return pair, engine


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return bool((getattr(found, "ipv4_mapped", None) or found).is_loopback)


def _limits(values: ServeFlags, address: str) -> ServerLimits:
    from fly_jax.serving.http.limits import ServerLimits

    api_keys, allowed_hosts = _api_keys(values), values.allowed_hosts
    if not allowed_hosts and not api_keys and _is_loopback(address):
        given = (f"[{one}]" if ":" in one else one for one in (values.host, address))
        allowed_hosts = tuple(dict.fromkeys((*_LOOPBACK_NAMES, *given)))
    return ServerLimits(
        max_queue=values.max_queue, max_body=values.max_body,
        max_connections=values.max_connections, request_timeout=values.request_timeout,
        client_timeout=values.client_timeout,
        allowed_hosts=() if "*" in allowed_hosts else tuple(map(str.lower, allowed_hosts)),
        api_keys=api_keys,
    )  # fmt: skip


def _api_keys(values: ServeFlags) -> tuple[str, ...]:
    """The keys of the flags, or that of the environment."""
    keys, path = list(values.api_key), values.api_keys_file
    if path is not None:
        try:
            lines = Path(path).read_text("utf-8-sig").splitlines()
            keys += [line.strip() for line in lines if line.strip()]
        except (OSError, UnicodeError) as error:
            raise FlyJaxError(
                f"--api_keys_file is {path}, which cannot be read ({error}); give a text file with "
                "a key in each line."
            ) from error
    if not keys and path is None and _KEY in os.environ:
        keys = [os.environ[_KEY]]
    if not all(key.strip() for key in keys) or (path is not None and not keys):
        raise FlyJaxError(
            f"The API key of --api_key, --api_keys_file or {_KEY} is empty; give one, or leave it "
            "out for none."
        )
    return tuple(key.strip() for key in keys)
