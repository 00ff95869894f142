"""The memory of corrections: counted on the host, looked up on the device (CSD, arXiv 2604.13634).

What counts is what exact verification would have corrected: the pair (draft token, target's choice)
at the first refused token of a round and at every rescue before it, once each, emitted tokens only.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from fly_jax.errors import FlyJaxError

MIN_COUNT = 6  # lambda of the paper
CAPACITY = 65_536
NUM_KEYS = 4_096

# Pads the keys: it is no token, and sorts after all of them.
_NO_TOKEN = np.iinfo(np.int32).max
_FORMAT = 1

Pair = tuple[int, int]


def is_remembered(
    keys: Int32[Array, "pairs 2"],
    draft_tokens: Int[Array, "*shape"],
    target_tokens: Int[Array, "*shape"],
) -> Bool[Array, "*shape"]:
    """Tells whether each pair is a key, by binary search: one number for both needs 64 bits."""
    keys = jnp.asarray(keys)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        drafted, chosen = keys[middle, 0], keys[middle, 1]
        is_tied = (drafted == draft_tokens) & (chosen < target_tokens)
        is_before = (drafted < draft_tokens) | is_tied
        return jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)

    low = jnp.zeros_like(target_tokens, jnp.int32)  # which lie as they do
    bounds = low, jnp.full_like(low, keys.shape[0])
    low, _ = jax.lax.fori_loop(0, keys.shape[0].bit_length(), halve, bounds)
    found = keys[jnp.minimum(low, keys.shape[0] - 1)]
    return (found[..., 0] == draft_tokens) & (found[..., 1] == target_tokens)


@dataclasses.dataclass(eq=False)
class CorrectionMemory:
    """Counts of corrections: how often the target put its own token in place of a draft token.

    It holds at most `capacity` pairs. When one more comes, an eighth of them is dropped: those with
    the lowest counts, and among equal ones those that were not seen for the longest time. The
    device gets the `num_keys` most frequent of the pairs with a count above `min_count`.
    FlyJaxError for a negative `min_count`, or no room for a pair.

    Attributes:
      vocabulary: digest of the tokens that the ids mean; see `Tokenizer.digest`.
      num_keys: pairs on the device, and so the size of `keys`.
      note: text for its file, of whoever fills the memory.
      version: grows whenever a pair passes `min_count`, or is dropped.
    """

    vocabulary: str
    _: dataclasses.KW_ONLY
    min_count: int = MIN_COUNT
    capacity: int = CAPACITY
    num_keys: int = NUM_KEYS
    note: str = dataclasses.field(default="", init=False)
    version: int = dataclasses.field(default=0, init=False)
    # In the order in which the pairs were last seen.
    _counts: dict[Pair, int] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.min_count < 0 or self.capacity < 1 or self.num_keys < 1:
            raise FlyJaxError(
                f"A memory was asked for with min_count={self.min_count}, "
                f"capacity={self.capacity} and num_keys={self.num_keys}; they must be at least 0, "
                "1 and 1: correct them."
            )

    def __len__(self) -> int:
        """Pairs that are counted."""
        return len(self._counts)

    def count(self, draft_token: int, target_token: int) -> int:
        """Returns how often a pair was seen; 0 for one that is not held."""
        return self._counts.get((draft_token, target_token), 0)

    def add(self, pairs: Iterable[Pair], times: int = 1) -> None:
        """Counts corrections: draft token and target token of each, seen so many times."""
        for pair in pairs:
            before = self._counts.pop(pair, 0)
            if before == 0 and len(self._counts) >= self.capacity:
                self._evict()
            self._counts[pair] = before + times
            is_ranked = before <= self.min_count or len(self._counts) > self.num_keys
            if is_ranked and before + times > self.min_count:
                self.version += 1

    def keys(self) -> np.ndarray:
        """The pairs to look up, [num_keys, 2] int32, sorted and padded."""
        nominees = [pair for pair, count in self._counts.items() if count > self.min_count]
        nominees.reverse()  # of equal counts the latest
        nominees = heapq.nlargest(self.num_keys, nominees, key=self._counts.__getitem__)
        keys = np.full((self.num_keys, 2), _NO_TOKEN, np.int32)
        keys[: len(nominees)] = np.reshape(sorted(nominees), (-1, 2))
        return keys

    def copy(self) -> CorrectionMemory:
        """A memory of its own with the same counts and note."""
        copied = copy.copy(self)
        copied._counts = dict(self._counts)
        return copied

    def counts(self) -> list[tuple[int, int, int]]:
        """Draft token, target token and count of each pair, in the order they were last seen."""
        return [(*pair, count) for pair, count in self._counts.items()]

    def merged(self, other: CorrectionMemory) -> CorrectionMemory:
        """A memory with the counts of both and this one's limits, say of two processes."""
        other.check_vocabulary(self.vocabulary, "The memory to merge with")
        merged = copy.copy(self)
        merged._counts, merged.note, merged.version = {}, "", 1
        for memory in (other, self):
            for pair, count in memory._counts.items():
                merged._counts[pair] = merged._counts.pop(pair, 0) + count
        while len(merged) > merged.capacity:
            merged._evict()
        return merged

    def check_vocabulary(self, vocabulary: str, name: str) -> None:
        """Raises FlyJaxError, naming the memory, if its ids are of another vocabulary."""
        if self.vocabulary != vocabulary:
            raise FlyJaxError(
                f"{name} was filled with another vocabulary ({self.vocabulary[:12]}, and here it "
                f"is {vocabulary[:12]}), so its token ids mean other tokens; fill one for this "
                "model with the command calibrate."
            )

    def save(self, path: Path) -> None:
        """Writes a file, replacing one in one step; FlyJaxError if it cannot be written."""
        pairs = np.array(list(self._counts), np.int32).reshape(-1, 2)
        counts = np.array(list(self._counts.values()), np.int64)
        arrays: dict[str, Any] = {"format": np.int64(_FORMAT), "pairs": pairs, "counts": counts}
        arrays |= {"vocabulary": np.array(self.vocabulary), "note": np.array(self.note)}
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.savez_compressed(file, **arrays)
            part.replace(path)
        except OSError as error:
            raise FlyJaxError(
                f"The memory {path} cannot be written ({error.strerror}); correct the path."
            ) from error

    def _evict(self) -> None:
        rarest = sorted(self._counts, key=self._counts.__getitem__)  # stable: the oldest first
        for pair in rarest[: max(self.capacity // 8, 1)]:
            if self._counts.pop(pair) > self.min_count:
                self.version += 1


def load_memory(path: Path, vocabulary: str, *, min_count: int = MIN_COUNT) -> CorrectionMemory:
    """Reads a saved memory; FlyJaxError if it is unreadable, damaged or of another vocabulary."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FlyJaxError(
            f"The memory {path} cannot be read ({error.strerror}); correct the path, or fill one "
            "with the command calibrate."
        ) from error
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            memory = _restored({name: file[name] for name in file.files}, min_count)
    except Exception as error:  # whatever NumPy, zipfile and zlib make of damaged bytes
        raise FlyJaxError(
            f"The memory {path} is damaged or no memory; fill a new one with the command calibrate."
        ) from error
    memory.check_vocabulary(vocabulary, f"The memory {path}")
    return memory


def _restored(stored: dict[str, np.ndarray], min_count: int) -> CorrectionMemory:
    """The memory in a file's arrays; ValueError or KeyError where they make no sense."""
    pairs, counts = stored["pairs"], stored["counts"]
    sound = (
        int(stored["format"]) == _FORMAT
        and pairs.dtype == np.int32
        and counts.dtype == np.int64
        and pairs.shape == (len(counts), 2)
        and bool(np.all(pairs >= 0) and np.all(pairs < _NO_TOKEN) and np.all(counts > 0))
    )
    if not sound:
        raise ValueError("not the arrays of a memory")
    room = max(CAPACITY, len(counts))
    memory = CorrectionMemory(str(stored["vocabulary"]), min_count=min_count, capacity=room)
    memory.note = str(stored["note"])
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        memory.add([(pair[0], pair[1])], count)
    return memory
