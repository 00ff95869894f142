"""The settings of decoding as plain values, the same in flags, TOML files and Python."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import jax
import numpy as np

from fly_jax.decoding.deferral import check_deferral
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import (
    MOST_INT,
    MOST_TOKENS,
    Parameter,
    check_keys,
    parameter,
    parameters_of,
    values_of,
)
from fly_jax.verification.evidence import Entropy, Needs
from fly_jax.verification.rules import RULES, Budget, Exact, Fly, Loose, Rule
from fly_jax.verification.rules.loosened import LOSSLESS_RULES, Lossy, combined, rule_names
from fly_jax.verification.sampling import Sampling

Boundary = Literal["reject", "defer"]
Depth = int | Literal["auto"]

# K = auto chooses from these: 0 where drafting does not pay, and few others, since each is a width
# of the target's pass in every program of rounds. With the last token a block fills whole steps of
# products, or half of one (see `models/llama.py`).
AUTO_DEPTHS = (0, 1, 3, 7, 15)
# The config of the pair that ships with the package.
_EMBEDDED = Path(__file__).parents[1] / "configs" / "embedded_pair.toml"

_Declaring = TypeVar("_Declaring")


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The number of draft tokens, and the fate of mismatches at the end of a block.

    The parameters' help texts describe them. `lossless_speculative_tokens` is None for the same K
    as FLy's, whose best one is larger; `boundary` has no effect on lossless rules.
    """

    num_speculative_tokens: Depth = parameter(
        15,
        "draft tokens of a round (K); auto chooses K for each round from what is accepted and what "
        "a round takes; if not given, 3 for exact and sampled (7 with the pair that ships) and 15 "
        "for the other rules",
        low=1, high=MOST_TOKENS, word="auto",
    )  # fmt: skip
    lossless_speculative_tokens: int | None = parameter(
        None, "K of the rules exact and sampled", kind=int, low=1, high=MOST_TOKENS, flag=False
    )
    level_speculative_tokens: int = parameter(
        4,  # a level below is asked often, and what it proposes after an error is lost
        "draft tokens that each draft model but the first proposes at a time",
        low=1, high=MOST_TOKENS,
    )  # fmt: skip
    level_margin: float = parameter(
        0.0,
        "a draft model also takes a token from the level below that is at most so many nats less "
        "probable than its own choice",
        low=0.0,
    )
    draft_confidence: float = parameter(
        0.0,
        "a head that says how probable its tokens are to be accepted (DSpark) ends its draft "
        "before the first that is less so; 0 drafts whole blocks",
        low=0.0, high=1.0,
    )  # fmt: skip
    boundary: Boundary = parameter(
        "reject",
        "what becomes of a mismatch whose window does not fit into its block: it is refused, or "
        "kept provisionally where that is expected to pay",
        choices=get_args(Boundary),
    )

    @property
    def max_speculative_tokens(self) -> int:
        """The largest K that a round may have, whatever the rule."""
        lossless = self.lossless_speculative_tokens or 0
        return max(largest_depth(self.num_speculative_tokens), lossless)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Tokens that are never rescued, and the memory of the rule csd."""

    protect: tuple[str, ...] = parameter(
        (), r"never rescue tokens in whose text this regular expression is found, such as '\d'"
    )
    memory: str | None = parameter(
        None, "csd: file of the command calibrate to begin with", kind=str
    )
    csd_min_count: int = parameter(
        6, "csd: the memory knows what it has counted more often than this", low=0, high=MOST_INT
    )
    csd_online: bool = parameter(True, "csd: the memory learns while decoding")


@dataclasses.dataclass(frozen=True, init=False)
class DecodingConfig:
    """A config: the settings of decoding, without models, prompts and their limits.

    It is made of keywords, all of them flat: `rule`, and the parameters that `Drafting`, `Limits`,
    the rules, `Budget`, `Lookup` and `Sampling` declare, such as `entropy_threshold`;
    `decoding_parameters` has all. They are the keys of a TOML config and, but for a few, the
    command line's flags. A `Sampling` and a `Lookup` may be given as `sampling` and `lookup`, in
    place of their values. FlyJaxError for an unknown keyword, or values that no decoding can have.

    Attributes:
      rule: which draft tokens are kept: "autoregressive" (which drafts none), "exact", "sampled",
        or one or several of the registered rules, joined by & (rescues what both would), | (what
        either would) and parentheses. Given as a `Rule`, which is then `given_rule`, its text.
      rules: one of each registered kind, with this config's numbers.
      lookup: what it would look up with; `looks_up` says whether it does.
      sampling: how target and draft are drawn from; temperature 0 is greedy.
      temperature: as it was given, None for the one that suits the rule.
    """

    given_rule: Loose | None
    rules: tuple[Loose, ...]
    risk_budget: float | None
    drafting: Drafting
    limits: Limits
    lookup: Lookup
    looks_up: bool
    sampling: Sampling
    temperature: float | None
    rule: str = parameter("fly", "which draft tokens are kept")
    truncate: str | None = parameter(
        None, "loosened rule to whose support the target is cut before it is drawn from",
        flag=False,
    )  # fmt: skip

    def __init__(self, /, **given: Any) -> None:
        """Takes the settings by name; FlyJaxError for an unknown one."""
        _refuse_beside(given.get("rule"), given)
        self._fill(given)

    def _fill(self, given: dict[str, Any]) -> None:
        given = _spelled_out(given)
        rule, given_rule = given.get("rule"), None
        if any(map(np.ndim, jax.tree.leaves(rule))):
            raise FlyJaxError(
                f"rule is {rule}; a config takes one number for each parameter: give one, or give "
                "each request of an engine a rule of its own."
            )
        if isinstance(rule, Loose):
            given_rule, given["rule"] = rule, repr(rule)
        elif isinstance(rule, Rule):
            if not isinstance(rule, Exact):
                raise FlyJaxError(f"rule is {rule}, which is not loosened; derive it from Loose.")
            if rule.support is not None:
                raise FlyJaxError(
                    f"rule is {rule}, which cuts the target; give the name of the rule that it "
                    "cuts to as truncate, with the rule sampled."
                )
            given["rule"] = "sampled" if given.get("temperature") else "exact"
        known = decoding_parameters()
        check_keys(given, known)
        for name, value in given.items():
            if known[name].kind is tuple and isinstance(value, list):  # as TOML has them
                given[name] = tuple(value)
            if isinstance(value, np.generic):
                given[name] = value.item()
            known[name].check_given(given[name])
        values = {name: given.get(name, one.default) for name, one in known.items()}
        names = rule_names(values["rule"]) if given_rule is None else (values["rule"],)
        if len(names) == 1:
            values["rule"] = names[0]  # without spaces or parentheses
        drawn = temperature = values["temperature"]
        if temperature is None:
            drawn = 1.0 if values["rule"] == "sampled" or values["truncate"] else 0.0
        longest, shortest = values["prompt_lookup_max"], values["prompt_lookup_min"]
        self.__dict__.update(
            given_rule=given_rule, rule=values["rule"], truncate=values["truncate"],
            rules=tuple(_made(kind, values) for kind in RULES.values()),
            risk_budget=values["risk_budget"], temperature=temperature,
            drafting=_made(Drafting, values), limits=_made(Limits, values),
            lookup=_made(Lookup, values, max_ngram=longest or shortest), looks_up=longest > 0,
            sampling=_made(Sampling, values, temperature=drawn),
        )  # fmt: skip
        self._check(names)

    def _check(self, names: tuple[str, ...]) -> None:
        check_patterns(self.limits.protect)
        temperature, top_k, top_p = dataclasses.astuple(self.sampling)
        if self.rule == "exact" and temperature > 0:
            raise FlyJaxError(
                f"The rule exact is greedy and the temperature is {temperature}; give the "
                "rule sampled, which keeps the target's distribution, or temperature 0."
            )
        if self.rule == "sampled" and temperature == 0:
            raise FlyJaxError(
                "The rule sampled needs a temperature above 0 and was given 0; give a temperature, "
                "or the rule exact for greedy decoding."
            )
        uses_memory = self.given_rule is not None and self.given_rule.uses_memory
        if ("csd" in names or uses_memory) and temperature > 0:
            raise FlyJaxError(
                f"The rule csd is greedy and the temperature is {temperature}; give "
                "temperature 0, or a rule without csd."
            )
        threshold = next(one.threshold for one in self.rules if isinstance(one, Lossy))
        if "lossy" in names and temperature == 0 and threshold > 0.5:
            raise FlyJaxError(
                f"lossy_threshold is {threshold} and decoding is greedy: a draft token "
                "that probable is the target's own choice, so nothing would be rescued; give at "
                "most 0.5."
            )
        cut, limited = self.to_truncation(), self.risk_budget is not None
        if cut and (self.is_loosened or temperature == 0 or limited or cut.uses_memory):
            raise FlyJaxError(
                f"truncate is {self.truncate!r}, with the rule {self.rule} and temperature "
                f"{temperature}; it cuts what is drawn to what a rule would keep at a position: "
                "give it with the rule autoregressive or sampled and a temperature above 0, "
                "without csd's memory and a risk budget, which look further, and to no server."
            )
        if temperature == 0 and (top_k or top_p not in (None, 1)):
            raise FlyJaxError(
                f"top_k={top_k} and top_p={top_p} were given with greedy decoding, which "
                "they do not change; give a temperature above 0, or leave them out."
            )

    def to_dict(self) -> dict[str, Any]:
        """Every parameter by name, for a new config; a `Rule` that was given is a text here."""
        parts = (self, *self.rules, self.drafting, self.limits, self.lookup, self.sampling)
        found = {name: value for part in parts for name, value in values_of(part).items()}
        longest = self.lookup.max_ngram if self.looks_up else 0
        given = {"risk_budget": self.risk_budget, "temperature": self.temperature}
        return found | given | {"prompt_lookup_max": longest}

    def replace(self, /, **given: Any) -> DecodingConfig:
        """A copy with other values, named as in the class; a new K then holds for every rule."""
        if "num_speculative_tokens" in given:
            given = {"lossless_speculative_tokens": None} | given
        _refuse_beside(given.get("rule", self.given_rule), given)
        found = object.__new__(DecodingConfig)
        before = self.to_dict() | {"rule": self.given_rule or self.rule}
        found._fill(before | _spelled_out(given))
        return found

    def without_draft(self) -> DecodingConfig:
        """A copy for a target that nothing proposes to."""
        return self.replace(rule="autoregressive", temperature=self.sampling.temperature)

    @property
    def is_loosened(self) -> bool:
        """Tells whether the rule may keep mismatches."""
        return self.rule not in LOSSLESS_RULES

    @property
    def num_speculative_tokens(self) -> Depth:
        """The K of this rule's rounds; 0 without speculation."""
        if self.rule == "autoregressive":
            return 0
        lossless = self.drafting.lossless_speculative_tokens
        if self.rule in ("exact", "sampled") and lossless is not None:
            return lossless
        return self.drafting.num_speculative_tokens

    @property
    def fly(self) -> Fly:
        """FLy with this config's gate and window, whatever the rule."""
        return next(one for one in self.rules if isinstance(one, Fly))

    def to_rule(self) -> Rule:
        """The acceptance rule; FlyJaxError for bad values, or K without room for its window."""
        if not self.is_loosened:
            return Exact(self.to_truncation())
        rule = self.given_rule or self._loosened(self.rule)
        if self.risk_budget is not None:
            rule = Budget(rule, self.risk_budget)
        if self.drafting.boundary == "reject":
            rule.check(largest_depth(self.num_speculative_tokens))
        else:
            check_deferral(rule, self.to_sampling())
        return rule

    def to_truncation(self) -> Loose | None:
        """The rule to whose support the target is cut; None where it is not."""
        if self.truncate is None:
            return None
        if rule_names(self.truncate, "truncate")[0] in LOSSLESS_RULES:
            raise FlyJaxError(f"truncate is {self.truncate!r}; give a loosened rule, as margin is.")
        return self._loosened(self.truncate)

    def _loosened(self, text: str) -> Loose:
        """The rule that an expression names, with this config's parameters."""
        return combined(text, dict(zip(RULES, self.rules, strict=True)).__getitem__)

    def to_sampling(self) -> Sampling | None:
        """The sampling of both models, without steps that keep every token; None for greedy."""
        if self.sampling.temperature == 0:
            return None
        top_p = None if self.sampling.top_p == 1 else self.sampling.top_p
        return dataclasses.replace(self.sampling, top_k=self.sampling.top_k or None, top_p=top_p)

    def to_lookup(self) -> Lookup | None:
        """The lookup that proposes to the last draft model, or to the target; None without one."""
        return self.lookup if self.looks_up and self.rule != "autoregressive" else None

    def side_by_side(self) -> tuple[DecodingConfig, ...]:
        """The configs of a comparison: one token at a time, the lossless rule, the loosened one.

        The loosened one is FLy unless another was chosen; FLy as published, with this config's gate
        and window, then goes before it. FLy that was not asked for is left out if no window fits.
        """
        lossless = "sampled" if self.sampling.temperature > 0 else "exact"
        given = self.replace(temperature=self.sampling.temperature)
        first = [given.replace(rule=rule) for rule in ("autoregressive", lossless)]
        if self.truncate is not None:  # which no loosened rule goes with
            return tuple(first)
        if self.rule == "fly":
            return *first, given
        if not self.is_loosened:
            return *first, *_fitting(given.replace(rule="fly"))
        kept = {one.name for part in (Lookup, Sampling, Fly) for one in parameters_of(part)} | {
            "num_speculative_tokens", "level_speculative_tokens", "level_margin", "draft_confidence"
        }  # fmt: skip
        values = {name: value for name, value in given.to_dict().items() if name in kept}
        return *first, *_fitting(DecodingConfig(**values)), given


