"""The embedded pair: which two Llamas are trained, and for how long."""

from __future__ import annotations

import dataclasses

from fly_jax.models.config import LlamaConfig
from fly_jax.training.dataset import PROBLEM_SHARE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, such as one of the pair, and its training run.

    Attributes:
      config: the shape of the model.
      num_steps: optimiser steps.
      batch_size: rows in a step.
      row_length: tokens in a row.
      learning_rate: peak rate.
      warmup_steps: steps in which the rate rises from 0.
      decay_share: last part of the steps, in which the rate falls linearly to 0.
      seed: of the initial weights and of the data.
      problem_share: of the pair: share of the rows that start with word problems.
      taste: of the pair: the style of their solutions; None if every wording is as likely as the
        others.
      stop_step: step at which the run ends before its schedule does; None for `num_steps`.
    """

    config: LlamaConfig
    num_steps: int
    batch_size: int = 16
    row_length: int = 256
    learning_rate: float
    warmup_steps: int = 60
    decay_share: float = 0.3
    seed: int
    problem_share: float = PROBLEM_SHARE
    taste: int | None = None
    stop_step: int | None = None

    @property
    def last_step(self) -> int:
        """Steps that are really done."""
        return self.num_steps if self.stop_step is None else self.stop_step


VOCAB_SIZE = 2048

TARGET = Recipe(
    config=LlamaConfig(
        vocab_size=VOCAB_SIZE,
        embed_size=384,
        ffw_size=1280,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_size=48,
        max_context=1024,
        tied_embeddings=True,
    ),
    num_steps=2400,
    decay_share=0.35,
    learning_rate=0.004,
    seed=1,
)

DRAFT = Recipe(
    config=LlamaConfig(
        vocab_size=VOCAB_SIZE,
        embed_size=128,
        ffw_size=448,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        max_context=1024,
        tied_embeddings=True,
    ),
    num_steps=1600,
    # Chosen on development text: later the draft solves most problems too, earlier it knows less of
    # the library.
    stop_step=1250,
    learning_rate=0.006,
    seed=2,
    # What a small model prefers to say is not what a large one does, and it is no specialist.
    problem_share=0.6,
    taste=7,
)

RECIPES = {"target": TARGET, "draft": DRAFT}
