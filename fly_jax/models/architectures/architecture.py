"""What a family of models has beyond Llama, in the words of its `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fly_jax.models.config import LlamaConfig

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family.

    Attributes:
      name: its `model_type`.
      class_name: its class in transformers.
      read: the fields of `LlamaConfig` that are its own, from the fields of a `config.json` and the
        number of layers; None where it has none. May raise as a wrong kind of field does.
      written: the fields of a `config.json` that are its own.
      defaults: of fields that a `config.json` of this family may leave out, where they are not
        Llama's.
      refused: fields of transformers' class for the family that no published model sets, and that
        are not run.
      gguf: its name in GGUF files, where it is known there.
      gguf_pairs: GGUF files have the two numbers of a rotary pair side by side.
    """

    name: str
    class_name: str
    read: Callable[[Mapping[str, Any], int], Fields] | None = None
    written: Callable[[LlamaConfig], Fields]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ()
    gguf: str | None = None
    gguf_pairs: bool = False
