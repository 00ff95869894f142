"""How to decode, as plain values: from flags, a TOML file, or the reference code's JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fly_jax.decoding.checks import check_keys, check_type
from fly_jax.decoding.protection import compile_patterns
from fly_jax.errors import FlyJaxError
from fly_jax.verification.expression import LOSSLESS_RULES, combined, rule_names

if TYPE_CHECKING:  # the values are checked before JAX is imported
    from fly_jax.decoding.drafters.lookup import Lookup
    from fly_jax.decoding.drafters.stopping import EntropyStop
    from fly_jax.verification.rules import Loose, Rule
    from fly_jax.verification.sampling import Sampling


# What K is chosen from where it is not given: each is a program of its own within the round, and
# between two neighbours there is little to gain.
AUTO_DEPTHS = (2, 5, 9, 15, 24)
# A level below the draft model is asked often, and what it proposes after an error is lost.
DEFAULT_LEVEL_TOKENS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Everything about decoding but the models, the prompts and the limits.

    The fields are the keys of a TOML config and, but for `window` and `prompt_lookup_match`, the
    command line's flags.

    Attributes:
      rule: which draft tokens are kept: "autoregressive" (which drafts none), "exact", "sampled",
        or one or several of "fly", "csd", "lossy", "lenience", "typical" and "margin", joined by &
        (rescues what both would), | (what either would) and parentheses.
      num_speculative_tokens: K, the draft tokens of a round; "auto" chooses one of `AUTO_DEPTHS`
        for each round, from what is accepted and what a round takes on this machine.
      lossless_speculative_tokens: K of the rules exact and sampled, whose best one is smaller than
        FLy's; None for the same.
      level_speculative_tokens: tokens that each draft model but the first proposes at a time, for
        the one before it; without effect with one draft model.
      draft_stop: "entropy" ends a row's drafting where the draft model is in doubt, see
        `EntropyStop`; "never" drafts K tokens.
      entropy_threshold: see `Fly`.
      window_size: see `Fly`.
      window: see `Fly`.
      boundary: see `RoundSpec`; without effect on lossless rules.
      entropy: see `Fly`.
      entropy_top_k: see `Fly`.
      window_mismatches: see `Fly`.
      csd_consistency: see `Csd`; 0 leaves this half out.
      csd_memory: see `Csd`; false leaves that half out.
      csd_min_count: see `CorrectionMemory.min_count`.
      csd_online: the memory also counts what is corrected while decoding.
      memory: file of a `CorrectionMemory` to begin with.
      lossy_threshold: see `Lossy`.
      lenience: see `Lenience`.
      typical_epsilon: see `Typical`.
      typical_delta: see `Typical`.
      margin: see `Margin.kind`.
      margin_gap: see `Margin`.
      margin_ratio: see `Margin`.
      risk_budget: see `Budget.total`; None for no budget, and none of the two limits that follow.
      risk_per_token: see `Budget`.
      risk_per_block: see `Budget`.
      protect: tokens whose text one of these regular expressions is found in are never rescued,
        nor replaced by a rescue.
      prompt_lookup_max: longest n-gram of the drafting level below the draft model; 0 for no such
        level.
      prompt_lookup_min: shortest n-gram.
      prompt_lookup_tokens: most tokens that the lookup proposes.
      prompt_lookup_match: see `Lookup`.
      temperature: 0 is greedy; None is 1 with the rule "sampled", and 0 with the others.
      top_k: see `Sampling`.
      top_p: see `Sampling`.

    Raises:
      FlyJaxError: values of which no rule can be made.
    """

    rule: str = "fly"
    num_speculative_tokens: int | Literal["auto"] = 15
    lossless_speculative_tokens: int | None = None
    level_speculative_tokens: int = DEFAULT_LEVEL_TOKENS
    draft_stop: Literal["never", "entropy"] = "never"
    entropy_threshold: float = 0.3
    window_size: int = 6
    window: Literal["paper", "reference"] = "paper"
    boundary: Literal["reject", "defer"] = "reject"
    entropy: Literal["top_k", "full", "normalized"] = "top_k"
    entropy_top_k: int = 3
    window_mismatches: int = 0
    csd_consistency: float = 0.01
    csd_memory: bool = True
    csd_min_count: int = 6
    csd_online: bool = True
    memory: str | None = None
    lossy_threshold: float = 0.3
    lenience: float = 0.5
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    margin: Literal["gap", "runner_up"] = "gap"
    margin_gap: float = 0.3
    margin_ratio: float = 0.9
    risk_budget: float | None = None
    risk_per_token: float | None = None
    risk_per_block: int | None = None
    protect: tuple[str, ...] = ()
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 1
    prompt_lookup_tokens: int = 6
    prompt_lookup_match: Literal["earliest", "latest"] = "latest"
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            check_type(name, value, kind)
            if isinstance(value, float) and not math.isfinite(value):
                raise FlyJaxError(f"{name} is {value}; it must be a finite number: correct it.")
        names = rule_names(self.rule)
        if len(names) == 1:
            object.__setattr__(self, "rule", names[0])  # without spaces or parentheses
        compile_patterns(self.protect)
        for name in (
            "num_speculative_tokens", "lossless_speculative_tokens", "level_speculative_tokens"
        ):  # fmt: skip
            given = getattr(self, name)
            if isinstance(given, int) and given < 1:
                raise FlyJaxError(
                    f"{name} is {given}; a round drafts at least 1 token: give a larger number, or "
                    "the rule autoregressive to draft none."
                )
        if self.risk_budget is not None and not self.risk_budget >= 0:
            raise FlyJaxError(
                f"risk_budget is {self.risk_budget}; it must be a number of at least 0: give 0 for "
                "lossless decoding."
            )
        if self.prompt_lookup_max < 0:
            raise FlyJaxError(
                f"prompt_lookup_max is {self.prompt_lookup_max}; it must not be negative: give 0 "
                "for no lookup."
            )
        if not (math.isfinite(self._temperature) and self._temperature >= 0):
            raise FlyJaxError(
                f"The temperature is {self.temperature}; it must be a number of at least 0: give 0 "
                "for greedy decoding."
            )
        if self.rule == "exact" and self._temperature > 0:
            raise FlyJaxError(
                f"The rule exact is greedy and the temperature is {self.temperature}; give the "
                "rule sampled, which keeps the target's distribution, or temperature 0."
            )
        if self.rule == "sampled" and self._temperature == 0:
            raise FlyJaxError(
                "The rule sampled needs a temperature above 0 and was given 0; give a temperature, "
                "or the rule exact for greedy decoding."
            )
        if "csd" in names and self._temperature > 0:
            raise FlyJaxError(
                f"The rule csd is greedy and the temperature is {self.temperature}; give "
                "temperature 0, or a rule without csd."
            )
        if self.csd_min_count < 0:
            raise FlyJaxError(
                f"csd_min_count is {self.csd_min_count}; it must not be negative: 6 is usual."
            )
        if self.risk_budget is None and (self.risk_per_token, self.risk_per_block) != (None, None):
            raise FlyJaxError(
                "risk_per_token or risk_per_block was given without risk_budget, of which they are "
                "limits; give risk_budget as well."
            )
        if self._temperature == 0 and (self.top_k != 0 or self.top_p != 1):
            raise FlyJaxError(
                f"top_k={self.top_k} and top_p={self.top_p} were given with greedy decoding, which "
                "they do not change; give a temperature above 0, or leave them out."
            )

    @property
    def _temperature(self) -> float:
        default = 1.0 if self.rule == "sampled" else 0.0
        return default if self.temperature is None else self.temperature

    @property
    def is_loosened(self) -> bool:
        """The rule may keep mismatches."""
        return self.rule not in LOSSLESS_RULES

    @property
    def num_drafted(self) -> int | Literal["auto"]:
        """K as `Pair.spec` takes it: 0 without speculation."""
        if self.rule == "autoregressive":
            return 0
        if self.rule in ("exact", "sampled") and self.lossless_speculative_tokens is not None:
            return self.lossless_speculative_tokens
        return self.num_speculative_tokens

    def to_rule(self) -> Rule:
        """The acceptance rule.

        Raises:
          FlyJaxError: a value outside its range, or K that leaves no room for FLy's window.
        """
        from fly_jax.verification.rules import Budget, Exact

        if not self.is_loosened:
            return Exact()
        rule = combined(self.rule, self._loosened)
        if self.risk_budget is not None:
            rule = Budget(rule, self.risk_budget, self.risk_per_token, self.risk_per_block)
        if self.boundary == "reject":
            rule.check(self.largest_k)
        elif self._temperature > 0 or not rule.longest_window or rule.has_lax_windows:
            raise FlyJaxError(
                f"boundary is 'defer' with the rule {self.rule}, temperature "
                f"{self._temperature:g} and window_mismatches {self.window_mismatches}; windows "
                "are deferred in greedy decoding, with a rule that has one, such as fly, and "
                "without mismatches in it: change them, or leave boundary at 'reject'."
            )
        return rule

    @property
    def round_boundary(self) -> Literal["reject", "defer"]:
        """`boundary` as `Pair.spec` takes it: nothing is deferred by a lossless rule."""
        return self.boundary if self.is_loosened else "reject"

    @property
    def largest_k(self) -> int:
        """The largest K of a loosened rule's rounds."""
        given = self.num_speculative_tokens
        return AUTO_DEPTHS[-1] if given == "auto" else given

    @property
    def most_drafted(self) -> int:
        """The largest K that a round may have, whatever the rule."""
        return max(self.largest_k, self.lossless_speculative_tokens or 0)

    def to_sampling(self) -> Sampling | None:
        """How target and draft are drawn from; None for greedy decoding.

        Raises:
          FlyJaxError: a value outside its range.
        """
        from fly_jax.verification.sampling import Sampling

        if self._temperature == 0:
            return None
        return Sampling(
            self._temperature, self.top_k or None, None if self.top_p == 1 else self.top_p
        )

    def _loosened(self, name: str) -> Loose:
        """One of the rules that `rule` is made of."""
        from fly_jax.verification.rules import Csd, Fly, Lenience, Lossy, Margin, Typical

        if name == "csd":
            return Csd(self.csd_consistency or None, self.csd_memory)
        if name == "lossy":
            return Lossy(self.lossy_threshold)
        if name == "lenience":
            return Lenience(self.lenience)
        if name == "typical":
            return Typical(self.typical_epsilon, self.typical_delta)
        if name == "margin":
            return Margin(self.margin, self.margin_gap, self.margin_ratio)
        return Fly(
            self.entropy_threshold,
            self.window_size,
            self.entropy,
            self.entropy_top_k,
            self.window,
            self.window_mismatches,
        )

    def to_lookup(self) -> Lookup | None:
        """The drafting level below the draft model, if there is one.

        Raises:
          FlyJaxError: a value outside its range.
        """
        from fly_jax.decoding.drafters.lookup import Lookup

        if self.prompt_lookup_max == 0 or self.rule == "autoregressive":
            return None
        return Lookup(
            self.prompt_lookup_max,
            self.prompt_lookup_min,
            self.prompt_lookup_tokens,
            self.prompt_lookup_match,
        )

    def to_draft_stop(self) -> EntropyStop | None:
        """What ends a row's drafting early, if anything does."""
        from fly_jax.decoding.drafters.stopping import EntropyStop

        return EntropyStop() if self.draft_stop == "entropy" else None

    def side_by_side(self) -> tuple[DecodeConfig, ...]:
        """What a comparison runs: one token at a time, the lossless rule, and the loosened one.

        That is FLy unless another one is chosen; then FLy as published goes before it, with this
        config's gate and window, where the window fits.
        """
        lossless = "sampled" if self._temperature > 0 else "exact"
        given = dataclasses.replace(self, temperature=self._temperature)
        first = [dataclasses.replace(given, rule=rule) for rule in ("autoregressive", lossless)]
        if self.rule in (*LOSSLESS_RULES, "fly"):
            return *first, dataclasses.replace(given, rule="fly")
        published = DecodeConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            level_speculative_tokens=self.level_speculative_tokens,
            draft_stop=self.draft_stop,
            entropy_threshold=self.entropy_threshold,
            window_size=self.window_size,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_tokens=self.prompt_lookup_tokens,
            temperature=self._temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )
        fits = published.largest_k > self.window_size
        return *first, *([published] if fits else []), given


