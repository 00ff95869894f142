"""What a teacher expects token by token, and its features: read along once, kept in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float16, Int, Int32, UInt16
from tqdm import tqdm

from fly_jax.models.llama import Llama
from fly_jax.training.answers import Document
from fly_jax.training.trainer import bfloat16_matmul

# Beyond these a teacher's probabilities are mostly below one in a hundred.
_FEW = 8
_PART_DOCUMENTS = 64
# Lengths are rounded up to this, so that few programs are compiled.
_LENGTH_STEP = 64
_PASS_TOKENS = 2048


class Expected(NamedTuple):
    """A document's tokens, and those that the teacher finds most probable next, with shares.

    Attributes:
      features: inputs of some of the teacher's layers side by side, the bits of bfloat16 numbers.
        They stay on disk until they are looked at.
    """

    tokens: Int32[np.ndarray, " length"]
    num_prompt: int
    likely: Int32[np.ndarray, "length few"]
    shares: Float16[np.ndarray, "length few"]
    features: UInt16[np.ndarray, "length features"]


def expected(
    teacher: Llama,
    documents: Sequence[Document],
    folder: Path,
    *,
    length: int,
    layers: Sequence[int],
) -> list[Expected]:
    """What a teacher expects after the last `length` tokens of each, in parts kept on disk.

    Args:
      layers: of the teacher, whose inputs are the features.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Expected] = []
    with tqdm(total=len(documents), desc="Reading along", unit="document") as bar:
        for start in range(0, len(documents), _PART_DOCUMENTS):
            some = documents[start : start + _PART_DOCUMENTS]
            file = folder / f"part_{start // _PART_DOCUMENTS:05}.npz"
            if not file.exists():
                _save(file, _read_along(teacher, some, length, tuple(layers)))
            found += _load(file)
            bar.update(len(some))
    return found


def _read_along(
    teacher: Llama, documents: Sequence[Document], length: int, layers: tuple[int, ...]
) -> list[Expected]:
    texts = [np.array([*one.prompt, *one.answer], np.int32) for one in documents]
    found: dict[int, Expected] = {}
    for batch, rows, width in _passes([len(text) for text in texts]):
        tokens = np.zeros((rows, width), np.int32)
        for row, index in enumerate(batch):
            tokens[row, : len(texts[index])] = texts[index]
        model = teacher.config, teacher.layout, teacher.parameters()
        likely, shares, features = jax.device_get(_most_likely(*model, tokens, layers=layers))
        for row, index in enumerate(batch):
            end = len(texts[index])
            kept = slice(max(end - length, 0), end)
            num_prompt = max(len(documents[index].prompt) - kept.start, 0)
            own = likely[row, kept], shares[row, kept].astype(np.float16)
            bits = features[row, kept].view(np.uint16)
            found[index] = Expected(texts[index][kept], num_prompt, *own, bits)
    return [found[index] for index in range(len(texts))]


def _passes(lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """Which documents go through the teacher together, and that pass's rows and width."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        width = -(-lengths[order[-1]] // _LENGTH_STEP) * _LENGTH_STEP
        rows = max(_PASS_TOKENS // width, 1)
        yield order[-rows:], rows, width
        del order[-rows:]


@functools.partial(jax.jit, static_argnames=("config", "layout", "layers"))
def _most_likely(
    config: Any,
    layout: Any,
    parameters: dict[str, Array],
    tokens: Int[Array, "rows width"],
    *,
    layers: tuple[int, ...],
) -> tuple[Int32[Array, "rows width few"], Float[Array, "rows width few"], Array]:
    """The teacher's most probable next tokens and their probabilities; its features."""
    model = Llama(config, parameters, layout)
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    before: Bool[Array, "width width"] = jnp.tril(jnp.ones((width, width), bool))
    visible = jnp.broadcast_to(before, (rows, width, width))
    # Where activations are bfloat16, so are the products' operands anyhow.
    matmul = bfloat16_matmul if model.dtype == jnp.float32 else None
    hidden, features = model.uncached_and_inputs(tokens, positions, visible, matmul, layers)

    def of_row(row: Float[Array, "width embed"]) -> tuple[Array, Array]:
        logits = model.logits(row[None], matmul)[0]
        best, likely = jax.lax.top_k(logits, min(_FEW, logits.shape[-1]))
        return likely, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    likely, shares = jax.lax.map(of_row, hidden)  # logits of all rows would take much memory
    return likely, shares, features.astype(jnp.bfloat16)


def _save(file: Path, part: Sequence[Expected]) -> None:
    """What is read late stands in a file of its own; the other one comes last."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in part])

    def write(out: BinaryIO) -> None:
        np.savez_compressed(
            out,
            lengths=[len(one.tokens) for one in part],
            num_prompt=[one.num_prompt for one in part],
            tokens=joined("tokens"),
            likely=joined("likely"),
            shares=joined("shares"),
        )

    _write(file.with_suffix(".npy"), lambda out: np.save(out, joined("features")))
    _write(file, write)


def _write(file: Path, write: Callable[[BinaryIO], None]) -> None:
    """Under another name first, so that no file is ever half there."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        write(out)
    partial.replace(file)


def _load(file: Path) -> list[Expected]:
    features = np.load(file.with_suffix(".npy"), mmap_mode="r")
    with np.load(file) as part:
        ends = np.cumsum(part["lengths"])[:-1]
        fields = [np.split(part[name], ends) for name in ("tokens", "likely", "shares")]
        numbers = part["num_prompt"].tolist()
        return [
            Expected(tokens, num_prompt, likely, shares, own)
            for num_prompt, tokens, likely, shares, own in zip(
                numbers, *fields, np.split(features, ends), strict=True
            )
        ]
