"""A teacher's answers, its expectations token by token, its features: what a head learns from."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import resource
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Float32, Int, Int32, Shaped, UInt16
from tqdm import tqdm

from fly_jax.engine.engine import Engine
from fly_jax.models.llama import Llama, Matmul
from fly_jax.shapes import Features, Hidden
from fly_jax.training.trainer import Recipe, Row, bfloat16_matmul, stacked

# A teacher's further probabilities are mostly below one in a hundred.
_FEW = 8
_PART_DOCUMENTS, _CHUNK = 64, 64
ROW_LENGTH = 1024
# Weight of a prompt's token: it is never drafted, but has the same words as answers.
_PROMPT_WEIGHT = 0.3


class Document(NamedTuple):
    """A prompt and the teacher's answer."""

    prompt: list[int]
    answer: list[int]


def continued(
    engine: Engine, prompts: Sequence[Sequence[int]], file: Path, *, max_new_tokens: int, seed: int
) -> list[Document]:
    """The teacher's continuations, kept in a JSON lines file that a later run continues."""
    found = dict(read_documents(file))
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


def read_documents(file: Path) -> Iterator[tuple[int, Document]]:
    """The numbered records of an earlier run; a last incomplete one is removed from the file."""
    if not file.exists():
        return
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(file, len(whole))
    for line in whole.splitlines():
        record = json.loads(line)
        yield record["index"], Document(record["prompt"], record["answer"])


class Expected(NamedTuple):
    """A document's tokens, and those that the teacher finds most probable next, with shares.

    All but the tokens stays on disk until it is looked at. Features are inputs of some of the
    teacher's layers side by side, the bits of bfloat16 numbers.
    """

    tokens: Int32[np.ndarray, " length"]
    num_prompt: int
    likely: Int32[np.ndarray, "length few"]
    shares: Float16[np.ndarray, "length few"]
    features: UInt16[np.ndarray, "length features"]


def expected(
    teacher: Llama, documents: Sequence[Document], folder: Path, length: int, layers: Sequence[int]
) -> list[Expected]:
    """The teacher's expectations of each text's last `length` tokens, kept in parts on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Expected] = []
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # every part stays open
    with contextlib.suppress(ValueError):  # macOS, which says that there is no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with tqdm(total=len(documents), desc="Reading along", unit="document") as bar:
        for start in range(0, len(documents), _PART_DOCUMENTS):
            some = documents[start : start + _PART_DOCUMENTS]
            texts = [np.array([*one.prompt, *one.answer], np.int32) for one in some]
            digest = zlib.crc32(b"".join(text.tobytes() for text in texts))
            file = folder / f"part_{digest:08x}_{length}.npy"
            size = sum(min(len(text), length) for text in texts)
            if not file.exists() or len(np.load(file, mmap_mode="r")) != size:
                made = file.with_suffix(".partial.npy")  # no part is ever half there
                np.save(made, _read_along(teacher, texts, length, tuple(layers)))
                made.replace(file)
            part, end = np.load(file, mmap_mode="r"), 0
            for one, text in zip(some, texts, strict=True):
                tokens = text[-length:]
                begin, end = end, end + len(tokens)
                num_prompt = max(len(one.prompt) - len(text) + len(tokens), 0)
                own = {name: part[name][begin:end] for name in Expected._fields[2:]}
                found.append(Expected(tokens, num_prompt, **own))
            bar.update(len(some))
    return found


def _read_along(
    teacher: Llama, texts: Sequence[np.ndarray], length: int, layers: tuple[int, ...]
) -> np.ndarray:
    """The features and expectations of each text's last tokens, one text behind the other."""
    found: dict[int, np.ndarray] = {}
    for batch, rows, width in _passes([len(text) for text in texts]):
        tokens = np.zeros((rows, width), np.int32)
        for row, index in enumerate(batch):
            tokens[row, : len(texts[index])] = texts[index]
        model = teacher.config, teacher.layout, teacher.parameters()
        kept = as_records(_most_likely(*model, tokens, layers=layers))
        for row, index in enumerate(batch):
            end = len(texts[index])
            found[index] = kept[row, max(end - length, 0) : end].copy()
    return np.concatenate([found[index] for index in range(len(texts))])