def default_config(*, is_embedded: bool) -> DecodeConfig:
    """How a pair is decoded where nobody says how, in Python and on the command line.

    Args:
      is_embedded: the pair is the one that ships with the package.
    """
    if not is_embedded:
        return DecodeConfig()
    return load_config(Path(__file__).parents[1] / "configs" / "embedded_pair.toml")


def load_config(path: Path) -> DecodeConfig:
    """Reads a config: TOML with the fields of `DecodeConfig`, or the reference code's JSON.

    Raises:
      FlyJaxError: a file that cannot be read, an unknown key (named), or a value of no use.
    """
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
        return from_toml(values) if path.suffix == ".toml" else from_reference_json(values)
    except FlyJaxError as error:
        raise FlyJaxError(f"In the config {path}: {error}") from error


def from_toml(values: Mapping[str, Any]) -> DecodeConfig:
    """A config from a parsed TOML file.

    Raises:
      FlyJaxError: an unknown key, or a value of no use.
    """
    check_keys(values, {field.name for field in dataclasses.fields(DecodeConfig)})
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return DecodeConfig(**{**values, **lists})


def from_reference_json(values: Any) -> DecodeConfig:
    """A config from the reference code's (AMD-AGI/FLy): its window, lookup and defaults included.

    With temperature 0 the tokens are the reference's. With a temperature they are not: the
    reference then draws the target's tokens twice and drafts greedily, and FLy here rescues what
    rejection sampling refused.

    Args:
      values: a parsed JSON file; the keys that name models or logging are ignored.

    Raises:
      FlyJaxError: no JSON object, an unknown key, a key that is missing, or a value of no use.
    """
    if not isinstance(values, dict):
        raise FlyJaxError("a JSON object was expected; write the reference code's keys in braces.")
    check_keys(values, {*_REFERENCE_TYPES, *_REFERENCE_IGNORED})
    for name, kind in _REFERENCE_TYPES.items():
        if name in values:
            check_type(name, values[name], kind)
    if values.get("dual_tok"):
        raise FlyJaxError(
            "dual_tok is true; draft and target must share a tokenizer: choose such a pair and "
            "leave the key out."
        )
    if "spd_k" not in values:
        raise FlyJaxError("spd_k is missing; give the number of draft tokens of a round.")
    temperature = values.get("temperature", 0.0)
    rule = "sampled" if temperature > 0 else "exact"
    window_size = 0
    if values.get("enable_fly", False):
        rule = "fly"
        if not values.get("abla_no_window", False):
            if "win_len" not in values:
                raise FlyJaxError("win_len is missing; enable_fly needs the window's length.")
            window_size = values["win_len"]
    if not values.get("use_sd", True):
        rule = "autoregressive"
    use_ngram = values.get("use_ngram", False)
    return DecodeConfig(
        rule=rule,
        num_speculative_tokens=values["spd_k"],
        entropy_threshold=values.get("entropy_thre", 0.0),
        window_size=window_size,
        window="reference",
        entropy="top_k",
        entropy_top_k=3,
        prompt_lookup_max=values.get("max_ngram_size", 3) if use_ngram else 0,
        prompt_lookup_min=1,
        prompt_lookup_tokens=values.get("num_ngram_pred_tokens", 10),
        prompt_lookup_match="earliest",
        temperature=temperature,
    )


_REFERENCE_TYPES: dict[str, Any] = {
    "spd_k": int,
    "enable_fly": bool,
    "win_len": int,
    "entropy_thre": float,
    "abla_no_window": bool,
    "use_ngram": bool,
    "max_ngram_size": int,
    "num_ngram_pred_tokens": int,
    "temperature": float,
    "dual_tok": bool,
    "use_sd": bool,
}
_REFERENCE_IGNORED = ("target_model_path", "draft_model_path", "verbose")