def _refuse_beside(rule: object, given: Mapping[str, Any]) -> None:
    """Raises FlyJaxError for a rule's number beside a `Rule` that has its own."""
    own = {one.name for kind in RULES.values() for one in parameters_of(kind)} & given.keys()
    if own and isinstance(rule, Loose):
        raise FlyJaxError(f"{min(own)} was given beside the rule {rule}; put it into that.")


def _fitting(config: DecodingConfig) -> tuple[DecodingConfig, ...]:
    """FLy, if its window fits into a block or may cross its end; else nothing."""
    k = largest_depth(config.num_speculative_tokens)
    return (config,) if config.drafting.boundary == "defer" or k > config.fly.window_size else ()


def largest_depth(num_speculative_tokens: Depth) -> int:
    """Returns K, or for "auto" the largest that it may choose."""
    return AUTO_DEPTHS[-1] if num_speculative_tokens == "auto" else num_speculative_tokens


def _made(declaring: type[_Declaring], values: Mapping[str, Any], **other: Any) -> _Declaring:
    """An instance of a class that declares parameters, with their values."""
    own = {one.field: values[one.name] for one in parameters_of(declaring)}
    return declaring(**own | other)


def check_patterns(patterns: Iterable[str]) -> None:
    """Raises FlyJaxError for one that is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise FlyJaxError(
                f"protect is {pattern!r}, which is no regular expression ({reason}); correct it, "
                r"or give one such as '\d'."
            ) from error


def _spelled_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with the values of a given `Sampling` or `Lookup`; None is as if not given."""
    kinds, found = {"sampling": Sampling, "lookup": Lookup}, dict[str, Any]()
    for name, value in given.items():
        if (kind := kinds.get(name)) is None or not isinstance(value, kind | None):
            found[name] = value
        elif value is None:
            known = decoding_parameters()
            found = {one.name: known[one.name].default for one in parameters_of(kind)} | found
        elif twice := (own := values_of(value)).keys() & given:
            raise FlyJaxError(f"{min(twice)} was given twice, once in {name}; leave one out.")
        else:
            found |= own
    return found


