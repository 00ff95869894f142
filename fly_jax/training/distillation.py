"""A small drafter for a teacher: what the teacher says and expects, and what the drafter learns.

The teacher continues prompts and reads along; the drafter has a shape and a vocabulary of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float16, Float32, Int, Int32
from tqdm import tqdm

from fly_jax.engine.engine import Engine
from fly_jax.models.architectures import LlamaConfig, scale_name
from fly_jax.models.llama import Llama
from fly_jax.training.trainer import Recipe, Row, bfloat16_matmul, stacked

HEAD_SIZE = 64
HEADS_PER_KV_HEAD = 2
ROW_LENGTH = 512
# Of a token of a prompt, which is never drafted, but has the same words as answers.
_PROMPT_WEIGHT = 0.3
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
    """A document's tokens, and those that the teacher finds most probable next, with shares."""

    tokens: Int32[np.ndarray, " length"]
    num_prompt: int
    likely: Int32[np.ndarray, "length few"]
    shares: Float16[np.ndarray, "length few"]


def continued(
    engine: Engine, prompts: Sequence[Sequence[int]], file: Path, *, max_new_tokens: int, seed: int
) -> list[Document]:
    """The teacher's continuations, kept in a JSON lines file, from which an earlier run goes on."""
    found = dict(_read(file))
    left = [index for index in range(len(prompts)) if index not in found]
    with (
        file.open("a", encoding="utf-8") as out,
        tqdm(total=len(prompts), initial=len(found), desc="Continuing", unit="prompt") as bar,
    ):
        requests = engine.requests(prompts, max_new_tokens, seed=seed)
        numbers = {engine.submit(requests[index]): index for index in left}
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
    """The teacher's expectations after the last `length` tokens of each, in parts kept on disk."""
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
    for batch, rows, width in _passes([len(text) for text in texts]):
        tokens = np.zeros((rows, width), np.int32)
        for row, index in enumerate(batch):
            tokens[row, : len(texts[index])] = texts[index]
        model = teacher.config, teacher.layout, teacher.parameters()
        likely, shares = jax.device_get(_most_likely(*model, tokens))
        for row, index in enumerate(batch):
            end = len(texts[index])
            kept = slice(max(end - length, 0), end)
            num_prompt = max(len(documents[index].prompt) - kept.start, 0)
            own = likely[row, kept], shares[row, kept].astype(np.float16)
            found[index] = Expected(texts[index][kept], num_prompt, *own)
    return [found[index] for index in range(len(texts))]


