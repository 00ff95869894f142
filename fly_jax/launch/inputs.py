"""The first steps of commands that decode: prompts and models, each read and checked once."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.sharding import Mesh

from fly_jax.decoding.config import DecodingConfig, decoding_parameters
from fly_jax.decoding.pair import CheckedPrompt
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.problems import Problem, built_in_problems
from fly_jax.launch import crash_handler
from fly_jax.launch.flags import BatchFlags, ModelFlags, ProcessFlags, PromptFlags
from fly_jax.parameters import parameters_of
from fly_jax.sharding import mesh as meshes
from fly_jax.sharding import processes
from fly_jax.sharding.processes import broadcast, joint_errors, process_id

if TYPE_CHECKING:
    from fly_jax.decoding.pair import OpenPair, Pair
    from fly_jax.verification.rules import Rule


_BUILT_IN_TEXT = "class Queue:\n    def __init__(self, maxsize=0):\n"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, or a conversation, to continue."""

    text: str  # the prompt; of a conversation its last message
    source: str  # where it comes from, as an error names it
    problem: Problem | None = None
    messages: tuple[Mapping[str, str], ...] = ()
    is_question: bool = False  # what follows is an answer, not more of the same text
    category: str = ""  # of a set of prompts, where the file says so


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs that are known before weights are read; in other processes prompts are texts alone."""

    config: DecodingConfig
    rule: Rule
    models: OpenPair
    mesh: Mesh
    prompts: list[Prompt]
    ids: list[CheckedPrompt]


def say(line: str) -> None:
    """Writes a line to standard error, once for all processes; results go elsewhere."""
    if process_id() == 0:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(why: str) -> Iterator[None]:
    """Shows on a terminal, until it is done, what the user waits for."""
    shown = process_id() == 0 and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print(f"{why} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def open_mesh(mesh: str, compilation_cache: str | None = None) -> Mesh:
    """Makes the mesh, before anything else can start a JAX backend, and keeps what compiles."""
    spec = meshes.parse_mesh(mesh)
    meshes.prepare_devices(spec, processes.num_processes())
    try:
        meshes.enable_compilation_cache(compilation_cache)
    except FlyJaxError as error:
        say(str(error))
    return meshes.create_mesh(spec)


def open_models(values: ModelFlags, config: DecodingConfig) -> tuple[OpenPair, Mesh]:
    """Opens the models, with the mesh for them; an error of one process is raised on all."""
    mesh = open_mesh(values.mesh, values.compilation_cache)

    from fly_jax.decoding.pair import open_pair

    with joint_errors():
        more: Any = {"revision": values.revision, "draft_parallel": values.draft_parallel}
        models = open_pair(values.target, values.draft, **more)
        _check_sizes(config, models.max_context)
    return models, mesh


def open_inputs(values: BatchFlags, config: DecodingConfig, texts: Sequence[str] = ()) -> Inputs:
    """Reads the prompts, after these texts, opens models, and encodes; fails on all processes."""
    # The same on all of them, which have the same flags and process 0's config.
    rule, _ = config.to_rule(), config.to_lookup()
    with joint_errors():
        prompts = prompts_from_flags(values, texts) if process_id() == 0 else []
    models, mesh = open_models(values, config)
    with joint_errors():
        prompts, ids = encode_prompts(values, prompts, models) if process_id() == 0 else ([], [])
    named, ids = broadcast([[(one.text, one.source) for one in prompts], ids])
    if process_id() != 0:
        prompts, ids = [Prompt(*one) for one in named], [CheckedPrompt(one) for one in ids]
    return Inputs(config, rule, models, mesh, prompts, ids)


def load_models(values: BatchFlags, inputs: Inputs) -> Pair:
    """Loads the models, as `load_opened`, for prompts that are known."""
    length = max(map(len, inputs.ids)) + values.max_new_tokens
    rows = min(values.batch_size, len(inputs.ids))
    return load_opened(values, inputs.config, inputs.models, inputs.mesh, rows=rows, longest=length)


def load_opened(
    values: ModelFlags, config: DecodingConfig, models: OpenPair, mesh: Mesh, *, rows: int,
    longest: int,
) -> Pair:  # fmt: skip
    """Reads the weights, laid out for what is to be decoded, and says where they lie."""
    from fly_jax.decoding.pair import load_pair
    from fly_jax.decoding.programs import cache_capacity
    from fly_jax.models.layouts import Workload

    models.check_drafting(config)
    if mesh.size > 1:
        say(meshes.describe(mesh))
    longest = min(longest, models.max_context)
    capacity, k = cache_capacity(longest, 0), config.drafting.max_speculative_tokens
    workload = Workload(rows=rows, capacity=capacity, num_speculative_tokens=k)
    dtype, cache = values.dtype or models.default_dtype(mesh.size), values.weights_cache
    if dtype == "int8" != values.dtype and not models.target.source.int8:
        say(
            "The matrices are read as int8, the fastest on a CPU; --dtype float32 keeps all digits."
        )
    with waiting("Reading the weights"):
        pair = load_pair(
            models, mesh=mesh, dtype=dtype, workload=workload, weights_cache=cache, say=say
        )
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if models.self_draft is not None and pair.target.has_integers and on_cpu:
        say(
            f"On a CPU a pass of {models.self_draft} takes as long as an int8 target's: it shows "
            "what would be accepted, and decoding without --draft is faster."
        )
    if pair.replicated:
        say(f"The mesh does not divide all of the target ({'; '.join(pair.replicated)}).")
    return pair


def _check_sizes(config: DecodingConfig, context: int) -> None:
    lookup = config.to_lookup()
    sizes = {
        "num_speculative_tokens": config.drafting.max_speculative_tokens,
        "level_speculative_tokens": config.drafting.level_speculative_tokens,
        "prompt_lookup_max": lookup.max_ngram if lookup else 0,
        "prompt_lookup_tokens": lookup.num_speculative_tokens if lookup else 0,
    }
    for name, size in sizes.items():
        if size >= context:
            said = f"{name} is {size} and the model's context is {context}"
            raise FlyJaxError(f"{said}; give a smaller number.")


def encode_prompts(
    values: PromptFlags, prompts: list[Prompt], models: OpenPair
) -> tuple[list[Prompt], list[CheckedPrompt]]:
    """The prompts that fit, and their tokens; raises FlyJaxError where none is left."""
    chats = _chats(values, prompts, models)
    fitting: list[Prompt] = []
    tokens: list[CheckedPrompt] = []
    for prompt in prompts:
        try:
            messages = prompt.messages or [{"role": "user", "content": prompt.text}] * chats
            if values.system is not None and messages:
                if messages[0]["role"] == "system":
                    raise FlyJaxError(
                        f"{prompt.source} has a message of the system, and --system was given as "
                        "well; leave one of the two out."
                    )
                messages = [{"role": "system", "content": values.system}, *messages]
            tokens.append(models.encode(messages or prompt.text, name=prompt.source))
            fitting.append(dataclasses.replace(prompt, is_question=bool(messages)))
        except FlyJaxError as error:
            _refuse(error, skip=values.skip_bad_prompts)
    if not fitting:
        raise FlyJaxError("No prompt is left; give at least one that fits the model's context.")
    if chats and values.chat is None and not all(one.messages for one in prompts):
        say("Prompts are put as a user's messages, as this model has it; --nochat continues them.")
    return fitting, tokens


def _chats(values: PromptFlags, prompts: list[Prompt], models: OpenPair) -> bool:
    has_template = models.target.tokenizer.chat_template is not None
    chats = has_template if values.chat is None else values.chat
    if chats and not has_template:
        raise FlyJaxError(
            "--chat was given, and the target's tokenizer has no chat template; leave it out, or "
            "give an instruct model."
        )
    if values.system is not None:
        models.encode(values.system or " ", name="--system")
    if values.system is not None and not (chats or any(one.messages for one in prompts)):
        raise FlyJaxError(
            "--system was given, and no prompt is a conversation; leave it out, or give an "
            "instruct model and no --nochat."
        )
    return chats


def _refuse(error: FlyJaxError, *, skip: bool) -> None:
    """Raises the error, or only prints it where bad prompts are to be skipped."""
    if not skip:
        raise error
    say(f"Skipped: {error}")


def built_in_prompts() -> list[Prompt]:
    """Word problems that no model of the embedded pair was trained on, and a bit of code."""
    source = "A built-in prompt"
    worded = [Prompt(problem.prompt, source, problem) for problem in built_in_problems()]
    return [*worded, Prompt(_BUILT_IN_TEXT, source)]


def prompts_from_flags(values: PromptFlags, texts: Sequence[str]) -> list[Prompt]:
    """The prompts of --prompt, then those of --prompts_file; without either those built in."""
    if not texts and values.prompts_file is None:
        return built_in_prompts()
    named = [Prompt(text, f"Prompt {index}") for index, text in enumerate(texts, 1)]
    for prompt in named:
        _check_text(prompt.text, prompt.source)
    if values.prompts_file is not None:
        named += read_prompts(values.prompts_file, skip_bad=values.skip_bad_prompts)
    return named


def read_prompts(path: str, *, skip_bad: bool) -> list[Prompt]:
    """Reads prompts: objects with `prompt`, `messages` or `turns`, one a line, or plain text.

    A file has JSON lines if its name ends in .jsonl or .json, or its first line begins with "{".
    Blank lines are ignored. Raises FlyJaxError for a line that is no prompt (with `skip_bad` it is
    only reported), and for a file that cannot be read or has no prompt.
    """
    name = "Standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise FlyJaxError(
            f"The prompts file {path} cannot be read ({error.strerror}); correct the path."
        ) from error
    data = data.removeprefix(codecs.BOM_UTF8)
    is_json = path.endswith((".jsonl", ".json")) or data.lstrip().startswith(b"{")
    found: list[Prompt] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        source = f"{name}, line {number}"
        try:
            text = line.removesuffix(b"\r").decode()
            one = _prompt_of(text, source) if is_json else Prompt(text, source)
            _check_text(one.text, source)
            found.append(one)
        except UnicodeDecodeError as error:
            said = f"{source}: byte {error.start + 1} is not valid UTF-8; save the file as UTF-8, "
            _refuse(FlyJaxError(f"{said}or give --skip_bad_prompts."), skip=skip_bad)
        except FlyJaxError as error:
            _refuse(error, skip=skip_bad)
    if not found:
        raise FlyJaxError(
            f"{name} has no prompt; write one on each line, as plain text or as a JSON object such "
            'as {"prompt": "Once upon a time"}.'
        )
    return found


def _prompt_of(text: str, source: str) -> Prompt:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "too deep, or too long a number")
        raise FlyJaxError(
            f"{source} is not valid JSON ({reason}); correct the line, or give --skip_bad_prompts."
        ) from error
    value = value if isinstance(value, dict) else {}
    category = str(value.get("category", ""))
    if value.get("messages") is not None:
        return dataclasses.replace(_conversation(value["messages"], source), category=category)
    turns = value.get("turns")  # of Spec-Bench and MT-bench, of which the first is asked
    asked = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
    if not isinstance(asked, str):
        raise FlyJaxError(
            f"{source} is not a JSON object with a text named prompt, or with messages or turns; "
            'write such as {"prompt": "Once upon a time"}, or give --skip_bad_prompts.'
        )
    return Prompt(asked, source, category=category)


def _conversation(messages: object, source: str) -> Prompt:
    given = cast(list[dict[str, str]], messages) if isinstance(messages, list) else []
    if not given or not all(
        isinstance(one, dict)
        and set(one) == {"role", "content"}
        and all(isinstance(text, str) for text in one.values())
        for one in given
    ):
        raise FlyJaxError(
            f"{source} has messages that are not a list of objects with a role and a content; "
            'write such as {"messages": [{"role": "user", "content": "Hello"}]}, or give '
            "--skip_bad_prompts."
        )
    return Prompt(given[-1]["content"], source, messages=tuple(given))


def _check_text(text: str, source: str) -> None:
    if not text:
        raise FlyJaxError(f"{source} is empty; decoding needs at least one token: give some text.")


# Added to the seconds in which the service misses a process.
_MARGIN_SECONDS = 15
# The flags that may differ between the processes.
_OF_ONE_PROCESS = {"compilation_cache", "weights_cache", "api_key", "api_keys_file"}
_OF_ONE_PROCESS |= {one.name for one in parameters_of(ProcessFlags)}


@contextlib.contextmanager
def distributed_session(values: ProcessFlags) -> Iterator[None]:
    """Joins the other processes for the time of a command; does nothing where there are none.

    FlyJaxError where the flags do not say which there are, or the commands differ.
    """
    at, timeout = values.coordinator_address, values.coordinator_timeout
    process = processes.detect_process(at, values.num_processes, values.process_id, timeout=timeout)
    if process is None:
        yield
        return
    handler = crash_handler.installed = crash_handler.CrashHandler(process, timeout)
    # JAX waits in C++, where Python would not hear Ctrl-C.
    handled = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        handler.hosts = processes.initialize(process, timeout=timeout)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        raise FlyJaxError(
            f"The processes could not meet at {process.coordinator_address} ({said}); give a free "
            "port of the host of process 0."
        ) from error
    signal.signal(signal.SIGINT, handled)
    settings = json.loads(json.dumps(dataclasses.asdict(values)))  # as they arrive elsewhere
    if "given" in settings:
        settings |= dict.fromkeys(decoding_parameters()) | dict(settings.pop("given"))
    try:
        same = {name: value for name, value in settings.items() if name not in _OF_ONE_PROCESS}
        processes.check_same(same)
        yield
        broadcast("done")  # process 0 may still be writing
    except (FlyJaxError, OSError):
        raise
    except Exception as error:
        if is_of_another(error):
            # JAX stops us before, and knows why.
            time.sleep(processes.HEARTBEAT_SECONDS + _MARGIN_SECONDS)
        traceback.print_exc()
        raise SystemExit(1) from error


def is_of_another(error: BaseException) -> bool:
    """Tells whether another process's end may be the cause: a failed collective or message."""
    failed = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    return failed and "RESOURCE_EXHAUSTED" not in str(error) and crash_handler.installed is not None
