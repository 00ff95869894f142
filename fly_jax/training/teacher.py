"""What a teacher says: its continuations of prompts, and what it expects after each token."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float16, Int, Int32
from tqdm import tqdm

from fly_jax.decoding.decoder import Decoder
from fly_jax.models.llama import Llama
from fly_jax.training.step import bfloat16_matmul

# Beyond these a teacher's probabilities are mostly below one in a hundred.
_FEW = 8
_PART_DOCUMENTS = 64
# Lengths are rounded up to this, so that few programs are compiled.
_LENGTH_STEP = 64
_PASS_TOKENS = 2048


class Document(NamedTuple):
    """A prompt and the teacher's answer."""

    prompt: list[int]
    answer: list[int]


class Expected(NamedTuple):
    """A document with what the teacher expects after each of its tokens.

    Attributes:
      tokens: of prompt and answer.
      num_prompt: those of the prompt.
      likely: the tokens that it finds most probable next.
      shares: their probabilities.
    """

    tokens: Int32[np.ndarray, " length"]
    num_prompt: int
    likely: Int32[np.ndarray, "length few"]
    shares: Float16[np.ndarray, "length few"]


def continued(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    file: Path,
    *,
    max_new_tokens: int,
    seed: int,
) -> list[Document]:
    """The teacher's continuations. What the file has of an earlier run is not decoded again.

    Args:
      decoder: of the teacher.
      prompts: token ids.
      file: takes a JSON object for each prompt.
      max_new_tokens: limit of each continuation.
      seed: of the draws of the first prompt, each other one's being one more.
    """
    found = dict(_read(file))
    left = [index for index in range(len(prompts)) if index not in found]
    with (
        file.open("a", encoding="utf-8") as out,
        tqdm(total=len(prompts), initial=len(found), desc="Continuing", unit="prompt") as bar,
    ):
        for batch in decoder.batches([prompts[index] for index in left]):
            indices = [left[place] for place in batch]
            some, seeds = zip(*((prompts[index], seed + index) for index in indices), strict=True)
            answers = decoder.decode(some, max_new_tokens, seed=seeds)
            for index, one in zip(indices, answers, strict=True):
                found[index] = Document(list(prompts[index]), one.token_ids)
                out.write(json.dumps({"index": index, **found[index]._asdict()}) + "\n")
            out.flush()
            bar.update(len(batch))
    return [found[index] for index in sorted(found)]


def _read(file: Path) -> Iterator[tuple[int, Document]]:
    """The records of an earlier run; a last one that was cut off is cut out of the file."""
    if not file.exists():
        return
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    os.truncate(file, len(whole))
    for line in whole.splitlines():
        record = json.loads(line)
        yield record["index"], Document(record["prompt"], record["answer"])


def expected(
    teacher: Llama, documents: Sequence[Document], folder: Path, *, length: int
) -> list[Expected]:
    """What the teacher expects after each token. Parts that an earlier run has left are read.

    Args:
      teacher: the model.
      documents: what to read.
      folder: takes the parts.
      length: what is kept of a document is its last tokens, so many at most.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Expected] = []
    with tqdm(total=len(documents), desc="Reading along", unit="document") as bar:
        for start in range(0, len(documents), _PART_DOCUMENTS):
            some = documents[start : start + _PART_DOCUMENTS]
            file = folder / f"part_{start // _PART_DOCUMENTS:05}.npz"
            if not file.exists():
                _save(file, _read_along(teacher, some, length))
            found += _load(file)
            bar.update(len(some))
    return found


def _read_along(teacher: Llama, documents: Sequence[Document], length: int) -> list[Expected]:
    texts = [np.array([*one.prompt, *one.answer], np.int32) for one in documents]
    found: dict[int, Expected] = {}
    for batch, width in _passes([len(text) for text in texts]):
        rows = max(_PASS_TOKENS // width, 1)
        tokens = np.zeros((rows, width), np.int32)
        for row, index in enumerate(batch):
            tokens[row, : len(texts[index])] = texts[index]
        likely, shares = jax.device_get(
            _most_likely(teacher.config, teacher.layout, teacher.parameters(), tokens)
        )
        for row, index in enumerate(batch):
            end = len(texts[index])
            kept = slice(max(end - length, 0), end)
            found[index] = Expected(
                texts[index][kept],
                max(len(documents[index].prompt) - kept.start, 0),
                likely[row, kept],
                shares[row, kept].astype(np.float16),
            )
    return [found[index] for index in range(len(texts))]


def _passes(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Which documents go through the teacher together, and how wide that pass is."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        width = -(-lengths[order[-1]] // _LENGTH_STEP) * _LENGTH_STEP
        rows = max(_PASS_TOKENS // width, 1)
        yield order[-rows:], width
        del order[-rows:]


@functools.partial(jax.jit, static_argnames=("config", "layout"))
def _most_likely(
    config: Any, layout: Any, parameters: dict[str, Array], tokens: Int[Array, "rows width"]
) -> tuple[Int32[Array, "rows width few"], Float[Array, "rows width few"]]:
    """The teacher's most probable next tokens and their probabilities."""
    model = Llama(config, parameters, layout)
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    before: Bool[Array, "width width"] = jnp.tril(jnp.ones((width, width), bool))
    visible = jnp.broadcast_to(before, (rows, width, width))
    # Where activations are bfloat16, so are the products' operands anyhow.
    matmul = bfloat16_matmul if model.dtype == jnp.float32 else None
    hidden = model.hidden_uncached(tokens, positions, visible, matmul)

    def of_row(row: Float[Array, "width embed"]) -> tuple[Array, Array]:
        logits = model.logits(row[None], matmul)[0]
        best, likely = jax.lax.top_k(logits, min(_FEW, logits.shape[-1]))
        return likely, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    return jax.lax.map(of_row, hidden)  # the logits of all rows would take much memory


def _save(file: Path, part: Sequence[Expected]) -> None:
    """Under another name first, so that no part is ever half there."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        np.savez_compressed(
            out,
            lengths=[len(one.tokens) for one in part],
            num_prompt=[one.num_prompt for one in part],
            tokens=np.concatenate([one.tokens for one in part]),
            likely=np.concatenate([one.likely for one in part]),
            shares=np.concatenate([one.shares for one in part]),
        )
    partial.replace(file)


def _load(file: Path) -> list[Expected]:
    with np.load(file) as part:
        ends = np.cumsum(part["lengths"])[:-1]
        fields = (np.split(part[name], ends) for name in ("tokens", "likely", "shares"))
        return [
            Expected(tokens, int(num_prompt), likely, shares)
            for num_prompt, tokens, likely, shares in zip(part["num_prompt"], *fields, strict=True)
        ]
