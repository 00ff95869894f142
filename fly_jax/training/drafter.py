"""A small drafter for a teacher: its shape, its own vocabulary, and what it learns from."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import Llama
from fly_jax.models.specs import scale_name
from fly_jax.training.dataset import Row
from fly_jax.training.pair import Recipe
from fly_jax.training.teacher import Expected

HEAD_SIZE = 64
HEADS_PER_KV_HEAD = 2
ROW_LENGTH = 512
# Of a token of a prompt, which is never drafted, but has the same words as answers.
_PROMPT_WEIGHT = 0.3


class OwnTokens(NamedTuple):
    """Which of a teacher's tokens the drafter knows.

    Attributes:
      known: in ascending order; one has the row of its place.
      rows: the row of each of the teacher's tokens: for those that are not known, the one after
        all others.
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
    """The most frequent tokens, and the share of the answers that they are.

    Args:
      documents: what the teacher has said.
      vocab_size: of the teacher.
      num_rows: what the drafter has, at most.
    """
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
    """The model and its run.

    Args:
      teacher: whose rotary base and context the drafter takes.
      own: the tokens that it knows.
      embed_size: a multiple of two heads of 64.
      num_layers: decoder layers.
      num_steps: optimiser steps.
      seed: of the initial weights and of the data.
    """
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
    """The teacher's embedding, in as many of its main directions as the drafter is wide.

    The row for all other tokens is their mean. Rows are scaled as random ones are.
    """
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


def distilled_rows(
    documents: Sequence[Expected], own: OwnTokens, recipe: Recipe, start_row: int = 0
) -> Iterator[Row]:
    """Endless rows of documents, in the drafter's tokens, from `start_row` on.

    Each row is a function of the seed and its number alone.
    """
    for index in itertools.count(start_row):
        rng = random.Random(f"{recipe.seed}/{index}")
        yield _packed(documents, own, recipe.row_length, rng)


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
    config = dataclasses.replace(
        model.config,
        vocab_size=teacher.vocab_size,
        bos_token_id=teacher.bos_token_id,
        eos_token_ids=teacher.eos_token_ids,
    )
    if own.num_rows == len(own.known):
        return Llama(config, model.parameters())
    config = dataclasses.replace(config, draft_vocab_size=own.num_rows)
    return Llama(config, model.parameters() | {"token_rows": jnp.asarray(own.rows)})
