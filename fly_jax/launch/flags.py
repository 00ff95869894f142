"""The flags of the commands, in groups, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, dataclass_transform

from absl import flags

from fly_jax.decoding.config import DecodingConfig, default_config, load_config, parameter_groups
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import Parameter, ParameterValue, parameter, parameters_of
from fly_jax.sharding.processes import broadcast, joint_errors, process_id

if TYPE_CHECKING:
    from fly_jax.decoding.pair import Dtype

_WIDTH = 96
_NO_NUMBER = {"invalid literal for int": "no whole number", "could not convert": "no number"}
DTYPES = ("float32", "bfloat16", "int8")
_Class = TypeVar("_Class")
_Values = TypeVar("_Values")

# The head and the own flags of each group.
_DECLARED: dict[type, tuple[str, list[Parameter]]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def flag_group(head: str = "") -> Callable[[type[_Class]], type[_Class]]:
    """Declares flags: a class decorator. Without a head it unites the groups it inherits from."""

    def declare(declaring: type[_Class]) -> type[_Class]:
        group = dataclasses.dataclass(frozen=True, kw_only=True)(declaring)
        if head:
            names = group.__annotations__
            _DECLARED[group] = head, [one for one in parameters_of(group) if one.field in names]
        return group

    return declare


class _IntegerOrWord(flags.ArgumentParser[int | str]):
    """A parser of a whole number, or of a word, which whoever takes the value checks."""

    def parse(self, argument: str) -> int | str:
        """Takes what is no number for a word."""
        try:
            return int(argument)
        except ValueError:
            return argument


class Flags(Generic[_Values]):
    """The flags of a command: declared by dataclasses, and parsed once into an instance of one.

    They live in an absl `FlagValues` of their own: the process-wide one has those of every imported
    library.
    """

    def __init__(self, command: str, kind: type[_Values], without: Sequence[str] = ()) -> None:
        """Defines the flags of `kind`, its own first; `without` names parameters of decoding."""
        self.command, self._kind = command, kind
        self._flags = flags.FlagValues()
        self._groups: dict[str, dict[str, str]] = {}
        self._decoding: list[str] = []
        for group in kind.__mro__:
            head, declared = _DECLARED.get(group, ("", []))
            for one in declared:
                self._add(head, one, one.default, one.help)
            if group is DecodingFlags:
                self._add_decoding(without)
        asks = Parameter("help", "help", bool, False, "show this")
        self._add(next(iter(self._groups)), asks, False, asks.help)

    def _add(self, group: str, one: Parameter, default: Any, text: str) -> None:
        flags.DEFINE_flag(_flag(one, default, text), self._flags, module_name=group)
        more = "; may be given several times" if one.kind is tuple else ""
        more += f"; --no{one.name} to switch it off" if one.default is True else ""
        self._groups.setdefault(group, {})[one.name] = text + more

    def _add_decoding(self, without: Sequence[str]) -> None:
        """Adds a flag for every parameter of decoding that has one; None is 'not given'."""
        shipped, others = (default_config(is_embedded=one).to_dict() for one in (True, False))
        for group, declared in parameter_groups().items():
            for one in declared:
                if not one.flag or one.name in without:
                    continue
                differs = shipped.get(one.name) != others.get(one.name)
                if (usual := others.get(one.name)) is not None:
                    one = dataclasses.replace(one, default=usual)
                text = _described(one, shipped[one.name] if differs else None)
                # The config checks numbers, whoever has given them.
                self._add(group, dataclasses.replace(one, low=None, high=None), None, text)
                self._decoding.append(one.name)

    def parse(self, arguments: Sequence[str], help: str) -> _Values:
        """Parses the flags' values; SystemExit after the help, if that was asked for.

        A field `file` gets the one argument that is no flag, wherever it stands. FlyJaxError for an
        unknown flag, a wrong value, or an argument too many.
        """
        takes_file = hasattr(self._kind, "file")
        self._flags.set_gnu_getopt(takes_file)
        rest = self._rest(arguments)
        if takes_file and len(rest) > 1:
            raise FlyJaxError(
                f"{self.command} takes one file and was given {len(rest)}, '{rest[0]}' and "
                f"'{rest[1]}' among them; {self._advice}."
            )
        if rest and not takes_file:
            raise FlyJaxError(
                f"'{rest[0]}' is no flag; flags begin with --, and a command comes before them: "
                f"{self._advice}."
            )
        given = {name: self._flags[name].value for name in self._flags}
        found = {name: tuple(of) if isinstance(of, list) else of for name, of in given.items()}
        for name, of in found.items():
            for text in of if isinstance(of, tuple) else (of,):
                if str(text).startswith("--") and str(text)[2:].partition("=")[0] in self._flags:
                    raise FlyJaxError(f"--{name} needs a value before {text}; {self._advice}.")
        for one in parameters_of(self._kind):  # type: ignore[arg-type]
            dataclasses.replace(one, name=f"--{one.name}").check_given(found[one.name])
        if rest:
            found["file"] = rest[0]
        if found.pop("help"):
            print(f"{help}\n{self.help()}", flush=True)
            raise SystemExit(0)
        if self._decoding:
            found["given"] = givens({name: found.pop(name) for name in self._decoding})
        return self._kind(**found)

    @property
    def _advice(self) -> str:
        return f"see python -m fly_jax.launch {self.command} --help"

    def _rest(self, arguments: Sequence[str]) -> list[str]:
        """Parses the flags, and returns the arguments that are none."""
        try:
            return self._flags([self.command, *arguments])[1:]
        except flags.UnrecognizedFlagError as error:
            close = difflib.get_close_matches(error.flagname, list(self._flags), n=1)
            hint = f"the nearest is --{close[0]}" if close else self._advice
            raise FlyJaxError(f"{self.command} has no flag --{error.flagname}; {hint}.") from error
        except flags.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            for python, words in _NO_NUMBER.items():
                reason = re.sub(f": {python}.*", f" is {words}", reason)
            raise FlyJaxError(f"{reason[:1].upper()}{reason[1:]}; {self._advice}.") from error

    def help(self) -> str:
        """The help: all flags with their defaults, in their groups."""
        lines: list[str] = []
        for group, texts in self._groups.items():
            lines += ["", f"{group}:"]
            for name, text in texts.items():
                flag = self._flags[name]
                value = "" if flag.boolean else f"={_shown(flag)}"
                wrapped = textwrap.wrap(text, _WIDTH - 6)
                lines += [f"  --{name}{value}", *(f"      {line}" for line in wrapped)]
        return "\n".join(lines[1:])


def _flag(one: Parameter, default: Any, text: str) -> flags.Flag:
    if one.choices:
        return flags.EnumFlag(one.name, default, text, one.choices)
    if one.kind is bool:
        return flags.BooleanFlag(one.name, default, text)
    parser: flags.ArgumentParser[Any] = flags.ArgumentParser[str]()
    if one.word:
        parser = _IntegerOrWord()
    elif one.kind is int:
        parser = flags.IntegerParser(one.low, one.high)  # type: ignore[arg-type]
    elif one.kind is float:
        parser = flags.FloatParser()
    serializer = flags.ArgumentSerializer[Any]()
    if one.kind is tuple:
        return flags.MultiFlag(parser, serializer, one.name, [], text)
    return flags.Flag(parser, serializer, one.name, default, text)


def _described(one: Parameter, shipped: Any) -> str:
    """The help of a parameter, with its default and, as `shipped`, that of our own pair."""
    text = one.help
    if "if not given" in text:
        return text
    if one.default is not True and (one.default not in (None, ()) or shipped is not None):
        default = "none" if one.default in (None, ()) else one.default
        text = f"{text}; {default} if not given"
    if shipped is not None:
        value = " ".join(shipped) if isinstance(shipped, tuple) else shipped
        text = f"{text}, {value} with the pair that ships with the package"
    return text


def _shown(flag: flags.Flag) -> str:
    """The choices of a flag, its default, or the kind of its value."""
    if isinstance(flag, flags.EnumFlag):
        return "|".join(flag.parser.enum_values)
    if flag.default in (None, []):
        return {"int": "N", "float": "X"}.get(flag.flag_type(), "TEXT")
    return str(flag.default)


@flag_group("Models")
class ModelFlags:
    """A target and a draft, their mesh and their type."""

    target: str | None = parameter(None, "folder, GGUF file or hub id of the model to decode with")
    draft: tuple[str, ...] = parameter(
        (),
        "folder, GGUF file or hub id of the model that proposes, the first of several to the "
        "target and each other one to the one before it; or ngram, which looks drafts up in the "
        "text so far; or self:int4 or self:int8, the target's own matrices, rounded",
    )
    draft_parallel: int | None = parameter(
        None,
        "token that the last draft model answers in one pass for all it drafts (PARD), where its "
        "config.json names no pard_token",
        kind=int, low=0,
    )  # fmt: skip
    revision: str | None = parameter(
        None,
        "branch, tag or commit of the target's hub id; any id can have its own, org/name@revision",
    )
    mesh: str = parameter(
        "1x1", "devices along each axis, such as 8x8; a machine without accelerators simulates them"
    )
    dtype: Dtype | None = parameter(
        None,
        "type of weights and caches; if not given, float32 for the pair that ships with the "
        "package and on CPUs (there int8 for large targets), and bfloat16 for others; int8 is for "
        "matrices, with that type for the rest",
        choices=DTYPES,
    )
    compilation_cache: str | None = parameter(
        None,
        "folder that keeps compiled programs for the next start, or off; if not given, that of the "
        "environment variable FLY_JAX_COMPILATION_CACHE, else one of the user's own",
    )
    weights_cache: str | None = parameter(
        None,
        "folder that keeps converted weights for the next start, or off; if not given, that of the "
        "environment variable FLY_JAX_WEIGHTS_CACHE, else one of the user's own",
    )

    @property
    def has_draft(self) -> bool:
        """Tells whether a draft was given, or the pair of the package has one."""
        return self.target is None or bool(self.draft)

    def proposes(self, config: DecodingConfig) -> bool:
        """Tells whether a draft, or the config's lookup, proposes to the target."""
        return self.has_draft or config.to_lookup() is not None

    def proposing(self, config: DecodingConfig) -> DecodingConfig:
        """The config, or its form without a draft where nothing proposes.

        FlyJaxError where the rule is loosened, and so was asked for.
        """
        if self.proposes(config) or not config.num_speculative_tokens:
            return config
        if config.is_loosened:
            raise self.without_proposals(f"the rule {config.rule}")
        return config.without_draft()

    def without_proposals(self, wanted: str) -> FlyJaxError:
        """The error for what needs a draft, where nothing proposes."""
        return FlyJaxError(
            f"--target was given without --draft, and {wanted} needs something that proposes; "
            "give --draft, which may be ngram, or --rule autoregressive to decode with the "
            "target alone."
        )

    @property
    def is_embedded(self) -> bool:
        """Tells whether the pair is the one that ships with the package."""
        return self.target is None and not self.draft