def _passes(lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Which documents go through the teacher together, and that pass's rows and width."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        width = -(-lengths[order[-1]] // _LENGTH_STEP) * _LENGTH_STEP
        rows = max(_PASS_TOKENS // width, 1)
        yield order[-rows:], rows, width
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


class OwnTokens(NamedTuple):
    """The teacher's tokens that the drafter knows, ascending, and the row of every token.

    A token that is not known has the row after all others.
    """

    known: Int32[np.ndarray, " known"]
    rows: Int32[np.ndarray, " vocab"]

    @property
    def num_rows(self) -> int:
        """One for each known token, and one for all others if there are any."""
        return len(self.known) + (len(self.known) < len(self.rows))


def frequent_tokens(
    documents: Sequence[Expected], vocab_size: int, num_rows: int
) -> tuple[OwnTokens, float]:
    """The most frequent tokens, and the share of the answers that they are."""
    said, seen = np.zeros(vocab_size), np.zeros(vocab_size)
    for one in documents:
        said += np.bincount(one.tokens[one.num_prompt :], minlength=vocab_size)
        seen += np.bincount(one.tokens, minlength=vocab_size)
    size = vocab_size if num_rows >= vocab_size else num_rows - 1
    # Tokens of prompts fill what answers leave.
    order = np.argsort(-(said + seen / (1 + seen.sum())), kind="stable")[:size]
    known = np.sort(order).astype(np.int32)
    rows = np.full(vocab_size, size, np.int32)
    rows[known] = np.arange(size)
    return OwnTokens(known, rows), float(said[known].sum() / max(said.sum(), 1))


def drafter_recipe(
    teacher: LlamaConfig,
    own: OwnTokens,
    *,
    embed_size: int,
    num_layers: int,
    num_steps: int,
    seed: int,
) -> Recipe:
    """The model, whose width is a multiple of two heads of 64, and its run."""
    heads = embed_size // HEAD_SIZE
    config = LlamaConfig(
        vocab_size=own.num_rows,
        embed_size=embed_size,
        ffw_size=3 * embed_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads // HEADS_PER_KV_HEAD,
        head_size=HEAD_SIZE,
        max_context=teacher.max_context,
        rope_theta=teacher.rope_theta,
        tied_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return Recipe(
        config=config, num_steps=num_steps, row_length=ROW_LENGTH, learning_rate=0.004, seed=seed
    )


def first_embedding(
    teacher: Llama, own: OwnTokens, embed_size: int
) -> Float32[np.ndarray, "rows embed"]:
    """The teacher's embedding in its main directions; other tokens share their mean."""
    parameters = teacher.parameters()
    embedding = np.asarray(parameters["embedding"], np.float32)
    if teacher.int8:
        embedding *= np.asarray(parameters[scale_name("embedding")])[:, None]
    rows = embedding[own.known]
    if own.num_rows > len(rows):
        others = embedding[own.rows == len(rows)]
        rows = np.concatenate([rows, others.mean(axis=0, keepdims=True)])
    _, directions = np.linalg.eigh(rows.T @ rows)  # in ascending order
    narrow = rows @ directions[:, ::-1][:, :embed_size]
    narrow = np.pad(narrow, ((0, 0), (0, embed_size - narrow.shape[1])))
    return np.asarray(narrow / np.sqrt(np.mean(narrow**2) * embed_size), np.float32)


def batches(
    documents: Sequence[Expected], own: OwnTokens, recipe: Recipe, start_step: int
) -> Iterator[Row]:
    """Endless batches of rows of documents, from a step on, each by the seed and its number."""
    numbers = itertools.count(start_step * recipe.batch_size)
    draws = (random.Random(f"{recipe.seed}/{number}") for number in numbers)
    rows = (_packed(documents, own, recipe.row_length, one) for one in draws)
    return stacked(rows, recipe.batch_size)


def _packed(documents: Sequence[Expected], own: OwnTokens, length: int, rng: random.Random) -> Row:
    size, few = length + 1, documents[0].likely.shape[1]
    tokens, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
    segments, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    likely, shares = np.zeros((size, few), np.int32), np.zeros((size, few), np.float32)
    start, segment = 0, 0
    while start < size:
        one = documents[rng.randrange(len(documents))]
        taken = min(len(one.tokens), size - start)
        part, segment = slice(start, start + taken), segment + 1
        tokens[part] = own.rows[one.tokens[:taken]]
        weights[part] = np.where(np.arange(taken) < one.num_prompt - 1, _PROMPT_WEIGHT, 1.0)
        weights[part.stop - 1] = 0.0  # what follows the end is another document
        segments[part], positions[part] = segment, np.arange(taken)
        likely[part] = own.rows[one.likely[:taken]]
        # What the drafter does not know it cannot draft.
        shares[part] = np.where(likely[part] == len(own.known), 0.0, one.shares[:taken])
        start = part.stop
    return Row(tokens, weights[:-1], segments, positions, likely[:-1], shares[:-1])


def for_teacher(model: Llama, own: OwnTokens, teacher: LlamaConfig) -> Llama:
    """The trained model as one that takes the teacher's tokens."""
    parameters = model.parameters()
    if own.num_rows > len(own.known):
        parameters["token_rows"] = jnp.asarray(own.rows)
    config = dataclasses.replace(
        model.config,
        vocab_size=teacher.vocab_size,
        bos_token_id=teacher.bos_token_id,
        eos_token_ids=teacher.eos_token_ids,
        draft_vocab_size=own.num_rows if "token_rows" in parameters else None,
    )
    return Llama(config, parameters)
