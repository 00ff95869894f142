"""The requests' texts on the device, where a lookup below the draft model finds them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32
from tpu_inference.layers.common.sharding import ShardingAxisName

from fly_jax.integrations.vllm_tpu.slots import Slots


class Texts:
    """What the draft model has taken in of each request; its prompt as soon as it is known.

    A request that finds no place here is drafted without a lookup, with the same tokens.

    Attributes:
      tokens: of the requests, on every device whole.
      slots: where the rows of the step have theirs; the number of slots for padding.
    """

    tokens: Int32[Array, "slots capacity"]
    slots: Int32[Array, " requests"]

    def __init__(self, mesh: jax.sharding.Mesh, num_requests: int, capacity: int) -> None:
        """Empty.

        Args:
          mesh: the engine's.
          num_requests: those that may run at a time.
          capacity: most tokens of a text.
        """
        self._mesh = mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))
        self._slots = Slots(num_requests)
        empty = np.zeros((num_requests, capacity), np.int32)
        self.tokens = jax.device_put(empty, self._everywhere)
        self.begin([None] * num_requests, {})

    def begin(self, rows: Sequence[str | None], requests: Mapping[str, Any]) -> None:
        """Says whose the rows of the next step are.

        Args:
          rows: the requests' ids in the order of the rows; None for padding.
          requests: the engine's requests that are alive, by id.
        """
        slots, is_new = self._slots.step(rows, requests)
        for name, slot, comes in zip(rows, slots, is_new, strict=True):
            if name is not None and comes and slot < self._slots.num:
                one = requests[name]
                self._put(slot, [*one.prompt_token_ids, *(one.output_token_ids or ())])
        self.slots = jax.device_put(slots, self._split)

    def warm_up(self) -> None:
        """Compiles its program."""
        self._put(np.int32(0), [])

    def _put(self, slot: np.int32, text: list[int]) -> None:
        whole = np.zeros(self.tokens.shape[1], np.int32)
        known = text[: len(whole)]
        whole[: len(known)] = np.maximum(known, 0)  # what is to come is -1
        with jax.set_mesh(self._mesh):  # another one around it would be another program
            self.tokens = _put(self.tokens, *jax.device_put((slot, whole), self._everywhere))


@functools.partial(jax.jit, donate_argnums=0)
def _put(
    tokens: Int32[Array, "slots capacity"], slot: Int32[Array, ""], text: Int32[Array, " capacity"]
) -> Int32[Array, "slots capacity"]:
    return tokens.at[slot].set(text)
