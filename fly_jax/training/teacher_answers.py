"""A teacher's answers to prompts, kept in a file that a later run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from fly_jax.engine.engine import Engine


class Document(NamedTuple):
    """A prompt and the teacher's answer."""

    prompt: list[int]
    answer: list[int]


def continued(
    engine: Engine, prompts: Sequence[Sequence[int]], file: Path, *, max_new_tokens: int, seed: int
) -> list[Document]:
    """The teacher's continuations, kept in a JSON lines file that a later run continues."""
    found = dict(_read(file))
    with (
        file.open("a", encoding="utf-8") as out,
        tqdm(total=len(prompts), initial=len(found), desc="Continuing", unit="prompt") as bar,
    ):
        requests = engine.requests(prompts, max_new_tokens, seed=seed)
        numbers = {engine.submit(one): at for at, one in enumerate(requests) if at not in found}
        for state, settled in engine.run(()):
            if settled.finish_reason is None:
                continue
            index = numbers[state]
            found[index] = Document(list(prompts[index]), state.generation.token_ids)
            out.write(json.dumps({"index": index, **found[index]._asdict()}) + "\n")
            out.flush()
            bar.update(1)
    return [found[index] for index in sorted(found)]


def _read(file: Path) -> Iterator[tuple[int, Document]]:
    """The records of an earlier run; a last one that is incomplete is removed from the file."""
    if not file.exists():
        return
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    os.truncate(file, len(whole))
    for line in whole.splitlines():
        record = json.loads(line)
        yield record["index"], Document(record["prompt"], record["answer"])
