"""What a decoder does in each of its rounds, and what of it is static."""

from __future__ import annotations

import dataclasses

from fly_jax.decoding.config import AUTO_DEPTHS, Boundary, DecodingConfig
from fly_jax.decoding.deferral import check_deferral
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.errors import FlyJaxError
from fly_jax.verification.evidence import Entropy, Needs
from fly_jax.verification.rules import Rule
from fly_jax.verification.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class RoundSpec:
    """What a decoder does in each of its rounds.

    All but the numbers of `rule` and `sampling` is static: change it and the round compiles anew.

    Attributes:
      rule: which draft tokens are kept.
      num_speculative_tokens: K, or the largest one; 0 decodes one token at a time.
      depths: what K is chosen from, round by round, in ascending order and ending with
        `num_speculative_tokens`; with 0, rounds without a draft. Empty for the same K in all
        rounds.
      lookup: what proposes to the last draft model, or to the target where there is none; None
        for nothing.
      eos_token_ids: tokens that end a row.
      rounds_per_dispatch: rounds that run before their tokens leave the device.
      reports_mismatches: fills `RoundOutput.reports`, which a memory of corrections learns from.
      audits: fills it too, with an entropy even where the rule asks for none, and with it
        `Generation.reports`.
      max_logprobs: fills it too, with so many of the target's most probable tokens at each
        position, from which `Generation.logprobs` can be had; 0 for none.
      reports_evidence: fills `RoundOutput.draft_tokens` and `RoundOutput.evidence`, from which
        other settings of the rule can be judged.
      boundary: what becomes of a mismatch whose window does not fit into its block: "reject", the
        published rule, or "defer", which may complete the window in the next rounds.
      level_speculative_tokens: tokens that each draft model but the first proposes at a time for
        the one before it, at most.
      sampling: how target and draft are drawn from; None for greedy decoding.
    """

    rule: Rule
    num_speculative_tokens: int
    lookup: Lookup | None = None
    eos_token_ids: tuple[int, ...] = ()
    rounds_per_dispatch: int = 1
    depths: tuple[int, ...] = ()
    reports_mismatches: bool = False
    audits: bool = False
    max_logprobs: int = 0
    reports_evidence: bool = False
    boundary: Boundary = "reject"
    level_speculative_tokens: tuple[int, ...] = ()
    sampling: Sampling | None = None

    @classmethod
    def of(
        cls,
        config: DecodingConfig,
        *,
        num_drafts: int,
        eos_token_ids: tuple[int, ...] = (),
        rounds_per_dispatch: int = 1,
        audits: bool = False,
    ) -> RoundSpec:
        """The rounds that a config describes.

        Args:
          config: how to decode.
          num_drafts: draft models.
          eos_token_ids: see the class.
          rounds_per_dispatch: see the class.
          audits: see the class.

        Raises:
          FlyJaxError: values of which no round can be made.
        """
        k, depths = config.num_drafted, tuple[int, ...]()
        if k == "auto":
            k, depths = AUTO_DEPTHS[-1], AUTO_DEPTHS
        rule = config.to_rule()
        return cls(
            rule=rule,
            num_speculative_tokens=k,
            depths=depths,
            lookup=config.to_lookup(),
            eos_token_ids=eos_token_ids,
            rounds_per_dispatch=rounds_per_dispatch,
            reports_mismatches=config.csd_online and rule.uses_memory,
            audits=audits,
            boundary=config.round_boundary,
            level_speculative_tokens=(config.level_speculative_tokens,) * (num_drafts - 1)
            if k
            else (),
            sampling=config.to_sampling(),
        )

    def __post_init__(self) -> None:
        if self.depths and not (
            self.depths == tuple(sorted(set(self.depths)))
            and self.depths[0] >= 0
            and self.depths[-1] == self.num_speculative_tokens
        ):
            raise FlyJaxError(
                f"The depths to choose from are {self.depths}; they must be at least 0, ascend and "
                f"end with num_speculative_tokens={self.num_speculative_tokens}: correct them."
            )
        if self.num_speculative_tokens < 0 or self.rounds_per_dispatch < 1:
            raise FlyJaxError(
                f"A round was asked for with num_speculative_tokens={self.num_speculative_tokens} "
                f"and rounds_per_dispatch={self.rounds_per_dispatch}; they must be at least 0 and "
                "1: correct them."
            )
        if any(size < 1 for size in self.level_speculative_tokens):
            raise FlyJaxError(
                f"level_speculative_tokens is {self.level_speculative_tokens}; a draft model "
                "proposes at least 1 token at a time: give larger numbers."
            )
        if self.boundary == "defer":
            check_deferral(self.rule, self.sampling)

    @property
    def deferred_window(self) -> int:
        """Size of the windows that may stay open after a round; 0 if none may."""
        return self.rule.longest_window if self.boundary == "defer" else 0

    @property
    def room(self) -> int:
        """Positions beyond a row's last token that a round may write to, with its own drafter."""
        levels = (self.num_speculative_tokens, *self.level_speculative_tokens)
        return sum(levels) + len(levels) + (self.lookup.num_tokens if self.lookup else 0)

    @property
    def reports(self) -> bool:
        """Rounds report on every token."""
        return self.reports_mismatches or self.audits or self.max_logprobs > 0

    @property
    def needs(self) -> Needs:
        """What the evidence carries: what the rule reads, what is asked for, an audit's entropy.

        That is the one over the whole vocabulary where the rule asks for that anyhow, and
        otherwise the one that FLy's gate is published with.
        """
        needs = self.rule.needs | Needs(top=self.max_logprobs)
        if needs.entropy is not None or not self.audits:
            return needs
        return needs | Needs(entropy=Entropy("full") if needs.full_entropy else Entropy())

    def structure(self, drafter: Drafter | None) -> RoundStructure:
        """What is static about the rounds, with this drafter."""
        k = self.num_speculative_tokens
        widths = self.depths or (k,)
        if not self.depths and drafter is not None and drafter.may_fall_short:
            shorter = AUTO_DEPTHS if isinstance(drafter, Lookup) else AUTO_DEPTHS[1:]
            widths = (*(depth for depth in shorter if depth < k), k)
        return RoundStructure(
            num_speculative_tokens=k,
            depths=self.depths,
            widths=widths,
            eos_token_ids=self.eos_token_ids,
            rounds_per_dispatch=self.rounds_per_dispatch,
            needs=self.needs,
            reports=self.reports,
            reports_evidence=self.reports_evidence,
            deferred_window=self.deferred_window,
        )


@dataclasses.dataclass(frozen=True)
class RoundStructure:
    """What is static about a round, without the rule; see `RoundSpec`, whose fields most are.

    Attributes:
      num_speculative_tokens: K.
      depths: what K is chosen from, if it is.
      widths: draft tokens that the target's pass may be made for, in ascending order.
      eos_token_ids: tokens that end a row.
      rounds_per_dispatch: rounds before tokens leave the device.
      needs: what the evidence carries.
      reports: fills `RoundOutput.reports`.
      reports_evidence: fills `RoundOutput.evidence`.
      deferred_window: size of the windows that may stay open; 0 if none may.
    """

    num_speculative_tokens: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    rounds_per_dispatch: int
    needs: Needs
    reports: bool
    reports_evidence: bool
    deferred_window: int

    @property
    def learns_pace(self) -> bool:
        """A row that joins others begins with their rates: where no token depends on them."""
        return bool(self.depths) and not self.deferred_window
