"""The library's `generate`: a list of prompts through an engine of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.pair import Pair, check_prompt
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Generation
from fly_jax.errors import FlyJaxError
from fly_jax.verification.correction_memory import CorrectionMemory


def generate(
    pair: Pair, prompts: Sequence[str] | Sequence[Sequence[int]],
    config: DecodingConfig | None = None, *, max_new_tokens: int = 128, batch_size: int = 1,
    seed: int = 0, memory: CorrectionMemory | str | Path | None = None, audits: bool = False,
    drafter: str | Drafter | None = None, **given: Any,
) -> list[Generation]:  # fmt: skip
    """Decodes prompts, given as text or as token ids.

    A pair that nothing proposes to decodes one token at a time, whatever the rule. FlyJaxError for
    no prompt, an empty one, one longer than the context, a batch of no rows, or what `Engine.of`
    refuses.

    Args:
      config: how, but for what is given below; None for `default_config`, as on the command line.
      memory: a memory of corrections, which learns, or the file that holds one.
      drafter: what proposes instead of the pair's draft models, as `Pair.drafter`.
      **given: values of a `DecodingConfig`, laid over the config's: such as rule, an expression or
        a `Rule`, and num_speculative_tokens, of which 0 also decodes one token at a time.
    """
    is_list = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, str)
    if not is_list or len(prompts) == 0 or batch_size < 1:
        raise FlyJaxError(
            "generate needs a list of at least one prompt and a batch_size of at least 1; give "
            "[text] for a single text."
        )
    if drafter is not None:
        pair = dataclasses.replace(pair, drafter=drafter)
    if isinstance(memory, str | Path):
        given["memory"], memory = str(memory), None
    config = pair.config(config, **given)
    each: Sequence[str | Sequence[int]] = prompts
    ids = list[Sequence[int]]()
    for at, one in enumerate(each):
        if isinstance(one, str):
            ids.append(pair.tokenizer.encode(one))
        else:
            ids.append(check_prompt(one, pair.target.config, name=f"Prompt {at + 1}"))
    engine = Engine.of(
        pair, config, prompts=ids, max_new_tokens=max_new_tokens, num_slots=batch_size,
        audits=audits, memory=memory, with_texts=False,
    )  # fmt: skip
    return engine.generate(ids, max_new_tokens, seed=seed)