@flag_group("Prompts")
class PromptFlags:
    """A file of prompts, and the lengths and number of continuations."""

    prompts_file: str | None = parameter(
        None,
        "a prompt a line, as text or a JSON object with prompt or messages; - is standard input",
    )
    chat: bool | None = parameter(
        None,
        "put prompts that are plain text as messages of a user; on by itself for a target with a "
        "chat template, --nochat to continue them as they stand",
        kind=bool,
    )
    system: str | None = parameter(None, "message of the system, at the beginning of conversations")
    skip_bad_prompts: bool = parameter(False, "warn of a bad line in the file and go on")
    max_new_tokens: int = parameter(128, "most tokens to add to a prompt", low=1)
    batch_size: int = parameter(1, "prompts decoded together", low=1)


@flag_group()
class BatchFlags(ModelFlags, PromptFlags):
    """Models, and the prompts that they continue."""


def givens(values: Mapping[str, ParameterValue | None]) -> tuple[tuple[str, ParameterValue], ...]:
    """Values by name, without those that nobody gave."""
    return tuple((name, one) for name, one in values.items() if one is not None and one != ())


@flag_group("Decoding")
class DecodingFlags:
    """Flags of decoding: a file, and the parameters that were given, by name."""

    config: str | None = parameter(
        None,
        "file with these flags: TOML with their names, or JSON with the keys of FLy's reference "
        "code, whose tokens it then gives; flags on the command line come first",
    )
    given: tuple[tuple[str, ParameterValue], ...] = ()

    def gives(self, name: str) -> bool:
        """Tells whether a parameter of decoding was given."""
        return name in dict(self.given)

    def to_config(self, models: ModelFlags | None = None) -> DecodingConfig:
        """The flags over a file, or over the models' default; FlyJaxError for a wrong one.

        Without models, as in a plan, they are laid over FLy as published.
        """
        if not self.config:
            config = default_config(is_embedded=models.is_embedded) if models else DecodingConfig()
        else:
            with joint_errors():  # all take process 0's file, as they do its prompts
                read = load_config(self.config).to_dict() if process_id() == 0 else None
            config = DecodingConfig(**broadcast(read))
        given = dict(self.given)
        # Who asks for draws alone means the lossless rule that draws.
        if models and not self.config and config.rule == "exact" and given.get("temperature"):
            given = {"rule": "sampled"} | given
        config, asked = config.replace(**given), self.gives("rule") or self.config
        if models and asked and config.num_speculative_tokens and not models.proposes(config):
            raise models.without_proposals(f"the rule {config.rule}")
        return config


