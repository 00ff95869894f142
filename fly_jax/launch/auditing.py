"""The audit of generate --audit, written prompt by prompt."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from fly_jax.decoding.config import DecodingConfig
from fly_jax.engine.engine import Engine
from fly_jax.evaluation.audit_file import FORMAT, VERSION, check_writable, write_prompt, write_run
from fly_jax.evaluation.mismatches import Run, audited
from fly_jax.launch.flags import BatchFlags
from fly_jax.launch.inputs import say
from fly_jax.sharding.processes import process_id
from fly_jax.verification.rules import Rule

if TYPE_CHECKING:
    from fly_jax.decoding.config import RoundSpec
    from fly_jax.decoding.pair import Pair
    from fly_jax.engine.request import Generation


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
      prompts: their texts.
      exact: what each of them becomes losslessly; None where nobody wants that.
    """

    file: IO[str] | None
    run: Run
    pair: Pair
    rule: Rule
    prompts: Sequence[str]
    exact: Sequence[Generation | None]

    def add(self, index: int, generation: Generation) -> None:
        """Writes what a prompt became."""
        if self.file is None:
            return
        mismatches, continuation = audited(
            index,
            self.prompts[index],
            generation,
            self.pair.tokenizer,
            self.run,
            has_window=self.rule.longest_window > 0,
            budget=None if self.rule.budget is None else float(np.max(self.rule.budget)),
            exact=self.exact[index],
        )
        write_prompt(self.file, mismatches, continuation)


@contextlib.contextmanager
def auditing(
    file: str,
    values: BatchFlags,
    config: DecodingConfig,
    pair: Pair,
    spec: RoundSpec,
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
    *,
    exact: bool,
) -> Iterator[Auditor]:
    """Opens the audit, after it has decoded the prompts losslessly.

    Before the engine begins, since it would stand still meanwhile, and prompts seem slow.

    Args:
      file: where to; only process 0 writes.
      values: how many prompts are decoded together, and how far.
      config: how they are decoded.
      pair: what decodes them.
      spec: of the engine.
      prompts: their texts.
      ids: their tokens.
      exact: they are decoded losslessly, unless they are so anyhow or are drawn.
    """
    measure = spec.static.needs(spec.rule).entropy
    assert measure is not None
    limits = {"max_new_tokens": values.max_new_tokens, "num_prompts": len(ids)}
    settings = {**config.to_dict(), **limits}
    run = Run(FORMAT, VERSION, config.rule, measure.name, settings)
    own: Sequence[Generation | None] = [None] * len(ids)
    if exact and config.is_loosened and spec.sampling is None:
        say(f"Decoding {len(ids)} prompts exactly, to say what differs from that ...")
        # By exact speculation, which is faster than doing without.
        most = values.max_new_tokens
        lossless = Engine.of(
            pair,
            config.side_by_side()[1],
            prompts=ids,
            max_new_tokens=most,
            num_slots=values.batch_size,
            with_texts=False,
        )
        own = lossless.generate(ids, most)
        lossless.forget()
    with contextlib.ExitStack() as stack:
        out = None
        if process_id() == 0:
            out = stack.enter_context(Path(file).open("w", encoding="utf-8"))
            write_run(out, run)
        yield Auditor(out, run, pair, spec.rule, prompts, own)
