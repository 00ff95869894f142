"""The audit of generate --audit, written prompt by prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fly_jax.decoding.config import DecodingConfig
from fly_jax.engine.engine import Engine
from fly_jax.evaluation.audit_file import FORMAT, VERSION, write_prompt, write_run
from fly_jax.evaluation.mismatches import Run, audited
from fly_jax.launch.flags import BatchFlags
from fly_jax.launch.inputs import say
from fly_jax.sharding.processes import process_id

if TYPE_CHECKING:
    from fly_jax.decoding.config import RoundSpec
    from fly_jax.decoding.pair import Pair
    from fly_jax.engine.request import Generation


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
) -> Iterator[Callable[[int, Generation], None]]:
    """Opens the audit, and gives what writes the generation of the prompt with an index.

    The prompts are decoded losslessly before the engine begins, since it would stand still
    meanwhile, and prompts seem slow.

    Args:
      file: where to; only process 0 writes.
      prompts: their texts.
      ids: their tokens.
      exact: they are decoded losslessly, unless they are so anyhow or are drawn.
    """
    rule, most = spec.rule, values.max_new_tokens
    measure = spec.static.needs(rule).entropy
    assert measure is not None
    settings = {**config.to_dict(), "max_new_tokens": most, "num_prompts": len(ids)}
    run = Run(FORMAT, VERSION, config.rule, measure.name, settings)
    own: Sequence[Generation | None] = [None] * len(ids)
    if exact and config.is_loosened and spec.sampling is None:
        say(f"Decoding {len(ids)} prompts exactly, to say what differs from that ...")
        # By exact speculation, which is faster than doing without.
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
    if process_id() != 0:
        yield lambda *_: None
        return
    with Path(file).open("w", encoding="utf-8") as out:
        write_run(out, run)

        def add(index: int, generation: Generation) -> None:
            events = audited(
                index,
                prompts[index],
                generation,
                pair.tokenizer,
                run,
                has_window=rule.longest_window > 0,
                budget=None if rule.budget is None else float(np.max(rule.budget)),
                exact=own[index],
            )
            write_prompt(out, *events)

        yield add