def _passes(lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Yields the documents of each pass through the teacher, with its rows and width."""
    # Widths are rounded up, so that few programs are compiled: an accelerator's take longest.
    pass_tokens, step = (2048, 64) if jax.default_backend() == "cpu" else (16384, 256)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        width = -(-lengths[order[-1]] // step) * step
        rows = max(pass_tokens // width, 1)
        yield order[-rows:], rows, width
        del order[-rows:]


@functools.partial(jax.jit, static_argnames=("config", "layout", "layers"))
def _most_likely(
    config: Any, layout: Any, parameters: dict[str, Array], tokens: Int[Array, "rows width"], *,
    layers: tuple[int, ...],
) -> dict[str, Array]:  # fmt: skip
    model = Llama(config, parameters, layout)
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (rows, width, width))
    # Where activations are bfloat16, so are the products' operands anyhow.
    matmul = bfloat16_matmul if model.dtype == jnp.float32 else None
    hidden, features = model.uncached_and_inputs(tokens, positions, visible, matmul, layers)
    return kept_of(model, hidden, features, matmul)


def kept_of(
    model: Llama, hidden: Hidden, features: Features, matmul: Matmul | None
) -> dict[str, Array]:
    """The teacher's most probable next tokens, and the rest of `Expected`, as it is kept."""
    rows, width, embed = hidden.shape
    chunk = math.gcd(rows * width, _CHUNK)  # logits of all tokens would take much memory

    def of_chunk(some: Float[Array, "chunk embed"]) -> tuple[Array, Array]:
        logits = model.logits(some[None], matmul)[0]
        best, likely = jax.lax.top_k(logits, min(_FEW, logits.shape[-1]))
        return likely, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    found = jax.lax.map(of_chunk, hidden.reshape(-1, chunk, embed))
    likely, shares = (one.reshape(rows, width, -1) for one in found)
    bits = jax.lax.bitcast_convert_type(features.astype(jnp.bfloat16), jnp.uint16)
    return {"likely": likely, "shares": shares.astype(jnp.float16), "features": bits}


def as_records(kept: dict[str, Array]) -> Shaped[np.ndarray, "rows width"]:
    """Joins what is kept of each token into records, which a file holds one behind the other."""
    said = jax.device_get(kept)
    fields = [(name, one.dtype, one.shape[2:]) for name, one in said.items()]
    found = np.empty(said["likely"].shape[:2], fields)
    for name, one in said.items():
        found[name] = one
    return found


class HeardRow(NamedTuple):
    """A row of documents, or with a leading axis a batch, with the figures of `Expected`."""

    row: Row
    likely: Int32[np.ndarray, "length few"]
    shares: Float32[np.ndarray, "length few"]
    features: UInt16[np.ndarray, "length features"]


def frequent_tokens(
    documents: Sequence[Expected], vocab_size: int, number: int
) -> tuple[Int32[np.ndarray, " known"], float]:
    """The most frequent tokens, ascending, and the share of the answers that they are."""
    said, seen = np.zeros(vocab_size), np.zeros(vocab_size)
    for one in documents:
        said += np.bincount(one.tokens[one.num_prompt :], minlength=vocab_size)
        seen += np.bincount(one.tokens, minlength=vocab_size)
    # Tokens of prompts fill the places that answers leave.
    order = np.argsort(-(said + seen / (1 + seen.sum())), kind="stable")[:number]
    known = np.sort(order).astype(np.int32)
    return known, float(said[known].sum() / max(said.sum(), 1))


def batches(documents: Sequence[Expected], recipe: Recipe, start_step: int) -> Iterator[HeardRow]:
    """Yields batches of rows of documents without end; each depends on the seed and its number."""
    numbers = itertools.count(start_step * recipe.batch_size)
    draws = (random.Random(f"{recipe.seed}/{number}") for number in numbers)
    drawn = (map(one.choice, itertools.repeat(documents)) for one in draws)
    return stacked((laid_out(one, recipe.row_length) for one in drawn), recipe.batch_size)


def laid_out(documents: Iterable[Expected], length: int) -> HeardRow:
    """A row of documents; the last one is cut off, and zeros follow if they end too early."""
    size, start = length + 1, 0
    documents = iter(documents)
    first = next(documents)
    few, wide = first.likely.shape[1], first.features.shape[1]
    tokens, segments, positions = (np.zeros(size, np.int32) for _ in range(3))
    weights, features = np.zeros(size, np.float32), np.zeros((size, wide), np.uint16)
    likely, shares = np.zeros((size, few), np.int32), np.zeros((size, few), np.float32)
    for segment, one in enumerate(itertools.chain([first], documents), 1):
        taken = min(len(one.tokens), size - start)
        part = slice(start, start + taken)
        tokens[part], segments[part], positions[part] = one.tokens[:taken], segment, range(taken)
        weights[part] = np.where(np.arange(taken) < one.num_prompt - 1, _PROMPT_WEIGHT, 1.0)
        weights[part.stop - 1] = 0.0  # what follows the end is another document
        likely[part], shares[part] = one.likely[:taken], one.shares[:taken]
        features[part] = one.features[:taken]
        start = part.stop
        if start == size:
            break
    row = Row(tokens, weights[:-1], segments, positions)
    return HeardRow(row, likely[:-1], shares[:-1], features[:-1])