def default_config(*, is_embedded: bool) -> DecodingConfig:
    """The config of a pair where nobody gives one, in Python and on the command line.

    The pair that ships with the package is decoded as it was tuned. Any other is decoded exactly,
    with K = 3, and with the published K where a rule loosens: docs/real_pair.md says why.
    """
    values: dict[str, Any] = {"rule": "exact", "lossless_speculative_tokens": 3}
    if is_embedded:
        values = tomllib.loads(_EMBEDDED.read_text(encoding="utf-8"))
    return DecodingConfig(**values)


def parameter_groups() -> dict[str, tuple[Parameter, ...]]:
    """The parameters of a config, in groups; each is declared where it is used."""
    rules = f"{', '.join(LOSSLESS_RULES)}; or {', '.join(RULES)}"
    # Here these differ from their declarations, since a config may leave them out.
    here: dict[str, dict[str, Any]] = {
        "rule": {
            "help": f"which draft tokens are kept: {rules}, several joined by & (both keep it), | "
            "(either does) and parentheses, such as 'fly & margin'"
        },
        "prompt_lookup_max": {
            "default": 0,
            "low": 0,
            "help": "longest n-gram that drafts are looked up by in the text so far, for the last "
            "draft model, in front of a head, or alone; 0 for none, and if not given (8 with "
            "--draft ngram)",
        },
        "temperature": {
            "default": None,
            "help": "0 is greedy; if not given, 1 with the rule sampled and 0 with the others",
        },
    }
    groups: dict[str, tuple[type, ...]] = {
        "Decoding": (DecodingConfig, Drafting, Limits), "Loosened rules": tuple(RULES.values()),
        "Limits of loosened rules": (Budget,), "Lookup": (Lookup,), "Sampling": (Sampling,),
    }  # fmt: skip
    found = {}
    for group, parts in groups.items():
        own = (one for part in parts for one in parameters_of(part))
        found[group] = tuple(dataclasses.replace(one, **here.get(one.name, {})) for one in own)
    return found


