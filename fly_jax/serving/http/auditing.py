"""The audit of a request's answers, as the command audit knows it."""

from __future__ import annotations

import dataclasses

from fly_jax.engine.request import RequestState
from fly_jax.evaluation.audit import Run, audited
from fly_jax.models.tokenizers.tokenizer import Tokenizer
from fly_jax.serving.http.replies import Audit


@dataclasses.dataclass(frozen=True)
class Auditor:
    """What the audits of a request have in common.

    Attributes:
      tokenizer: of the models.
      run: the rule and what entropies are.
    """

    tokenizer: Tokenizer
    run: Run

    def audit(self, state: RequestState) -> Audit:
        """Every mismatch of an answer that is done."""
        found, _ = audited(
            0,
            "",
            state.generation,
            self.tokenizer,
            self.run,
            has_window=state.rule.longest_window > 0,
            budget=state.budget,
        )
        return Audit(
            rule=self.run.rule,
            entropy_measure=self.run.entropy_measure,
            rescues=[one for one in found if one.is_rescue],
            refusals=[one for one in found if not one.is_rescue],
        )
