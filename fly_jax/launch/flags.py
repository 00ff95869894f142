"""The flags of the commands, in groups, and what is said about a wrong one."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from fly_jax.decoding.config import (
    DecodingConfig,
    decoding_parameters,
    default_config,
    load_config,
    parameter_groups,
)
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import Parameter
from fly_jax.sharding.processes import broadcast, joint_errors, process_id

_WIDTH = 96


class _IntegerOr(flags.ArgumentParser[int | str]):
    """Reads a whole number, or one word as it stands."""

    def __init__(self, word: str) -> None:
        self.syntactic_help = f"a whole number or {word}"
        self._word = word

    def parse(self, argument: str) -> int | str:
        """Raises ValueError for anything else."""
        try:
            return argument if argument == self._word else int(argument)
        except ValueError:
            raise ValueError(f"give {self.syntactic_help}") from None


class Flags:
    """One command's flags: defined group by group, then parsed once.

    They live in an absl `FlagValues` of their own: the process-wide one holds those of every
    library that was imported.
    """

    def __init__(self, command: str) -> None:
        """No flag yet but --help."""
        self.command = command
        self.values = flags.FlagValues()
        self._groups: dict[str, dict[str, str]] = {}

    def _add(self, group: str, flag: flags.Flag, text: str) -> None:
        flags.DEFINE_flag(flag, self.values, module_name=group)
        self._groups.setdefault(group, {})[flag.name] = text

    def string(self, group: str, name: str, default: str | None, text: str) -> None:
        """Adds a flag that takes text."""
        parser, serializer = flags.ArgumentParser[str](), flags.ArgumentSerializer[str]()
        self._add(group, flags.Flag(parser, serializer, name, default, text), text)

    def strings(self, group: str, name: str, text: str) -> None:
        """Adds a flag that may be given several times."""
        parser, serializer = flags.ArgumentParser[str](), flags.ArgumentSerializer[str]()
        self._add(group, flags.MultiFlag(parser, serializer, name, [], text), text)

    def boolean(self, group: str, name: str, text: str) -> None:
        """Adds a flag that is off unless given."""
        self._add(group, flags.BooleanFlag(name, False, text), text)

    def switch(self, group: str, name: str, text: str) -> None:
        """Adds a flag that is neither on nor off unless given."""
        self._add(group, flags.BooleanFlag(name, None, text), text)

    def integer(
        self,
        group: str,
        name: str,
        default: int | None,
        text: str,
        lower_bound: int | None = None,
        upper_bound: int | None = None,
    ) -> None:
        """Adds a flag that takes a whole number."""
        parser = flags.IntegerParser(lower_bound, upper_bound)
        serializer = flags.ArgumentSerializer[int]()
        self._add(group, flags.Flag(parser, serializer, name, default, text), text)

    def integer_or(self, group: str, name: str, word: str, text: str) -> None:
        """Adds a flag that takes a whole number or one word, and is not given by default."""
        serializer = flags.ArgumentSerializer[int | str]()
        self._add(group, flags.Flag(_IntegerOr(word), serializer, name, None, text), text)

    def number(self, group: str, name: str, default: float | None, text: str) -> None:
        """Adds a flag that takes a number."""
        parser, serializer = flags.FloatParser(), flags.ArgumentSerializer[float]()
        self._add(group, flags.Flag(parser, serializer, name, default, text), text)

    def choice(
        self, group: str, name: str, default: str | None, choices: Sequence[str], text: str
    ) -> None:
        """Adds a flag that takes one of a few words."""
        self._add(group, flags.EnumFlag(name, default, text, choices), text)

    def parameter(self, group: str, one: Parameter, shipped: Any = None) -> None:
        """Adds a flag for a parameter that is declared elsewhere; None, or [], unless given.

        Args:
          group: in which the help shows it.
          one: the parameter.
          shipped: its default with the pair that ships with the package; None where it is the same.
        """
        text = one.help
        if one.kind is bool and one.default:
            text = f"{text}; --no{one.name} to switch it off"
        elif one.default not in (None, ()) or shipped is not None:
            default = "none" if one.default in (None, ()) else one.default
            text = f"{text}; {default} if not given"
        if shipped is not None:
            value = " ".join(shipped) if isinstance(shipped, tuple) else shipped
            text = f"{text}, {value} with the pair that ships with the package"
        if one.choices:
            self.choice(group, one.name, None, one.choices, text)
        elif one.word:
            self.integer_or(group, one.name, one.word, text)
        elif one.kind is bool:
            self.switch(group, one.name, text)
        elif one.kind is tuple:
            self.strings(group, one.name, f"{text}; may be given several times")
        elif one.kind is str:
            self.string(group, one.name, None, text)
        elif one.kind is int:
            self.integer(group, one.name, None, text)
        else:
            self.number(group, one.name, None, text)

    def parse(self, arguments: Sequence[str]) -> flags.FlagValues:
        """The flags' values.

        Raises:
          FlyJaxError: an unknown flag, a value that is not allowed, or an argument that is no flag.
        """
        rest = self._rest(arguments)
        if rest:
            raise FlyJaxError(
                f"'{rest[0]}' is no flag; flags begin with --, and a command comes before them: "
                f"{self._advice}."
            )
        return self.values

    def parse_with_file(self, arguments: Sequence[str]) -> tuple[flags.FlagValues, str | None]:
        """The flags' values, and the one argument that is no flag, wherever it stands.

        Raises:
          FlyJaxError: an unknown flag, a value that is not allowed, or several such arguments.
        """
        self.values.set_gnu_getopt(True)
        rest = self._rest(arguments)
        if len(rest) > 1:
            raise FlyJaxError(
                f"{self.command} takes one file and was given {len(rest)}, '{rest[0]}' and "
                f"'{rest[1]}' among them; {self._advice}."
            )
        return self.values, rest[0] if rest else None

    @property
    def _advice(self) -> str:
        return f"see python -m fly_jax.launch {self.command} --help"

    def _rest(self, arguments: Sequence[str]) -> list[str]:
        """Parses the flags, and returns what is none."""
        try:
            return self.values([self.command, *arguments])[1:]
        except flags.UnrecognizedFlagError as error:
            close = difflib.get_close_matches(error.flagname, list(self.values), n=1)
            hint = f"did you mean --{close[0]}" if close else self._advice
            raise FlyJaxError(f"{self.command} has no flag --{error.flagname}; {hint}.") from error
        except flags.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise FlyJaxError(f"{reason[:1].upper()}{reason[1:]}; {self._advice}.") from error

    def help(self) -> str:
        """Every flag with its default, in its group."""
        lines: list[str] = []
        for group, texts in self._groups.items():
            lines += ["", f"{group}:"]
            for name, text in texts.items():
                flag = self.values[name]
                value = "" if flag.boolean else f"={_shown(flag)}"
                lines.append(f"  --{name}{value}")
                lines += textwrap.wrap(
                    text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
                )
        return "\n".join(lines[1:])


def _shown(flag: flags.Flag) -> str:
    """The choices, or the default, or what kind of value there is."""
    if isinstance(flag, flags.EnumFlag):
        return "|".join(flag.parser.enum_values)
    if flag.default in (None, []):
        return {"int": "N", "float": "X"}.get(flag.flag_type(), "TEXT")
    return str(flag.default)


def add_model_flags(into: Flags) -> None:
    """Adds the flags that name a target and a draft, their mesh and their type."""
    group = "Models"
    into.string(
        group, "target", None, "folder, GGUF file or hub id of the model whose text is wanted"
    )
    into.strings(
        group, "draft",
        "folder, GGUF file or hub id of the model that proposes; may be given several times, the "
        "first proposing to the target and each other one to the one before it; or ngram, which "
        "looks drafts up in the text so far; or self:int4 or self:int8, the target's own matrices, "
        "rounded",
    )  # fmt: skip
    into.string(
        group, "revision", None,
        "branch, tag or commit of the target's hub id; that of any model can follow its id, as in "
        "org/name@revision",
    )  # fmt: skip
    into.string(
        group, "mesh", "1x1",
        "devices along each axis, such as 8x8; a machine without accelerators simulates them",
    )  # fmt: skip
    into.choice(
        group, "dtype", None, ("float32", "bfloat16", "int8"),
        "type of weights and caches; if not given, float32 on CPUs and for the pair that ships "
        "with the package, and bfloat16 for others; int8 is for matrices, with bfloat16 for the "
        "rest",
    )  # fmt: skip
    into.string(
        group, "compilation_cache", None,
        "folder that keeps compiled programs for the next start, or off; if not given, that of the "
        "environment variable FLY_JAX_COMPILATION_CACHE, else one of the user's own",
    )  # fmt: skip


def add_prompt_flags(into: Flags, group: str) -> None:
    """Adds the flags of a file of prompts, and of how far and how many at a time they go on."""
    into.string(
        group, "prompts_file", None,
        "a prompt on each line, as plain text or as a JSON object with prompt, or with messages; - "
        "is standard input",
    )  # fmt: skip
    into.switch(
        group, "chat",
        "put prompts that are plain text as messages of a user; on by itself for a target with a "
        "chat template, --nochat to continue them as they stand",
    )  # fmt: skip
    into.string(group, "system", None, "message of the system, at the beginning of conversations")
    into.boolean(group, "skip_bad_prompts", "warn of a bad line in the file and go on")
    into.integer(group, "max_new_tokens", 128, "most tokens to add to a prompt", lower_bound=1)
    into.integer(group, "batch_size", 1, "prompts decoded together", lower_bound=1)


def add_decoding_flags(into: Flags, without: Sequence[str] = ()) -> None:
    """Adds a flag for every parameter of decoding that has one; None is 'not given'.

    Args:
      into: the command's flags.
      without: names of parameters that do not matter to the command.
    """
    into.string(
        "Decoding", "config", None,
        "file with these flags: TOML with their names, or JSON with the keys of FLy's reference "
        "code, whose tokens it then gives; flags on the command line come first",
    )  # fmt: skip
    shipped, others = (default_config(is_embedded=one).to_dict() for one in (True, False))
    for group, declared in parameter_groups().items():
        for one in declared:
            if one.flag and one.name not in without:
                differs = shipped.get(one.name) != others.get(one.name)
                into.parameter(group, one, shipped[one.name] if differs else None)


def add_seed_flag(into: Flags) -> None:
    """Adds the flag of the draws' seed."""
    into.integer("Sampling", "seed", 0, "seed of the draws", lower_bound=0, upper_bound=2**31 - 1)


