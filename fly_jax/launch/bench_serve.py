"""The command bench serve: what clients of any server with OpenAI's API see."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, flag_group
from fly_jax.launch.inputs import built_in_prompts, read_prompts
from fly_jax.models.tokenizer import check_unicode
from fly_jax.parameters import parameter

_HELP = """\
python -m fly_jax.launch bench serve [flags]

Asks a server with OpenAI's API, ours or any other, by several clients at a time, and prints what
they see: time to first token (ttft), time per output token (tpot), time between two pieces of text
(itl) and time to the end (e2el).

Examples:
  python -m fly_jax.launch bench serve --url http://localhost:8000
  python -m fly_jax.launch bench serve --url http://localhost:8000 --chat \\
    --prompts_file question.jsonl --concurrency 1,16
"""


@flag_group("Bench")
class _BenchServeFlags:
    url: str = parameter("http://localhost:8000", "address of the server")
    model: str | None = parameter(None, "name of the model; the server's first if not given")
    api_key: str | None = parameter(
        None, "key of the server; if not given, that of the environment variable OPENAI_API_KEY"
    )
    chat: bool = parameter(False, "ask /v1/chat/completions, not /v1/completions")
    prompts_file: str | None = parameter(None, "as for generate; those built in if not given")
    skip_bad_prompts: bool = parameter(False, "warn of a bad line in the file and go on")
    num_prompts: int = parameter(
        48, "requests for each number of clients, at least one each", low=1
    )
    max_new_tokens: int = parameter(128, "most tokens of an answer", low=1)
    concurrency: str = parameter(
        "1,4,16", "clients at a time, with commas, each measured in turn with the same prompts"
    )
    extra_body: str = parameter(
        "{}", 'JSON object whose fields every request gets, such as {"fly": {"rule": "exact"}}'
    )
    json: bool = parameter(False, "all figures as one JSON object on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("bench serve", _BenchServeFlags).parse(arguments, _HELP)
    try:
        import httpx
    except ImportError as error:
        raise FlyJaxError(
            "bench serve needs httpx, which is not installed; pip install 'fly_jax[bench]'."
        ) from error
    extra, numbers = _extra(values.extra_body), values.concurrency.split(",")
    if not all(one.strip().isdecimal() and int(one) for one in numbers):
        given = values.concurrency
        raise FlyJaxError(f"--concurrency is {given!r}; give numbers of clients, such as 1,4,16.")
    try:
        asyncio.run(_run(values, list(map(int, numbers)), extra))
    except (httpx.InvalidURL, UnicodeError, ExceptionGroup) as error:
        raise FlyJaxError(
            f"--url {values.url} or the key cannot be used ({error}); give an address such as "
            "http://localhost:8000, and a key in ASCII."
        ) from error


async def _run(values: _BenchServeFlags, clients: Sequence[int], extra: dict[str, Any]) -> None:
    import httpx
    import jax

    from fly_jax.evaluation.http_load import ask, load, table
    from fly_jax.evaluation.machine import describe

    jax.config.update("jax_platforms", "cpu")  # a chip is the server's, which may run here

    given, skips = values.prompts_file, values.skip_bad_prompts
    prompts = built_in_prompts() if given is None else read_prompts(given, skip_bad=skips)
    key = values.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    path = "/v1/chat/completions" if values.chat else "/v1/completions"
    known: dict[str, Any] = {"base_url": values.url, "headers": headers}
    async with httpx.AsyncClient(**known, timeout=None, limits=httpx.Limits()) as client:
        model = values.model or await _first_model(client)
        bodies = []
        most = max(values.num_prompts, *clients)
        for prompt in itertools.islice(itertools.cycle(prompts), most):
            if prompt.messages and not values.chat:
                raise FlyJaxError(f"{prompt.source} is a conversation; give --chat with such.")
            messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
            check_unicode("".join(one["content"] for one in messages), prompt.source)
            asked = {"messages": messages} if values.chat else {"prompt": prompt.text}
            bodies.append({"model": model, "max_tokens": values.max_new_tokens, **asked, **extra})
        await ask(client, path, bodies[0])  # what a server compiles first is no measurement
        found = []
        try:
            for number in clients:
                asked_for = bodies[: max(values.num_prompts, number)]
                found.append(await load(client, path, asked_for, number))
        finally:  # what was measured before a server refused
            if found:
                print(table(found), file=sys.stderr if values.json else sys.stdout, flush=True)
            if values.json:
                measured = [one.to_dict() for one in found]
                asks = describe()
                del asks["devices"]  # nothing is said of the server's
                print(json.dumps({"machine": asks, "model": model, "measured": measured}))


async def _first_model(client: Any) -> str:
    import httpx

    try:
        reply = await client.get("/v1/models")
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        said = str(error).partition("\n")[0]  # httpx adds a line with a link
        raise FlyJaxError(
            f"{client.base_url} does not say which models it has ({said}); start the server, or "
            "correct --url, or give --api_key or --model."
        ) from error


def _extra(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        example = '{"temperature": 0}'
        raise FlyJaxError(f"--extra_body is {text!r}; give a JSON object, such as {example}.")
    return found
