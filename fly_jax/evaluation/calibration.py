"""The filling of a memory of corrections, offline, from prompts without answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fly_jax.decoding.pair import Pair
from fly_jax.engine.engine import Engine
from fly_jax.errors import FlyJaxError
from fly_jax.sharding.processes import broadcast, joint_errors, process_id
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory

_SECONDS_BETWEEN_SAVES = 10.0
# Prompts for each slot of the engine that are counted at a time.
_BATCHES = 4


def fill_memory(
    pair: Pair, prompts: Sequence[Sequence[int]], path: Path, *, num_speculative_tokens: int,
    models: str, max_new_tokens: int = 128, batch_size: int = 1,
) -> CorrectionMemory:  # fmt: skip
    """Decodes the prompts exactly and counts the corrections (CSD's initialisation).

    The memory is saved now and then and at the end; an interrupted run goes on after the last whole
    batch in the file. Where several processes decode on one mesh, all see the corrections of all
    rows, and the first one has the file; the others return what they counted. `models` tells this
    pair from others, so that a run does not go on with another one. FlyJaxError where the file
    cannot be written, or is no memory of this vocabulary and of this run.
    """
    memory, start = begin_memory(
        path, pair.tokenizer.digest, prompts, num_speculative_tokens, max_new_tokens, models
    )
    is_first = process_id() == 0
    run = json.loads(memory.note)["run"] if is_first else None
    config = pair.config(rule="exact", num_speculative_tokens=num_speculative_tokens)
    engine = Engine.of(
        pair, config, prompts=prompts, max_new_tokens=max_new_tokens, num_slots=batch_size,
        reports_mismatches=True, with_texts=False,
    )  # fmt: skip
    rows = _BATCHES * batch_size
    saved_at = time.monotonic()
    try:
        with tqdm(total=len(prompts), initial=start, unit="prompt", disable=not is_first) as bar:
            for first in range(start, len(prompts), rows):
                batch = prompts[first : first + rows]
                engine.memory = CorrectionMemory(memory.vocabulary)
                engine.generate(batch, max_new_tokens)
                # Only whole batches are counted, so that none is counted twice.
                memory = engine.memory.merged(memory)
                memory.note = json.dumps({"run": run, "done": first + len(batch)})
                bar.set_postfix(pairs=len(memory), refresh=False)
                bar.update(len(batch))
                if is_first and time.monotonic() - saved_at > _SECONDS_BETWEEN_SAVES:
                    memory.save(path)
                    saved_at = time.monotonic()
    finally:
        if is_first:
            memory.save(path)
    return memory


def begin_memory(
    path: Path, vocabulary: str, prompts: Sequence[Sequence[int]], *settings: int | str
) -> tuple[CorrectionMemory, int]:
    """The memory that `fill_memory` goes on with, and the number of prompts that it has counted.

    Its K, `max_new_tokens` and `models` are the settings. Every process calls it, and process 0
    looks at the file; its FlyJaxError is raised on all.
    """
    run = hashlib.sha256(json.dumps([list(map(list, prompts)), *settings]).encode()).hexdigest()
    memory, found, done = CorrectionMemory(vocabulary), None, 0
    with joint_errors():
        if process_id() == 0 and path.exists():
            memory = load_memory(path, vocabulary)
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                note = json.loads(memory.note)
                found, done = note["run"], int(note.get("done", 0))
            if found != run:
                raise FlyJaxError(
                    f"{path} holds the counts of another run (other prompts, models or sizes); "
                    "give another file to fill, or delete this one."
                )
        elif process_id() == 0:
            memory.note = json.dumps({"run": run})
            memory.save(path)  # a path that cannot be written is found before any work is done
    return memory, broadcast(done)