def add_audit_flags(into: Flags) -> None:
    """Adds the flags of an audit."""
    group = "Audit"
    into.string(
        group, "audit", None,
        "file for every mismatch that was kept or refused, as JSON lines that the command audit "
        "sums up",
    )  # fmt: skip
    into.switch(
        group, "audit_exact",
        "audit: continue each prompt with the target's own text as well, so that the audit knows "
        "what differs; takes a second decoding (greedy only); --noaudit_exact to leave it out",
    )  # fmt: skip


def add_process_flags(into: Flags) -> None:
    """Adds the flags that say where the processes meet."""
    group = "Processes"
    into.string(
        group, "coordinator_address", None,
        "host and port of process 0, such as 10.0.0.1:8476; only needed where no cluster says so "
        "(TPU pods, GKE, Slurm and Open MPI do)",
    )  # fmt: skip
    into.integer(
        group, "num_processes", None,
        "processes that run this command, usually one on each host; 1 for this one alone, "
        "whatever the cluster says",
        lower_bound=1,
    )  # fmt: skip
    into.integer(group, "process_id", None, "which of them this is, from 0", lower_bound=0)
    into.integer(
        group, "coordinator_timeout", 300, "seconds to wait for the others", lower_bound=1
    )  # fmt: skip


def config_from_flags(values: flags.FlagValues) -> DecodingConfig:
    """The flags laid over the file that is named, or over what suits the pair.

    Raises:
      FlyJaxError: a file that cannot be read, or a value of no use.
    """
    if values.config:
        with joint_errors():  # all take process 0's file, as they do its prompts
            read = load_config(values.config).to_dict() if process_id() == 0 else None
        config = DecodingConfig(**broadcast(read))
    else:
        config = default_config(is_embedded=values.target is None and not values.draft)
    return config.replace(**decoding_overrides(values))


def decoding_overrides(values: flags.FlagValues) -> dict[str, Any]:
    """The decoding flags that were given."""
    given = {name: values[name].value for name in decoding_parameters() if name in values}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value not in (None, [])
    }
