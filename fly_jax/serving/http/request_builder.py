"""The engine's requests from a client's fields, and the rules that clients may ask for."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence

from fly_jax.decoding.config import DecodingConfig
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request
from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameters_of
from fly_jax.serving.http.protocol import GenerationRequest, invalid
from fly_jax.verification.rules import Budget, Loose, Rule
from fly_jax.verification.rules.loosened import LOSSLESS_RULES, RULES, rule_names

# Requests may ask for these by default, besides the server's own rule.
_USUAL_RULES = ("fly", "margin")
# Settings of FLy that are no numbers of a program.
_COMPILED = {"entropy", "entropy_top_k", "window"}
# Logits divided by less than this overflow, so that only the largest could be drawn.
_GREEDY_BELOW = 1e-4
_GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
_LIKE = _GREEDY | {"lossy_threshold": 0.5}  # for rules of which only the kind counts


def _read_by(config: DecodingConfig) -> set[str]:
    """The numbers that a config's rule reads; a rule that was given whole has its own."""
    names = rule_names(config.rule) if config.given_rule is None else ()
    kinds = [RULES[one] for one in names if one in RULES]
    read = (*kinds, Budget) if kinds else ()
    return {one.name for kind in read for one in parameters_of(kind)}


@dataclasses.dataclass(frozen=True)
class RequestBuilder:
    """A builder of the engine's requests: as the server decodes, but for what a client gives."""

    config: DecodingConfig  # of requests that do not say; its temperature is theirs
    rules: tuple[str, ...]  # expressions of the loosened ones that a request may ask for

    @classmethod
    def of(cls, config: DecodingConfig, rules: Sequence[str] | None = None) -> RequestBuilder:
        """Checks the rules that requests may ask for besides; FlyJaxError for a wrong one.

        None stands for fly and margin, as far as they fit. Without a draft there are no rules.
        """
        config.to_rule()
        if not config.num_speculative_tokens:
            if rules:
                said = "--rules was given and nothing is drafted; give --draft, and K above 0."
                raise FlyJaxError(said)
            return cls(config, ())
        if config.drafting.boundary == "defer" and not config.is_loosened:
            raise FlyJaxError(
                f"--boundary=defer was given and the rule {config.rule}, which has no window to "
                "defer; give --rule fly, in place of which requests may name another."
            )
        # One engine has one K, that of the server's own rule, for whatever requests ask.
        config = config.replace(num_speculative_tokens=config.num_speculative_tokens)
        given = _USUAL_RULES if rules is None else tuple(rules)
        own = (config.rule,) if config.is_loosened else ()
        found = []
        # Lossless rules can always be asked for.
        for rule in (one for one in dict.fromkeys((*own, *given)) if one not in LOSSLESS_RULES):
            try:
                config.replace(rule=rule, **_LIKE).to_rule()
            except FlyJaxError:
                if rules is None and rule in _USUAL_RULES and rule not in own:
                    continue
                raise
            found.append(rule)
        return cls(config, tuple(found))

    @property
    def for_engine(self) -> DecodingConfig:
        """The config that the engine is made with: it leaves drawing to requests."""
        rule = "exact" if self.config.rule == "sampled" else self.config.rule
        return self.config.replace(rule=rule, **_LIKE)

    @property
    def kinds(self) -> list[Rule]:
        """A rule of each kind, each with and without a risk budget."""
        found: list[Rule] = []
        for expression in self.rules:
            rule = self.config.replace(rule=expression, **_LIKE).to_rule()
            found.append(rule)
            if isinstance(rule, Loose) and not isinstance(rule, Budget):
                found.append(Budget(rule, total=1.0))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Rules that a request may give."""
        return ("exact", *self.rules) if self.config.num_speculative_tokens else ("autoregressive",)

    def requests(
        self, request: GenerationRequest, prompts: Sequence[Sequence[int]], engine: Engine,
        protected: Callable[[tuple[str, ...]], tuple[int, ...]], cache_salt: str = "",
    ) -> list[Request]:  # fmt: skip
        """The engine's requests for a client's: n for each prompt, given as token ids.

        Raises ApiError for a rule or pattern that the server lacks, FlyJaxError for useless values.
        """
        config = self._config(request)
        rule = config.to_rule()
        if not engine.takes(rule):
            raise self._unknown(config.rule)
        patterns = self._patterns(request)
        first = Request(
            (), engine.max_length if request.limit is None else request.limit, rule,
            config.to_sampling(),
            secrets.randbelow(2**31) if request.seed is None else request.seed, request.stops,
            request.num_logprobs, bool(request.ignore_eos),
            None if patterns == self.config.limits.protect else protected(patterns), cache_salt,
            repeats=request.seed is not None,
        )  # fmt: skip
        # Without a seed no two answers share their draws; with one each prompt's are its own.
        apart = request.n if request.seed is None else 0
        return [
            dataclasses.replace(first, prompt=prompt, seed=(first.seed + index) % 2**32)
            for at, prompt in enumerate(prompts)
            for index in range(at * apart, at * apart + request.n)
        ]

    def rule_name(self, request: GenerationRequest) -> str:
        """The rule that a request is decoded with."""
        return self.config.rule if request.fly.rule is None else str(request.fly.rule)

    def _config(self, request: GenerationRequest) -> DecodingConfig:
        own = self.config
        others = {"rule", "protect", "audit", "stream_why"}
        given = numbers = request.fly.model_dump(exclude=others, exclude_none=True)
        sampling = request.model_dump(include={"temperature", "top_k", "top_p"}, exclude_none=True)
        usual = own.sampling.temperature or (1.0 if request.fly.rule == "sampled" else 0.0)
        given = given | {"temperature": float(usual)} | sampling
        if given["temperature"] < _GREEDY_BELOW:  # without draws there is nothing to cut
            given |= _GREEDY
        elif request.top_k is not None:
            given["top_k"] = max(request.top_k, 0)
        for name in _COMPILED & given.keys():
            if given[name] != getattr(own.fly, name):
                raise invalid(
                    f"fly.{name} is {given[name]!r}, and this server's programs were compiled for "
                    f"{getattr(own.fly, name)!r}; leave it out, or start the server with it.",
                    f"fly.{name}",
                )
        rule, drafts = self.rule_name(request), bool(own.num_speculative_tokens)
        for name in numbers if request.fly.rule is None else ():
            if name not in _COMPILED | _read_by(own):
                raise invalid(
                    f"fly.{name} was given, and the rule {rule} does not read it; give a fly.rule "
                    "that does, or leave it out.",
                    f"fly.{name}",
                )
        if rule in LOSSLESS_RULES or not drafts:
            if rule not in (("exact", "sampled") if drafts else ("autoregressive",)):
                raise self._unknown(rule)
            if drafts:
                rule = "sampled" if given["temperature"] else "exact"
        return own.replace(rule=rule, **given)

    def _patterns(self, request: GenerationRequest) -> tuple[str, ...]:
        """The request's patterns, all from the server's own: others may search for ever."""
        own, given = self.config.limits.protect, request.fly.protect
        for pattern in given or ():
            if pattern not in own:
                raise invalid(
                    f"fly.protect has {pattern!r}, which is none of the server's patterns; it has "
                    f"{', '.join(map(repr, own)) or 'none'}: give of these, or start it with "
                    "--protect.",
                    "fly.protect",
                    "pattern_not_served",
                )
        return own if given is None else tuple(one for one in own if one in given)

    def _unknown(self, rule: str) -> Exception:
        names, more = f"{', '.join(self.names)} and what | makes of them", "--rules"
        if not self.config.num_speculative_tokens:  # nothing proposes
            names, more = "autoregressive alone", "a --draft, as ngram is, and another --rule"
        return invalid(
            f"fly.rule is {rule!r}, of a kind that this server was not started for; it has "
            f"{names}: give one, or start it with {more}.",
            "fly.rule",
            "rule_not_served",
        )
