"""The engine: requests share the slots of one state, and join and leave between rounds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fly_jax.decoding.capacity import CAPACITY_STEP, Reach, ladder
from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.drafters.chain import checked_drafter
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.generation import Settled
from fly_jax.decoding.memory_keys import MemoryKeys, check_memory
from fly_jax.decoding.pair import Pair
from fly_jax.decoding.programs import Programs
from fly_jax.decoding.prompts import check_prompt
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs, corrections
from fly_jax.engine.depth_costs import DepthCosts, rounds_run
from fly_jax.engine.prefill import Intake, empty_rows
from fly_jax.engine.request import (
    Request,
    RequestState,
    check_deferred,
    check_drawn,
    check_logprobs,
    check_room,
    check_sizes,
    check_spec,
    check_stop,
)
from fly_jax.engine.row_inputs import Protection, RowNumbers
from fly_jax.engine.slots import Dispatch, Prefix, Slots
from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama
from fly_jax.models.tokenizers.tokenizer import Tokenizer
from fly_jax.sharding.processes import broadcast
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Rule

DEFAULT_LENGTH = 2048


class Engine:
    """Decodes any number of requests, as many at a time as it has slots.

    What a request gives depends on nothing but the request, but for how other widths round: its
    rule, its draws and its limit are its own. All rules that it may ask for run in one program.

    On a mesh of several processes each makes the same engine and is asked the same in the same
    order; where only one of them is asked, see `fly_jax.serving.lockstep`.

    Attributes:
      slots: who is in which slot.
      waiting: the requests that have no slot yet, the first to come in front.
      num_reused_tokens: prompt tokens that did not have to be run, of all requests so far.
      num_prompt_tokens: those of all requests that have got a slot.
      memory: see `Decoder`; what it learns depends on what is decoded together.
      costs: from what K is chosen; None where it is fixed.
    """

    def __init__(
        self,
        target: Llama,
        draft: Llama | Sequence[Llama] | Drafter | None,
        spec: RoundSpec,
        *,
        num_slots: int = 8,
        max_length: int | None = None,
        prefill_chunk: int = 256,
        rules: Sequence[Rule] = (),
        protected_token_ids: Sequence[int] = (),
        cache_dtype: jnp.dtype | None = None,
        tokenizer: Tokenizer | None = None,
        load_may_change_text: bool = False,
        memory: CorrectionMemory | None = None,
        offline: bool = False,
    ) -> None:
        """Makes the slots.

        Args:
          target: the model whose text is wanted.
          draft: see `Decoder`.
          spec: of the rounds; its rule is that of requests without one of their own. They are
            decoded greedily, unless they say otherwise. With `depths` K is chosen for the batch,
            round by round, while all requests in it are lossless and greedy; beside another one it
            is the largest.
          num_slots: requests that are decoded at a time.
          max_length: tokens of a request, its prompt included, at most the target's context; None
            for 2048, or the context if that is less.
          prefill_chunk: prompt tokens that are run between two rounds.
          rules: a rule of every kind that requests may ask for, besides that of `spec` and the
            lossless one.
          protected_token_ids: see `Decoder`.
          cache_dtype: see `Decoder`.
          tokenizer: fills `Settled.texts` and finds stop strings; None if nobody asks for text.
          load_may_change_text: K is chosen for loosened and for drawn requests too. What they give
            then depends on K, and so on what else is decoded: no rule keeps what it would not keep
            alone, and draws stay the target's.
          memory: see `Decoder`; of all rules that use one.
          offline: nobody waits for a reply: free slots are filled between two rounds, however long
            that takes, and rounds are made for all slots, however few are in use.

        Raises:
          FlyJaxError: no slot or no room; a sampling of all requests, which is not taken; rules
            whose windows cannot be deferred together; what `Decoder` refuses.
        """
        context = target.config.max_context
        length = min(DEFAULT_LENGTH, context) if max_length is None else max_length
        check_sizes(num_slots, prefill_chunk, length, context)
        check_spec(spec, rules)
        self._own, self._tokenizer = spec.rule, tokenizer
        self._numbers = RowNumbers(spec.rule, rules, num_slots)
        self.spec = dataclasses.replace(spec, rule=self._numbers.united, rows_leave=True)
        check_memory(self.spec, memory)
        self.memory = memory
        drafter = checked_drafter(target, draft, spec)
        self._resumes = drafter is None or drafter.resumes
        self._programs = Programs(target, drafter, self.spec, cache_dtype)
        self._keys = MemoryKeys(self._programs)
        self.max_length = length
        needed = max(length + self._programs.room, prefill_chunk)
        capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
        steps = (capacity,) if self._programs.splits_positions else ladder(capacity)
        self._steps = steps
        self._intake = Intake(self._programs, self.spec, steps, prefill_chunk, length)
        self._reach = Reach(self._programs.structure, steps, self._programs.room)
        self._protection = Protection(
            self._programs, protected_token_ids, spec.eos_token_ids, num_slots
        )
        self._row_steps = (num_slots,) if offline else self._programs.row_steps(num_slots)
        self.slots = Slots(self._row_steps)
        self.waiting: collections.deque[RequestState] = collections.deque()
        self.num_reused_tokens = self.num_prompt_tokens = 0
        self.costs = DepthCosts(spec.depths) if spec.depths else None
        self._load_may_change_text = load_may_change_text
        self._last_read, self._has_taken_in = 0.0, False
        self._offline = offline
        self._pending: Dispatch | None = None
        self._state = empty_rows(self._programs, self.spec, num_slots, capacity)

    @classmethod
    def of(
        cls,
        pair: Pair,
        config: DecodingConfig | None = None,
        *,
        num_slots: int = 8,
        max_length: int | None = None,
        prefill_chunk: int = 256,
        rules: Sequence[Rule] = (),
        audits: bool = False,
        max_logprobs: int = 0,
        load_may_change_text: bool = False,
        memory: CorrectionMemory | None = None,
        **given: Any,
    ) -> Self:
        """An engine of a pair.

        Args:
          pair: from `load_pair`.
          config: how requests are decoded that do not say; None for `default_config`.
          num_slots: see the class.
          max_length: see the class.
          prefill_chunk: see the class.
          rules: see the class.
          audits: fills `Generation.reports`.
          max_logprobs: see `RoundSpec`.
          load_may_change_text: see the class.
          memory: see the class.
          **given: see `DecodingConfig`, over whose values they are laid.

        Raises:
          FlyJaxError: as the class and `DecodingConfig`.
        """
        config = pair.config(config, **given)
        if not (pair.drafts or pair.drafter or config.prompt_lookup_max):
            config = config.without_draft()
        spec = pair.spec(config, audits=audits).served()
        spec = dataclasses.replace(spec, max_logprobs=max_logprobs)
        if memory is not None:
            memory.check_vocabulary(pair.tokenizer.digest, "The memory")
        return cls(
            pair.target,
            pair.proposing(spec),
            spec,
            num_slots=num_slots,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            rules=rules,
            protected_token_ids=pair.protected_token_ids(config.protect),
            tokenizer=pair.tokenizer,
            load_may_change_text=load_may_change_text,
            memory=memory,
        )

    def submit(self, request: Request) -> RequestState:
        """Hands in a request.

        Raises:
          FlyJaxError: a prompt that the target cannot continue or that leaves no room, no new token
            asked for, an empty stop string, more log-probabilities than the engine was made for,
            or a rule of a kind that it was not made for or that could rescue nothing with its K.
        """
        prompt = check_prompt(request.prompt, self._programs.config)
        check_room(len(prompt), request.max_new_tokens, self.max_length)
        check_stop(request.stop, self._tokenizer is not None)
        check_logprobs(request.logprobs, self.spec.max_logprobs)
        rule = self._own if request.rule is None else request.rule
        check_drawn(request, rule)
        if self.spec.boundary == "defer":
            check_deferred(request, rule, self.spec.deferred_window)
        elif self.spec.num_speculative_tokens:
            rule.check(self.spec.num_speculative_tokens)
        if not self.takes(rule):
            raise FlyJaxError(
                f"A request asks for the rule {type(rule).__name__}, of a kind that the engine was "
                "not made for; name one of its kind in `rules` when it is made."
            )
        # As it was checked, whatever its owner does with the lists.
        ids = request.protected_token_ids
        ids = None if ids is None else tuple(ids)
        given = dataclasses.replace(request, prompt=prompt, protected_token_ids=ids)
        request_state = RequestState(given, rule, self._tokenizer)
        self.waiting.append(request_state)
        return request_state

    def takes(self, rule: Rule) -> bool:
        """Whether a rule is of a kind that the engine was made for, whatever its numbers."""
        return self._numbers.takes(rule)

    def cancel(self, request_state: RequestState) -> None:
        """Stops a request. Its slot is free for the next round; nothing more is read of it."""
        if request_state.is_finished:
            return
        # In this order, since others may look whether it is finished, and then why.
        request_state.generation.finish_reason = "cancelled"
        request_state.finished = time.perf_counter()
        if request_state in self.waiting:
            self.waiting.remove(request_state)
        if self._intake.request_state is request_state:
            self._intake.drop()
        self._forget_rounds()
        for slot, occupant in self.slots.live:
            if occupant is request_state:
                self.slots.give_back(slot)
                self._state = self._programs.release(self._state, slot)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self.waiting) + (self._intake.request_state is not None)

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is on its way."""
        return not (self.num_waiting or self.slots.live or self._pending)

    def step(self) -> list[tuple[RequestState, Settled]]:
        """Takes in prompts, dispatches rounds, and reads those that were dispatched before.

        Returns:
          What has settled of whom.
        """
        # 0) Where rounds run one after the other, they end with the first row that is done. If a
        #    prompt waits for its place they are read at once: running ahead would leave it empty.
        found = []
        if self._offline and self.waiting and self.spec.rounds_per_dispatch > 1 and self._pending:
            pending, self._pending = self._pending, None
            found = self._read(pending)

        # 1) Prompts, in pieces: so much of them that the rows in the slots wait for a round or two.
        self._take_in()

        # 2) Rounds. They run while those before them are read.
        before, self._pending = self._pending, None
        if self.slots.live:
            self._pending = self._dispatch(follows=before is not None)

        # 3) What the rounds before have settled. With the last row nothing else is waited for.
        found += [] if before is None else self._read(before)
        self._forget_rounds()
        return found

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[RequestState, Settled]]:
        """Decodes requests, yielding what settles; `RequestState.generation` has the whole."""
        for request in requests:
            self.submit(request)
        while not self.is_idle:
            yield from self.step()

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program: nothing that is asked for later has to.

        Args:
          on_progress: gets how many of how many are there, after each.

        Raises:
          FlyJaxError: requests wait or are being decoded.
        """
        taken = itertools.product(self._intake.sizes, self._steps)
        self._compile(taken, self._steps, {False, True}, on_progress or (lambda _, __: None))

    def warm_up_for(self, requests: Sequence[Request]) -> None:
        """Compiles what these requests need.

        One that shares less with what is in the slots than with any other prompt may still compile.

        Raises:
          FlyJaxError: requests wait or are being decoded.
        """
        prompts = [one.prompt for one in requests]
        taken = self._intake.needed(prompts, shares=self._resumes)
        lengths = [(len(one.prompt), self._intake.limit(one)) for one in requests]
        drawn = {one.sampling is not None for one in requests}
        self._compile(taken, self._reach.all(lengths), drawn, lambda _, __: None)

    def _compile(
        self,
        taken: Iterable[tuple[int, int]],
        reaches: Sequence[int],
        drawn: Iterable[bool],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Runs programs once: of pieces of prompts, by size and reach, and of rounds."""
        if not self.is_idle:
            raise FlyJaxError(
                "The engine was asked to warm up while it decodes, which would take a slot from a "
                "request; warm it up before the first one, or when all are done."
            )
        for slot in range(self.slots.num_free):
            self.slots.forget(slot)
        one = self._intake.row(RequestState(Request([0], self.max_length), self._own))
        one = self._programs.copy_row(one, self._state, 0)
        self._protection.hold(0, None)
        kinds = [have for one in sorted(drawn) if (have := self._inputs(sampled=one))]
        taken, rounds = list(taken), list(itertools.product(reaches, self._row_steps))
        done, total = itertools.count(1), len(taken) + len(kinds) * len(rounds)
        for size, attended in taken:
            start = min(attended, self._steps[-1] - size)
            one = self._programs.take_in(one, size, start, attended)
            on_progress(next(done), total)
        state = self._programs.insert(self._state, one, 0)
        state = self._programs.release(state, 0)
        for attended, rows in rounds:
            for inputs in kinds:
                state = self._programs.run(state.attending(attended), inputs, rows)[0]
                on_progress(next(done), total)
            if self.costs is not None:
                state = self.costs.measure(self._programs, state, kinds[0], one, rows)
        self._state = jax.block_until_ready(state.attending(None).unpaced())

    def _forget_rounds(self) -> None:
        """Those on their way, if all that were in them are finished."""
        if self._pending is not None and not self._pending.is_awaited:
            self._pending = None

    def _take_in(self) -> None:
        intake, num_run = self._intake, 0
        while self._offline or num_run < intake.sizes[-1] or not self.slots.live:
            if intake.request_state is None:
                if not (self.waiting and self.slots.num_free):
                    return
                request_state = self.waiting.popleft()
                shared = self.slots.shared(request_state.request.prompt) if self._resumes else None
                intake.begin(request_state, shared or Prefix(0, 0), self._state)
            size, one = intake.run()
            if one is not None:  # so that it is in the next rounds
                self._seat(*intake.end(), one)
            num_run += size
            self._has_taken_in = True

    def _seat(self, request_state: RequestState, prefix: Prefix, one: DecodeState) -> None:
        """Puts a prompt that was taken in into a slot."""
        request_state.seated, request_state.num_reused = time.perf_counter(), prefix.length
        self.num_reused_tokens += prefix.length
        self.num_prompt_tokens += len(request_state.request.prompt)
        slot = self.slots.take(request_state, prefix)
        self._state = self._programs.insert(self._state, one, slot)

    def _dispatch(self, *, follows: bool) -> Dispatch:
        live, rows = self.slots.live, self.slots.reach
        known = ((one.generation.num_tokens, self._intake.limit(one.request)) for _, one in live)
        samples = any(one.request.sampling is not None for _, one in live)
        attended = self._reach.next_dispatch(known)
        state = self._state.attending(attended)
        if self.costs is not None:
            may_vary = self._load_may_change_text or all(one.is_settled for _, one in live)
            seconds = self.costs.next((rows, attended), may_vary=may_vary)
            if self._programs.spans_processes:  # which must all choose the same
                seconds = np.asarray(broadcast(seconds.tolist()), np.float32)
            state = state.choosing(self._programs.put(seconds, (None,)))
        inputs = self._inputs(sampled=samples)
        assert inputs is not None
        state, output = self._programs.run(state, inputs, rows)
        self._state = state.attending(None)
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        is_timed, self._has_taken_in = follows and not self._has_taken_in, False
        return Dispatch(output, tuple(self.slots.occupants[:rows]), attended, is_timed)

    def _inputs(self, *, sampled: bool = False) -> RuleInputs | None:
        """The numbers of all slots; None where nothing is ever drawn."""
        if sampled and self.spec.boundary == "defer":
            return None
        programs, occupants = self._programs, self.slots.occupants
        inputs = self._numbers.inputs(programs, occupants, self._protection, sampled=sampled)
        if self.memory is not None and self.spec.rule.uses_memory:
            inputs = dataclasses.replace(inputs, memory=self._keys.of(self.memory))
        return inputs

    def _read(self, dispatch: Dispatch) -> list[tuple[RequestState, Settled]]:
        output: RoundOutput = jax.device_get(dispatch.output)
        now = time.perf_counter()
        taken, self._last_read = now - self._last_read, now
        if self.memory is not None and self.spec.reports_mismatches:
            self.memory.add(corrections(output, dispatch.teaching))
        if self.costs is not None:
            rounds = rounds_run(output, dispatch.num_seats)
            self.costs.observe(dispatch.program, rounds, taken if dispatch.is_timed else None)
        found = []
        for index in range(output.count.shape[0]):
            for slot, request_state in enumerate(dispatch.occupants):
                if request_state is None or request_state.is_finished:
                    continue
                settled = request_state.book(output, (index, slot), self.spec)
                if settled is None:
                    continue
                request_state.first_token = request_state.first_token or now
                request_state.generation.seconds = now - (request_state.seated or now)
                shown = request_state.detokenize(settled)
                if shown is None:
                    continue
                if shown.finish_reason is not None:
                    request_state.finished = now
                    self.slots.give_back(slot)
                    if settled.finish_reason is None:  # a stop string, of which the row knows not
                        self._state = self._programs.release(self._state, slot)
                found.append((request_state, shown))
        return found
