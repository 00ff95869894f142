"""From the fields of a request to what the engine is asked for."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence

from fly_jax.decoding.config import DecodingConfig
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request
from fly_jax.errors import FlyJaxError
from fly_jax.serving.http.protocol import GenerationRequest, invalid
from fly_jax.verification.rules import Budget, Loose, Rule
from fly_jax.verification.rules.loosened import LOSSLESS_RULES

# What requests may ask for besides the server's own rule where nobody says.
_USUAL_RULES = ("fly", "margin")
# Logits divided by less than this overflow, and all that is left to draw is the largest.
_GREEDY_BELOW = 1e-4


@dataclasses.dataclass(frozen=True)
class RequestBuilder:
    """How the server decodes, and what a request may have otherwise.

    Attributes:
      config: of requests that do not say; its temperature is theirs.
      rules: expressions of the loosened rules that a request may ask for.
    """

    config: DecodingConfig
    rules: tuple[str, ...]

    @classmethod
    def of(cls, config: DecodingConfig, rules: Sequence[str] | None = None) -> RequestBuilder:
        """The choices of a server.

        Args:
          config: of requests that do not say.
          rules: expressions that requests may ask for besides; None for fly and margin, as far as
            they fit. Without a draft there is nothing to choose.

        Raises:
          FlyJaxError: a rule of no use.
        """
        if not config.num_drafted:
            return cls(config, ())
        given = _USUAL_RULES if rules is None else tuple(rules)
        own = (config.rule,) if config.is_loosened else ()
        found = []
        for rule in dict.fromkeys((*own, *given)):
            if rule in LOSSLESS_RULES:  # which can always be asked for
                continue
            try:
                config.replace(rule=rule, temperature=None).to_rule()
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
        return self.config.replace(rule=rule, temperature=0.0, top_k=0, top_p=1.0)

    @property
    def kinds(self) -> list[Rule]:
        """A rule of each kind, each with and without a risk budget."""
        found: list[Rule] = []
        for expression in self.rules:
            rule = self.config.replace(rule=expression, temperature=None).to_rule()
            found.append(rule)
            if isinstance(rule, Loose) and not rule.is_limited:
                found.append(Budget(rule, total=1.0))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may give as its rule."""
        return ("exact", *self.rules) if self.config.num_drafted else ("autoregressive",)

    def protect(self, asked: GenerationRequest) -> tuple[str, ...]:
        """The patterns whose tokens are never rescued.

        A pattern of the client's own is not taken: some take forever to be searched for.

        Raises:
          ApiError: one that the server was not started with.
        """
        own = self.config.protect
        given = None if asked.fly is None else asked.fly.protect
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

    def requests(
        self,
        asked: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        limit: int,
        engine: Engine,
        protected: Callable[[tuple[str, ...]], tuple[int, ...]],
    ) -> list[Request]:
        """What the engine is asked for: n requests for each prompt.

        Args:
          asked: by the client.
          prompts: token ids.
          limit: new tokens of each.
          engine: will take them.
          protected: tokens by patterns; see `Pair.protected_token_ids`.

        Raises:
          ApiError: a rule or a pattern that the server does not have.
          FlyJaxError: values of no use.
        """
        config = self._config(asked)
        rule = self._rule(asked, config, engine)
        sampling = config.to_sampling()
        patterns = self.protect(asked)
        token_ids = None if patterns == self.config.protect else protected(patterns)
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        return [
            Request(
                prompt,
                limit,
                rule,
                sampling,
                (seed + index) % 2**32,
                asked.stops,
                asked.num_logprobs,
                bool(asked.ignore_eos),
                token_ids,
            )
            for prompt in prompts
            for index in range(asked.n)
        ]

    def rule_name(self, asked: GenerationRequest) -> str:
        """The rule that a request is decoded with."""
        given = None if asked.fly is None else asked.fly.rule
        return self.config.rule if given is None else str(given)

    def _config(self, asked: GenerationRequest) -> DecodingConfig:
        """The server's config with what was asked for."""
        given = {} if asked.fly is None else asked.fly.model_dump(exclude_unset=True)
        values = {
            name: value
            for name, value in given.items()
            if name not in ("rule", "protect", "audit", "stream_why") and value is not None
        }
        temperature = self.config.temperature if asked.temperature is None else asked.temperature
        temperature = 0.0 if temperature < _GREEDY_BELOW else temperature
        values["temperature"] = temperature
        if temperature:  # without one there is nothing to keep tokens from
            values["top_k"] = self._or_own("top_k", asked.top_k if asked.top_k != -1 else 0)
            values["top_p"] = self._or_own("top_p", asked.top_p)
        else:
            values |= {"top_k": 0, "top_p": 1.0}
        rule = self.rule_name(asked)
        if rule in LOSSLESS_RULES and self.config.num_drafted:
            self._check_name(rule, lossless=("exact", "sampled"))
            rule = "sampled" if temperature else "exact"
        return self.config.replace(rule=rule, **values)

    def _or_own(self, name: str, given: float | None) -> float | None:
        return getattr(self.config, name) if given is None else given

    def _rule(self, asked: GenerationRequest, config: DecodingConfig, engine: Engine) -> Rule:
        """The rule that was asked for, if the engine was made for it."""
        if not self.config.num_drafted:
            self._check_name(config.rule, lossless=("autoregressive",))
        rule = config.to_rule()
        if not engine.takes(rule):
            raise self._unknown(config.rule)
        return rule

    def _check_name(self, rule: str, lossless: tuple[str, ...]) -> None:
        if rule not in lossless:
            raise self._unknown(rule)

    def _unknown(self, rule: str) -> Exception:
        return invalid(
            f"fly.rule is {rule!r}, of a kind that this server was not started for; it has "
            f"{', '.join(self.names)} and what | makes of them: give one, or start it with "
            "--rules.",
            "fly.rule",
            "rule_not_served",
        )