@flag_group("Sampling")
class SeedFlags:
    """The seed of the draws."""

    seed: int = parameter(0, "seed of the draws", low=0, high=2**31 - 1)


@flag_group("Audit")
class AuditFlags:
    """The file for mismatches."""

    audit: str | None = parameter(
        None,
        "file for every mismatch, kept or refused, as JSON lines that the command audit sums up",
    )
    audit_exact: bool | None = parameter(
        None,
        "audit: decode once more, by the target alone (greedy), to see what differs; on by default",
        kind=bool,
    )


@flag_group("Processes")
class ProcessFlags:
    """The place of this process among several, and where they meet."""

    coordinator_address: str | None = parameter(
        None,
        "host and port of process 0, such as 10.0.0.1:8476; only needed where no cluster says so "
        "(TPU pods, GKE, Slurm and Open MPI do)",
    )
    num_processes: int | None = parameter(
        None,
        "processes that run this command, usually one on each host; 1 for this one alone, "
        "whatever the cluster says",
        kind=int, low=1,
    )  # fmt: skip
    process_id: int | None = parameter(None, "which of them this is, from 0", kind=int, low=0)
    coordinator_timeout: int = parameter(300, "seconds to wait for the others", low=1)


@flag_group()
class RunFlags(BatchFlags, DecodingFlags, SeedFlags, ProcessFlags):
    """Flags for prompts that are continued in one process or several."""