def decoding_parameters() -> dict[str, Parameter]:
    """The parameters of a config, by name."""
    return {one.name: one for group in parameter_groups().values() for one in group}


def load_config(path: str | Path) -> DecodingConfig:
    """Reads a TOML config, or the reference code's JSON; FlyJaxError names what is wrong.

    What a TOML file does not name is as in `default_config` for a model that does not ship.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise FlyJaxError(
            f"The config {path} is neither .toml nor .json; give a TOML file with the flags' "
            "names, or a JSON file with the reference code's keys."
        )
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise FlyJaxError(
            f"The config {path} cannot be read ({error.strerror}); correct the path."
        ) from error
    except (ValueError, RecursionError) as error:  # of both parsers, and of text that is not UTF-8
        reason = " ".join(str(error).split()).rstrip(".")
        raise FlyJaxError(
            f"The config {path} is not valid {path.suffix[1:].upper()} ({reason}); correct it."
        ) from error
    try:
        if path.suffix == ".json":
            return from_reference_json(values)
        # Who asks for draws alone means the lossless rule that draws.
        draws = values.get("temperature") or values.get("truncate")
        rule = {"rule": "sampled"} if draws and "rule" not in values else {}
        return default_config(is_embedded=False).replace(**rule | values)
    except FlyJaxError as error:
        raise FlyJaxError(f"In the config {path}: {error}") from error


def from_reference_json(values: Any) -> DecodingConfig:
    """A config from that of the reference code (AMD-AGI/FLy), with its window, lookup and defaults.

    With temperature 0 the tokens are the reference's. With a temperature they are not: the
    reference then draws the target's tokens twice and drafts greedily, and FLy here rescues what
    rejection sampling refused. Keys that name models or logging are ignored. FlyJaxError for no
    JSON object, an unknown key, one that is missing, or an invalid value.
    """
    if not isinstance(values, dict):
        raise FlyJaxError("a JSON object was expected; write the reference code's keys in braces.")
    check_keys(values, (*_REFERENCE_DEFAULTS, *_REFERENCE_IGNORED))
    for name, default in _REFERENCE_DEFAULTS.items():
        if name in values:
            Parameter(name, name, type(default), default, help="").check_given(values[name])
    given = _REFERENCE_DEFAULTS | values
    if given["dual_tok"]:
        raise FlyJaxError(
            "dual_tok is true; draft and target must share a tokenizer: choose such a pair and "
            "leave the key out."
        )
    if "spd_k" not in values:
        raise FlyJaxError("spd_k is missing; give the number of draft tokens of a round.")
    has_window = given["enable_fly"] and not given["abla_no_window"]
    if has_window and "win_len" not in values:
        raise FlyJaxError("win_len is missing; enable_fly needs the window's length.")
    rule = "sampled" if given["temperature"] > 0 else "exact"
    rule = "fly" if given["enable_fly"] else rule
    return DecodingConfig(
        rule=rule if given["use_sd"] else "autoregressive", num_speculative_tokens=given["spd_k"],
        entropy_threshold=given["entropy_thre"], window_size=given["win_len"] if has_window else 0,
        window="reference", entropy="top_k", entropy_top_k=3,
        prompt_lookup_max=given["max_ngram_size"] if given["use_ngram"] else 0, prompt_lookup_min=1,
        prompt_lookup_tokens=given["num_ngram_pred_tokens"], prompt_lookup_match="earliest",
        temperature=given["temperature"],
    )  # fmt: skip


# Of these spd_k must be given, and win_len with enable_fly.
_REFERENCE_DEFAULTS: dict[str, Any] = {
    "spd_k": 0, "enable_fly": False, "win_len": 0, "entropy_thre": 0.0, "abla_no_window": False,
    "use_ngram": False, "max_ngram_size": 3, "num_ngram_pred_tokens": 10, "temperature": 0.0,
    "dual_tok": False, "use_sd": True,
}  # fmt: skip
_REFERENCE_IGNORED = ("target_model_path", "draft_model_path", "verbose")


@dataclasses.dataclass(frozen=True)
class RoundStatic:
    """The static part of a round: it is compiled for that, the models and the kind of rule."""

    num_speculative_tokens: int  # K, or the largest one; 0 decodes one token at a time
    lookup: Lookup | None = None  # what proposes to the last draft model, or to the target
    eos_token_ids: tuple[int, ...] = ()
    rounds_per_dispatch: int = 1  # rounds that run before their tokens leave the device
    # What K is chosen from, round by round, in ascending order and ending with the largest; with 0,
    # rounds without a draft. Empty for the same K in all rounds.
    depths: tuple[int, ...] = ()
    # These three fill `RoundOutput.reports`: for a memory of corrections; for `Generation.reports`,
    # with an entropy even where the rule asks for none; for `Generation.logprobs`, with so many of
    # the target's most probable tokens at each position.
    reports_mismatches: bool = False
    audits: bool = False
    max_logprobs: int = 0
    # Fills `RoundOutput.draft_tokens` and `.evidence`, by which other settings can be judged.
    reports_evidence: bool = False
    # The rule's window, where one that does not fit into its block may be completed in the next
    # rounds; 0 where it is refused, as published.
    deferred_window: int = 0
    level_speculative_tokens: tuple[int, ...] = ()  # of each draft model but the first
    level_margin: float = 0.0
    draft_confidence: float = 0.0

    def __post_init__(self) -> None:
        k, depths = self.num_speculative_tokens, self.depths
        ascends = depths == tuple(sorted(set(depths)))
        if depths and not (ascends and depths[0] >= 0 and depths[-1] == k):
            raise FlyJaxError(
                f"The depths to choose from are {depths}; they must be at least 0, ascend and end "
                f"with num_speculative_tokens={k}: correct them."
            )
        if k < 0 or self.rounds_per_dispatch < 1:
            raise FlyJaxError(
                f"A round was asked for with num_speculative_tokens={k} and rounds_per_dispatch="
                f"{self.rounds_per_dispatch}; they must be at least 0 and 1: correct them."
            )
        if any(size < 1 for size in self.level_speculative_tokens):
            raise FlyJaxError(
                f"level_speculative_tokens is {self.level_speculative_tokens}; a draft model "
                "proposes at least 1 token at a time: give larger numbers."
            )

    @property
    def reports(self) -> bool:
        """Tells whether rounds report on every token."""
        return self.reports_mismatches or self.audits or self.max_logprobs > 0

    def needs(self, rule: Rule) -> Needs:
        """The fields of the evidence: the rule's, those that are asked for, an audit's entropy.

        An audit of a rule without an entropy takes that of the whole vocabulary if the rule reads
        it, and otherwise the one that FLy's gate is published with.
        """
        needs = rule.needs | Needs(top=self.max_logprobs)
        if needs.entropy is not None or not self.audits:
            return needs
        return needs | Needs(entropy=Entropy("full") if needs.full_entropy else Entropy())

    def may_copy(self, drafter: Drafter | None) -> bool:
        """Tells whether a lookup may draft in the drafter's place: where K is chosen, 0 too."""
        return drafter is not None and drafter.num_models > 0 and 0 in self.depths

    def widths(self, drafter: Drafter | None) -> tuple[int, ...]:
        """Draft tokens that the target's pass may be made for, in ascending order."""
        k = self.num_speculative_tokens
        if self.depths or drafter is None or not drafter.may_fall_short:
            return self.depths or (k,)
        shorter = AUTO_DEPTHS if isinstance(drafter, Lookup) else AUTO_DEPTHS[1:]
        return (*(depth for depth in shorter if depth < k), k)


