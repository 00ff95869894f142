"""How many cache positions a batch gets, which prompts share one, and how much is attended to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fly_jax.decoding.deferral import most_provisional
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.programs import prefill_piece
from fly_jax.decoding.spec import RoundSpec, RoundStructure

_SMALLEST_BUCKET = 16
CAPACITY_STEP = 64
# Of fewer cache positions nothing is saved by reading a part of them.
LEAST_ATTENDED = 256


def capacity_for(
    spec: RoundSpec,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_context: int,
    drafter: Drafter | None = None,
) -> int:
    """Cache positions that these prompts need, in steps that keep the number of programs small.

    Args:
      spec: of the rounds.
      prompts: token ids.
      max_new_tokens: limit of each continuation.
      max_context: of the target.
      drafter: what proposes, if it is not what `spec` asks for.
    """
    room = spec.room if drafter is None else drafter.room(spec.num_speculative_tokens)
    longest = max(len(prompt) for prompt in prompts)
    needed = min(longest + max_new_tokens, max_context) + room
    needed = max(needed, bucket_for(longest, len(prompts)))
    return -(-needed // CAPACITY_STEP) * CAPACITY_STEP


def ladder(capacity: int) -> tuple[int, ...]:
    """How many positions of a cache attention may read, in ascending order; the last is all.

    Each is about twice the one before it: a row's attention then reads at most about twice what it
    holds, and few programs are compiled.
    """
    steps = [capacity]
    while steps[0] // 2 >= LEAST_ATTENDED:
        steps.insert(0, -(-steps[0] // 2 // CAPACITY_STEP) * CAPACITY_STEP)
    return tuple(steps)


def like_lengths(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Batches of prompts, as indices: each of prompts about as long as each other.

    A long prompt among short ones would have them all wait for it, in a cache as long as it needs.
    So prompts of a batch are all of one class: that of the power of two which bounds their lengths,
    the short ones of up to `LEAST_ATTENDED` tokens being one class. Prompts of a class, and batches
    by their first prompts, are in the order in which they were given.
    """
    order = sorted(range(len(prompts)), key=lambda index: _length_class(len(prompts[index])))
    batches: list[list[int]] = []
    for index in order:
        last = batches[-1] if batches else []
        same = last and _length_class(len(prompts[last[0]])) == _length_class(len(prompts[index]))
        if same and len(last) < batch_size:
            last.append(index)
        else:
            batches.append([index])
    return sorted(batches)


def _length_class(length: int) -> int:
    """Prompts of one class are decoded together: the power of two that bounds their length."""
    return max(length - 1, LEAST_ATTENDED - 1).bit_length()


def bucket_for(length: int, rows: int) -> int:
    """Tokens that prompts of this length are padded to: a power of two, or whole pieces."""
    piece = prefill_piece(rows)
    if length > piece:
        return -(-length // piece) * piece
    return max(min(_SMALLEST_BUCKET, piece), 1 << (length - 1).bit_length())


class Reach:
    """How many cache positions the next dispatch's attention must read, from what is known."""

    def __init__(self, structure: RoundStructure, steps: Sequence[int], room: int) -> None:
        """For any rows.

        Args:
          structure: of the rounds.
          steps: numbers of positions to choose from, in ascending order; see `ladder`.
          room: positions beyond a row's last token that a round may write to.
        """
        window = structure.deferred_window
        most_a_dispatch = structure.rounds_per_dispatch * (structure.num_speculative_tokens + 1)
        # One dispatch is on its way when the next one is made.
        self._growth = 2 * most_a_dispatch + (most_provisional(window) if window else 0)
        self._steps, self._room = steps, room

    def next_dispatch(self, rows: Iterable[tuple[int, int]]) -> int:
        """Positions for the next dispatch.

        Args:
          rows: of each row that goes on, the tokens that are known to have settled, its prompt
            among them, and the length at which it is done.
        """
        return self._step(max(self._longest(*row) for row in rows))

    def all(self, rows: Sequence[tuple[int, int]]) -> list[int]:
        """Every answer that `next_dispatch` may give, also when only the shortest rows are left.

        Args:
          rows: before anything has settled.
        """
        first = self._step(min(self._longest(*row) for row in rows))
        last = self._step(max(limit for _, limit in rows))
        return [step for step in self._steps if first <= step <= last]

    def _longest(self, length: int, limit: int) -> int:
        """Tokens that a row may have before the last round of the next dispatch."""
        return min(length + self._growth, limit)

    def _step(self, length: int) -> int:
        return next(step for step in self._steps if step >= length + self._room)
