"""What a checkpoint gives, whatever its format: its configuration, and its weights by groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Array

from fly_jax.models.config import LlamaConfig
from fly_jax.models.specs import Group, ParameterSpec
from fly_jax.sharding.rules import Layout

# What a reader may hold beyond the arrays that it fills.
READ_BUFFER_BYTES = 256 * 2**20


Arranged = Callable[[str, Array, ParameterSpec], Array]


class Source(Protocol):
    """A checkpoint of which everything was checked that can be without reading a weight.

    Attributes:
      config: of the model.
      int8: its matrices are int8 and have scales.
    """

    config: LlamaConfig
    int8: bool

    @property
    def arranged(self) -> Arranged:
        """Makes a parameter of a group, from its name, what is stored and its spec, `Llama`'s.

        It runs under `jit`, and is equal for checkpoints that are arranged alike.
        """
        ...

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """The group's parameters as they are stored, by name.

        Raises:
          FlyJaxError: a file is damaged.
        """
        ...

    def describe(self, group: Group, name: str) -> str:
        """Where a parameter of a group lies, in words that begin a sentence."""
        ...
