"""The host loop: admits prompts, dispatches rounds and hands out tokens as they settle."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced
from jaxtyping import Array, Bool

from fly_jax.decoding.capacity import (
    LEAST_ATTENDED,
    Reach,
    bucket_for,
    capacity_for,
    ladder,
    like_lengths,
)
from fly_jax.decoding.drafters.chain import checked_drafter
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.generation import Generation, Settled
from fly_jax.decoding.kept import Kept
from fly_jax.decoding.memory_keys import MemoryKeys, check_memory
from fly_jax.decoding.programs import Programs, prefill_piece
from fly_jax.decoding.prompts import CheckedPrompt, check_prompt
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs, corrections
from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama
from fly_jax.sharding.processes import broadcast
from fly_jax.verification.correction_memory import CorrectionMemory

_TIMINGS = 3


class Decoder:
    """Decodes batches of prompts with one rule on one pair.

    Programs are compiled at the first batch; later batches of the same row count and capacity
    reuse them.

    Attributes:
      listener: is told of every dispatch's rounds, on the host, before their tokens are handed out.
    """

    def __init__(
        self,
        target: Llama,
        draft: Llama | Sequence[Llama] | Drafter | None,
        spec: RoundSpec,
        *,
        capacity: int | None = None,
        batch_size: int = 1,
        protected_token_ids: Sequence[int] = (),
        cache_dtype: jnp.dtype | None = None,
        memory: CorrectionMemory | None = None,
    ) -> None:
        """Checks the pair against the rule.

        Args:
          target: the model whose text is wanted.
          draft: the model that proposes, or several, each of which proposes to the one before it;
            or any other drafter. Without one the spec's lookup proposes alone, if it has one.
          spec: the rule, K and the lookup.
          capacity: cache positions of a row; None for what each batch needs.
          batch_size: rows decoded together.
          protected_token_ids: control tokens, never rescued; the ends of text are added.
          cache_dtype: type of the caches; that of the parameters if not given.
          memory: what a rule with `uses_memory` looks up; with `spec.reports_mismatches` it learns
            while decoding.

        Raises:
          FlyJaxError: K without anything that proposes, a level without a size, vocabularies of
            different sizes, or no memory where one is needed.
        """
        self.spec = spec
        self.drafter = checked_drafter(target, draft, spec)
        check_memory(spec, memory)
        self.memory = memory
        self.listener: Callable[[RoundOutput], None] | None = None
        self.capacity = capacity
        self.batch_size = batch_size
        self._programs = Programs(target, self.drafter, spec, cache_dtype)
        self._inputs = RuleInputs(
            rule=self._programs.put_numbers(spec.rule),
            sampling=self._programs.put_numbers(spec.sampling),
            protected=self._programs.put_protected([*protected_token_ids, *spec.eos_token_ids]),
        )
        self._keys = MemoryKeys(self._programs)
        self._seconds: np.ndarray | None = None  # of a round of each depth, once measured
        self._kept: Kept | None = None
        self._compiled: set[tuple[str, int, int]] = set()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int | Sequence[int] = 0,
        resumes: bool = False,
    ) -> Iterator[tuple[Settled, Generation]]:
        """Decodes one batch, yielding tokens as they settle with what the row has become so far.

        The device is always one dispatch ahead of what has been read, so nothing waits for the
        host.

        Args:
          prompts: token ids.
          max_new_tokens: limit of each continuation.
          seed: of the draws: of each prompt, or of the first one, the others' being one more each.
            A prompt's draws depend on nothing else.
          resumes: keep the caches for the next call, and begin behind what these prompts have in
            common with those of the last one and their continuations, as the turns of a
            conversation do. Not where the drafter cannot (`Drafter.resumes`).

        Raises:
          FlyJaxError: no prompt, too many, an empty one, one longer than the context, or no new
            token asked for.
        """
        prompts = self.checked(prompts)
        self._refresh()
        if self.spec.depths and self._seconds is None:
            self._seconds = self._measure(prompts)
        kept = self._taken(prompts) if resumes else None
        self.forget()
        state = self._admit(prompts, max_new_tokens, seed, self._seconds, kept=kept)
        del kept  # whose caches are no more
        generations = [Generation(tuple(prompt)) for prompt in prompts]
        live = set(range(len(prompts)))
        reach = self._reach(state.target.capacity)
        limits = [limit for _, limit in self._rows(prompts, max_new_tokens)]
        jax.block_until_ready(state.target.keys)
        start = time.perf_counter()
        pending: RoundOutput | None = None
        try:
            while self._goes_on(bool(live)):
                self._refresh()
                rows = live or range(len(prompts))
                known = [(generations[row].num_tokens, limits[row]) for row in rows]
                state = state.attending(reach.next_dispatch(known))
                state, output = self._programs.run(state, self._inputs)
                for leaf in jax.tree.leaves(output):
                    leaf.copy_to_host_async()
                if pending is not None:
                    pending = jax.device_get(pending)
                    if self.memory is not None and self.spec.reports_mismatches:
                        self.memory.add(corrections(pending))
                    if self.listener is not None:
                        self.listener(pending)
                    for settled in self._read(pending, generations, live):
                        generations[settled.row].seconds = time.perf_counter() - start
                        yield settled, generations[settled.row]
                pending = output
        finally:
            if resumes and (self.drafter is None or self.drafter.resumes):
                self._kept = Kept(
                    [[*one.prompt_token_ids, *one.token_ids] for one in generations], state
                )

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> list[Generation]:
        """Decodes any number of prompts, up to `batch_size` of like length at a time."""
        finished: dict[int, Generation] = {}
        for batch in self.batches(prompts):
            some, seeds = [prompts[index] for index in batch], [seed + index for index in batch]
            finished |= zip(batch, self.decode(some, max_new_tokens, seed=seeds), strict=True)
        return [finished[index] for index in range(len(prompts))]

    def batches(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Which prompts are decoded together, as indices: see `like_lengths`."""
        return like_lengths(prompts, self.batch_size)

    def decode(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int | Sequence[int]
    ) -> list[Generation]:
        """Decodes one batch; see `stream`."""
        finished: dict[int, Generation] = {}
        for settled, generation in self.stream(prompts, max_new_tokens, seed=seed):
            finished[settled.row] = generation
        return [finished[row] for row in range(len(prompts))]

    def forget(self) -> None:
        """Gives back the caches that `stream` keeps where it is to be resumed."""
        self._kept = None

    def _taken(self, prompts: Sequence[Sequence[int]]) -> Kept | None:
        """What was kept, if it holds anything of these prompts."""
        kept = self._kept
        return kept if kept is not None and kept.shared(prompts) else None

    def warm_up(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 1, *, resumes: bool = False
    ) -> None:
        """Compiles what decoding these prompts needs; the memory learns nothing from it.

        Args:
          prompts: what will be decoded.
          max_new_tokens: limit of each continuation.
          resumes: they will be taken in behind what is kept, if anything is, so that only the
            rounds are compiled.
        """
        prompts = self.checked(prompts)
        self._refresh()
        for batch in self.batches(prompts):
            some = [prompts[index] for index in batch]
            # What programs differ by: few batches of many have others than those before them.
            capacity = self._capacity(some, max_new_tokens)
            reach = self._reach(capacity).all(self._rows(some, max_new_tokens))
            resumed = resumes and self._taken(some) is not None
            needed = {("rounds", capacity, attended) for attended in reach}
            if not resumed:
                bucket = bucket_for(max(map(len, some)), self.batch_size)
                needed.add(("prompts", capacity, bucket))
            if needed <= self._compiled:
                continue
            if self.spec.depths and self._seconds is None:
                self._seconds = self._measure(some)
            # Rows that are finished from the start take no round.
            limit = max_new_tokens
            if resumed:  # as many positions, without taking in what fills them
                limit += max(map(len, some)) - 1
                some = self.checked([prompt[:1] for prompt in some])
            state = self._admit(some, limit, 0, self._seconds, finished=True)
            for attended in reach:
                state = self._programs.run(state.attending(attended), self._inputs)[0]
            self._compiled |= needed

    def _refresh(self) -> None:
        """Puts the memory's keys where the next round finds them, if they are others by now."""
        if self.memory is not None and self.spec.rule.uses_memory:
            keys = self._keys.of(self.memory)
            self._inputs = dataclasses.replace(self._inputs, memory=keys)

    def _measure(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Seconds of a round of each depth, on these prompts; the program is compiled before."""
        seconds = np.zeros(len(self.spec.depths), np.float32)
        longest = max(map(len, prompts))
        capacity = self._capacity(prompts, 1)
        room = max(capacity - self._programs.room - longest, 1)
        attended = self._reach(capacity).next_dispatch(self._rows(prompts, room))
        for repeat in range(1 + _TIMINGS):
            for depth in range(len(seconds)):
                only_this = np.full(len(seconds), np.inf, np.float32)
                only_this[depth] = 1.0
                state = self._admit(prompts, room, 0, only_this)
                state = state.attending(attended)
                jax.block_until_ready(state.target.keys)
                start = time.perf_counter()
                # Only what is counted is kept: the caches make room for the next ones.
                drafted = self._programs.run(state, self._inputs)[1].num_drafted
                rounds = np.sum(np.any(jax.device_get(drafted), axis=1))
                taken = (time.perf_counter() - start) / max(rounds, 1)
                if repeat:
                    seconds[depth] = min(seconds[depth], taken) if repeat > 1 else taken
        if self._programs.spans_processes:  # which must all choose the same
            seconds = np.asarray(broadcast(seconds.tolist()), np.float32)
        return seconds

    @property
    def max_context(self) -> int:
        """Of the target."""
        return self._programs.config.max_context

    @property
    def protected(self) -> Bool[Array, " vocab"]:
        """True for the tokens that are never rescued."""
        return self._inputs.protected

    def trace_prefill(self, prompt_length: int) -> Traced:
        """The program that takes in prompts of this length, or their first piece.

        For a decoder of abstract models.
        Models whose parameters are `jax.ShapeDtypeStruct`, each with a sharding, can be compiled
        for devices that are not there: the planner does so.

        Raises:
          FlyJaxError: a length that the models or the decoder cannot take.
        """
        prompts = [[0] * prompt_length] * self.batch_size
        return cast(Traced, self._admit(self.checked(prompts), 1, 0))

    def trace_last_piece(self, state: DecodeState, prompt_length: int) -> Traced | None:
        """The program that takes in the last piece of prompts; None where the first is all.

        It attends to all that was taken in before.

        Args:
          state: the abstract state that the pieces before it leave.
          prompt_length: of the prompts.
        """
        piece = prefill_piece(self.batch_size)
        start = bucket_for(prompt_length, self.batch_size) - piece
        return cast(Traced, self._programs.take_in(state, piece, start)) if start > 0 else None

    def trace_rounds(self, state: DecodeState) -> Traced:
        """The program of a dispatch, given the abstract state that prefilling leaves."""
        self._refresh()
        return cast(Traced, self._programs.run(state, self._inputs))

    def checked(self, prompts: Sequence[Sequence[int]]) -> list[CheckedPrompt]:
        """The prompts, each checked unless that has been done."""
        return [
            prompt
            if isinstance(prompt, CheckedPrompt)
            else check_prompt(prompt, self._programs.config, name=f"Prompt {row}")
            for row, prompt in enumerate(prompts, 1)
        ]

    def _capacity(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        """That of the decoder, or what a batch needs: above `LEAST_ATTENDED` a power of two."""
        if self.capacity is not None:
            return self.capacity
        rows = [prompts[0]] * self.batch_size if len(prompts) < self.batch_size else prompts
        longest = max(prompts, key=len)
        needed = capacity_for(
            self.spec, [*rows[1:], longest], max_new_tokens, self.max_context, self.drafter
        )
        return needed if needed <= LEAST_ATTENDED else 1 << (needed - 1).bit_length()

    def _reach(self, capacity: int) -> Reach:
        steps = (capacity,) if self._programs.splits_positions else ladder(capacity)
        return Reach(self._programs.structure, steps, self._programs.room)

    def _rows(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[tuple[int, int]]:
        """Length of each row, and length at which it is done."""
        return [
            (len(prompt), min(len(prompt) + max_new_tokens, self.max_context)) for prompt in prompts
        ]

    def _admit(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int | Sequence[int],
        seconds: np.ndarray | None = None,
        *,
        finished: bool = False,
        kept: Kept | None = None,
    ) -> DecodeState:
        if not 1 <= len(prompts) <= self.batch_size:
            raise FlyJaxError(
                f"{len(prompts)} prompts were given for {self.batch_size} rows; a batch needs 1 to "
                f"{self.batch_size}: split the prompts or raise batch_size."
            )
        if max_new_tokens < 1:
            raise FlyJaxError(
                f"max_new_tokens is {max_new_tokens}; decoding needs at least 1: raise it."
            )
        context = self._programs.config.max_context
        capacity = self._capacity(prompts, max_new_tokens)
        start = 0 if kept is None else kept.shared(prompts)
        if kept is not None and start:
            capacity = max(capacity, kept.capacity)
        # Rows without a prompt are finished from the start.
        lengths = np.ones(self.batch_size, np.int32)
        limits = np.ones(self.batch_size, np.int32)
        text = np.zeros((self.batch_size, capacity), np.int32)
        for row, prompt in enumerate(prompts):
            lengths[row] = len(prompt)
            limits[row] = min(len(prompt) + max_new_tokens, context)
            text[row, : len(prompt)] = prompt
        bucket = bucket_for(int(lengths.max()), self.batch_size)
        needed = int(limits.max()) + self._programs.room
        if max(bucket, needed) > capacity:
            raise FlyJaxError(
                f"A row needs {needed} positions and the decoder has {capacity}; make it with a "
                "larger capacity (see capacity_for)."
            )
        given = [seed + row for row in range(len(prompts))] if isinstance(seed, int) else seed
        seeds = np.zeros(self.batch_size, np.uint32)
        seeds[: len(prompts)] = np.asarray(given, np.int64) % 2**32
        budget = None
        if self.spec.rule.budget is not None:
            budget = np.broadcast_to(
                np.asarray(self.spec.rule.budget, np.float32), (self.batch_size,)
            )
        if self._programs.structure.deferred_window and seconds is None:
            seconds = np.zeros(0, np.float32)
        if finished:
            limits = lengths
        rows = self._programs.put_rows(text, lengths, limits, seeds, budget, seconds)
        if kept is None or not start:
            return self._programs.admit(rows, bucket)
        bucket = bucket_for(int(lengths.max()) - start, self.batch_size)
        start = min(start, capacity - bucket)
        return self._programs.resume(kept.take(), rows, start, bucket)

    def _goes_on(self, is_live: bool) -> bool:
        """Whether there is another dispatch; process 0's word where the mesh is of several.

        What the hosts read of a round is the same on all, so they would agree by themselves; but
        only process 0 knows of what is not in the arrays.
        """
        return bool(broadcast(is_live)) if self._programs.spans_processes else is_live

    def _read(
        self, output: RoundOutput, generations: list[Generation], live: set[int]
    ) -> Iterator[Settled]:
        """Books one dispatch's rounds: what settled in each live row."""
        totals = None
        if self.spec.rule.budget is not None:
            totals = np.ravel(np.asarray(self.spec.rule.budget, np.float32))
        for index in range(output.count.shape[0]):
            for row in sorted(live):
                total = None if totals is None else float(totals[row % totals.size])
                settled = generations[row].book(output, (index, row), self.spec, total)
                if settled is None:
                    continue
                if settled.finish_reason is not None:
                    live.discard(row)
                yield settled
