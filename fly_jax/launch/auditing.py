"""What generate writes down with --audit, prompt by prompt."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from absl.flags import FlagValues

from fly_jax.decoding.config import DecodingConfig
from fly_jax.evaluation.audit import Run, audited
from fly_jax.evaluation.audit_file import FORMAT, VERSION, check_writable, write_prompt, write_run
from fly_jax.sharding.processes import process_id

if TYPE_CHECKING:
    from fly_jax.decoding.decoder import Decoder, Generation
    from fly_jax.decoding.pair import Pair


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
      decoder: with reports.
      exact: decodes the same prompts losslessly; None if nobody wants that.
      prompts: their texts.
      ids: their tokens.
      max_new_tokens: limit of each continuation.
    """

    file: IO[str] | None
    run: Run
    pair: Pair
    decoder: Decoder
    exact: Decoder | None
    prompts: Sequence[str]
    ids: Sequence[Sequence[int]]
    max_new_tokens: int

    def add(self, batch: Sequence[int], finished: Mapping[int, Generation]) -> None:
        """Writes a batch.

        Args:
          batch: index of each row's prompt.
          finished: what became of each row.
        """
        exact: Sequence[Generation | None] = [None] * len(finished)
        if self.exact is not None:
            prompts = [self.ids[index] for index in batch]
            exact = self.exact.generate(prompts, self.max_new_tokens)
        if self.file is None:
            return
        rule = self.decoder.spec.rule
        for row in sorted(finished):
            mismatches, continuation = audited(
                batch[row],
                self.prompts[batch[row]],
                finished[row],
                self.pair.tokenizer,
                self.run,
                has_window=rule.longest_window > 0,
                budget=None if rule.budget is None else float(np.max(rule.budget)),
                exact=exact[row],
            )
            write_prompt(self.file, mismatches, continuation)


@contextlib.contextmanager
def auditing(
    values: FlagValues,
    config: DecodingConfig,
    pair: Pair,
    decoder: Decoder,
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> Iterator[Auditor]:
    """Opens the audit."""
    measure = decoder.spec.needs.entropy
    assert measure is not None
    settings = {**config.to_dict(), "max_new_tokens": values.max_new_tokens}
    run = Run(FORMAT, VERSION, config.rule, measure.name, settings)
    exact = None
    if config.is_loosened and decoder.spec.sampling is None and values.audit_exact is not False:
        exact = _lossless(config, pair, decoder)
    with contextlib.ExitStack() as stack:
        file = None
        if process_id() == 0:
            file = stack.enter_context(Path(values.audit).open("w", encoding="utf-8"))
            write_run(file, run)
        yield Auditor(file, run, pair, decoder, exact, prompts, ids, values.max_new_tokens)


def _lossless(config: DecodingConfig, pair: Pair, decoder: Decoder) -> Decoder:
    """What gives the target's own text: exact speculation, which is faster than doing without."""
    spec = pair.spec(config.side_by_side()[1])
    return pair.decoder(spec, batch_size=decoder.batch_size)