@dataclasses.dataclass(frozen=True)
class RoundSpec:
    """A rule, a sampling and the static part of a round; the numbers outside that part are data."""

    rule: Rule
    static: RoundStatic
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if self.static.deferred_window:
            check_deferral(self.rule, self.sampling)

    def with_static(self, **given: Any) -> RoundSpec:
        """A copy with other values of `RoundStatic`."""
        return dataclasses.replace(self, static=dataclasses.replace(self.static, **given))

    @classmethod
    def of(
        cls, config: DecodingConfig, *, num_drafts: int, eos_token_ids: tuple[int, ...] = (),
        rounds_per_dispatch: int = 1, audits: bool = False,
    ) -> RoundSpec:  # fmt: skip
        """The rounds that a config describes; FlyJaxError where its values describe none."""
        k, depths = config.num_speculative_tokens, tuple[int, ...]()
        if k == "auto":
            k, depths = AUTO_DEPTHS[-1], AUTO_DEPTHS
        rule, sizes, levels = config.to_rule(), config.drafting, num_drafts - 1 if k else 0
        static = RoundStatic(
            num_speculative_tokens=k, lookup=config.to_lookup(), eos_token_ids=eos_token_ids,
            rounds_per_dispatch=rounds_per_dispatch, depths=depths,
            reports_mismatches=config.limits.csd_online and rule.uses_memory, audits=audits,
            deferred_window=rule.longest_window if sizes.boundary == "defer" else 0,
            level_speculative_tokens=(sizes.level_speculative_tokens,) * levels,
            level_margin=sizes.level_margin, draft_confidence=sizes.draft_confidence,
        )  # fmt: skip
        return cls(rule, static, config.to_sampling())
