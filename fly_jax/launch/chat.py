"""The command chat: a conversation in the terminal, each token coloured by its `Why`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import DecodingFlags, Flags, ModelFlags, SeedFlags, flag_group
from fly_jax.launch.inputs import load_opened, open_models, say, waiting
from fly_jax.launch.view import TextView
from fly_jax.parameters import parameter
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory

if TYPE_CHECKING:  # what loads models takes seconds to import, which a wrong flag need not wait for
    from fly_jax.decoding.pair import OpenPair, Pair
    from fly_jax.engine.engine import Engine

_HELP = """\
python -m fly_jax.launch chat --target MODEL [flags]

A conversation with an instruct model, that is one with a chat template. Each token has the colour
of the reason why it stands there, and each answer ends with its speed. Lines that begin with / are
for the program:

  /exact      lossless decoding, until the next /rule
  /rule RULE  another rule, such as fly or "fly | margin"; alone, the one of the command line
  /clear      forget what was said
  /help       these lines

Ctrl-C stops an answer, which stays as it is; Ctrl-D ends the program.

Examples:
  python -m fly_jax.launch chat --target model.gguf
  python -m fly_jax.launch chat --target model.gguf --draft ngram --system "Answer in one sentence."
"""

_PROMPT = "> "
# Tokens that a conversation has caches for at first.
_LEAST_LENGTH = 1024
# A conversation grows; what lies on a mesh is laid out for this much of it.
_USUAL_TOKENS = 4096


@flag_group("Conversation")
class _ChatFlags(ModelFlags, DecodingFlags, SeedFlags):
    system: str | None = parameter(None, "message of the system, at the beginning")
    max_new_tokens: int = parameter(512, "most tokens of an answer", low=1)


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    # A conversation does not fill a memory of corrections.
    values = Flags("chat", _ChatFlags, without=("memory", "csd_min_count")).parse(arguments, _HELP)
    config = values.proposing(values.to_config(values))
    models, mesh = open_models(values, config)
    if models.target.tokenizer.chat_template is None:
        raise FlyJaxError(
            "The target has no chat template, so it cannot take a conversation; give --target an "
            "instruct model, or continue texts with the command generate."
        )
    # A template that fails, perhaps only for a system's message, does so before weights are read.
    name = "--target" if values.system is None else "--system"
    models.encode([*_beginning(values), {"role": "user", "content": "Hello"}], name=name)
    pair = load_opened(values, config, models, mesh, rows=1, longest=_USUAL_TOKENS)
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # from then on input() has a history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # which `encode` tells a user of
    conversation = Conversation(values, config, models, pair)
    while True:
        try:
            line = input(_PROMPT).strip()
        except KeyboardInterrupt:
            say("\nCtrl-D ends the program.")
            continue
        except EOFError:
            print()
            return
        if line:
            conversation.take(line)


def _beginning(values: _ChatFlags) -> list[dict[str, str]]:
    return [] if values.system is None else [{"role": "system", "content": values.system}]


class Conversation:
    """A conversation, with its rule, engines and messages."""

    def __init__(
        self, values: _ChatFlags, config: DecodingConfig, models: OpenPair, pair: Pair
    ) -> None:
        self._values, self._models, self._pair = values, models, pair
        self._given = self._config = config
        self._engines: dict[DecodingConfig, Engine] = {}
        self._view = TextView(sys.stdout)
        self._messages = _beginning(values)

    @functools.cached_property
    def _memory(self) -> CorrectionMemory:
        """The memory of rules that look something up, which learns from the conversation."""
        digest, limits = self._pair.tokenizer.digest, self._given.limits
        if limits.memory is None:
            return CorrectionMemory(digest, min_count=limits.csd_min_count)
        return load_memory(Path(limits.memory), digest, min_count=limits.csd_min_count)

    def take(self, line: str) -> None:
        """Runs a command line, or answers a message; it prints errors."""
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            else:
                self._answer(line)
        except FlyJaxError as error:
            say(str(error))
        except KeyboardInterrupt:  # before an answer began
            say("")

    def _command(self, name: str = "", argument: str = "") -> None:
        if argument and name != "rule":
            raise FlyJaxError(f"/{name} stands alone, without '{argument}'.")
        if name == "exact":
            rule = "sampled" if self._given.sampling.temperature > 0 else "exact"
            self._decode_with(self._given.replace(rule=rule, truncate=None))
        elif name == "rule":
            rule = argument.strip("'\"")
            self._decode_with(self._given.replace(rule=rule) if rule else self._given)
        elif name == "clear":
            self._messages = _beginning(self._values)
            say("Forgotten.")
        elif name == "help":
            say(_HELP[_HELP.index("  /exact") : _HELP.index("Examples:")].rstrip())
        else:
            known = "/exact, /rule, /clear and /help"
            raise FlyJaxError(f"There is no command /{name}; the commands are {known}.")

    def _decode_with(self, config: DecodingConfig) -> None:
        config = self._values.proposing(config)
        config.to_rule()
        self._models.check_drafting(config)
        if config != self._config and self._config in self._engines:
            self._engines[self._config].forget()
        self._config = config
        say(f"The rule is {config.rule}.")

    def _answer(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        ids = self._models.encode(asked, name="The conversation")
        most, seed = self._values.max_new_tokens, self._values.seed + len(self._messages)
        self._view.begin([""])
        shown, state = list[int](), None
        engine = self._engine(len(ids) + most)
        (request,) = engine.requests([ids], most, seed=seed)
        try:
            with waiting("Compiling"):  # so that no speed has that in it
                engine.warm_up_for([request])
            state = engine.submit(request)
            for _, settled in engine.run(()):
                shown += settled.token_ids
                done = settled.finish_reason is not None
                self._view.push(0, settled.texts, settled.why, done=done)
        except KeyboardInterrupt:
            if state is not None:  # which may still be waiting for its prompt
                engine.cancel(state)
            self._view.push(0, (), (), done=True)
        if state is None or not shown:  # stopped before it began: as if nothing had been asked
            return
        text = self._pair.tokenizer.decode(shown, continues=True)
        self._messages = [*asked, {"role": "assistant", "content": text}]
        generation = state.generation
        is_cut = generation.finish_reason == "length"
        say(
            f"[{len(shown)} tokens{', cut off at the limit' if is_cut else ''}, "
            f"{generation.tokens_per_second:.0f} tokens/s, "
            f"{generation.mean_accepted_tokens:.2f} mean accepted tokens, "
            f"{generation.num_rescued_tokens} rescued]"
        )

    def _engine(self, length: int) -> Engine:
        """The engine of the rule; larger caches for a longer conversation mean a new one."""
        from fly_jax.engine.engine import Engine

        engine = self._engines.get(self._config)
        context = self._models.max_context
        if engine is None or engine.max_length < min(length, context):
            most = min(max(_LEAST_LENGTH, 1 << (length - 1).bit_length()), context)
            engine = Engine.of(
                self._pair, self._config, num_slots=1, max_length=most, offline=True,
                memory=self._memory if self._config.to_rule().uses_memory else None,
            )  # fmt: skip
            self._engines[self._config] = engine
        return engine
