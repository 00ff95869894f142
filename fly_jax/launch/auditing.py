"""What generate writes down with --audit, prompt by prompt."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from absl.flags import FlagValues

from fly_jax.decoding.config import DecodingConfig
from fly_jax.evaluation.audit import Run, audited
from fly_jax.evaluation.audit_file import FORMAT, VERSION, check_writable, write_prompt, write_run
from fly_jax.sharding.processes import process_id
from fly_jax.verification.rules import Rule

if TYPE_CHECKING:
    from fly_jax.decoding.decoder import Decoder
    from fly_jax.decoding.generation import Generation
    from fly_jax.decoding.pair import Pair
    from fly_jax.decoding.spec import RoundSpec


def check_audit(path: Path) -> None:
    """Refuses a file that cannot be written; only process 0 writes one.

    Raises:
      FlyJaxError: it cannot.
    """
    if process_id() == 0:
        check_writable(path)


@dataclasses.dataclass(frozen=True)
class Auditor:
    """Writes what became of prompts.

    Attributes:
      file: where to; None in all processes but the first.
      run: what the prompts have in common.
      pair: what decodes them.
      rule: as it is decoded with.
      exact: decodes the same prompts losslessly, so many at a time; None if nobody wants that.
      prompts: their texts.
      ids: their tokens.
      max_new_tokens: limit of each continuation.
    """

    file: IO[str] | None
    run: Run
    pair: Pair
    rule: Rule
    exact: Decoder | None
    prompts: Sequence[str]
    ids: Sequence[Sequence[int]]
    max_new_tokens: int
    _waiting: dict[int, Generation] = dataclasses.field(default_factory=dict)

    def add(self, index: int, generation: Generation) -> None:
        """Takes what a prompt became, to be written with as many others as `exact` has rows."""
        self._waiting[index] = generation
        if self.exact is None or len(self._waiting) == self.exact.batch_size:
            self.flush()

    def flush(self) -> None:
        """Writes what is there."""
        exact: Sequence[Generation | None] = [None] * len(self._waiting)
        if self.exact is not None and self._waiting:
            prompts = [self.ids[index] for index in self._waiting]
            exact = self.exact.generate(prompts, self.max_new_tokens)
        for (index, generation), other in zip(self._waiting.items(), exact, strict=True):
            if self.file is None:
                break
            mismatches, continuation = audited(
                index,
                self.prompts[index],
                generation,
                self.pair.tokenizer,
                self.run,
                has_window=self.rule.longest_window > 0,
                budget=None if self.rule.budget is None else float(np.max(self.rule.budget)),
                exact=other,
            )
            write_prompt(self.file, mismatches, continuation)
        self._waiting.clear()


@contextlib.contextmanager
def auditing(
    values: FlagValues,
    config: DecodingConfig,
    pair: Pair,
    spec: RoundSpec,
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> Iterator[Auditor]:
    """Opens the audit, which is whole once it is closed."""
    measure = spec.needs.entropy
    assert measure is not None
    settings = {**config.to_dict(), "max_new_tokens": values.max_new_tokens}
    run = Run(FORMAT, VERSION, config.rule, measure.name, settings)
    exact = None
    if config.is_loosened and spec.sampling is None and values.audit_exact is not False:
        # The target's own text by exact speculation, which is faster than doing without.
        lossless = pair.spec(config.side_by_side()[1])
        exact = pair.decoder(lossless, batch_size=min(values.batch_size, len(ids)))
    with contextlib.ExitStack() as stack:
        file = None
        if process_id() == 0:
            file = stack.enter_context(Path(values.audit).open("w", encoding="utf-8"))
            write_run(file, run)
        limit = values.max_new_tokens
        auditor = Auditor(file, run, pair, spec.rule, exact, prompts, ids, limit)
        yield auditor
        auditor.flush()
