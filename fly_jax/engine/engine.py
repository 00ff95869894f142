"""The engine: requests share the slots of one state, and join and leave between rounds."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np
from jax.stages import Traced

from fly_jax.decoding.config import DecodingConfig, RoundSpec
from fly_jax.decoding.depth import FORESEEN_TOKENS, AcceptanceStats
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.model import CATCH_UP_AFTER
from fly_jax.decoding.pair import Pair, check_prompt, checked_drafter
from fly_jax.decoding.programs import Programs, compiled, shape_of
from fly_jax.decoding.state import DecodeState, RoundOutput, RuleInputs, corrections, map_lengths
from fly_jax.engine.depth_costs import DepthCosts, rounds_run
from fly_jax.engine.prefill import OFFLINE_TOKENS, SMALL_TOKENS, Chunk, ChunkPlan, Prefill
from fly_jax.engine.request import (
    Generation,
    Request,
    RequestState,
    Settled,
    check_request,
    check_sizes,
    check_spec,
)
from fly_jax.engine.slots import BLOCK, Dispatch, EarlierAnswers, Prefix, RowInputs, Seated, Slots
from fly_jax.errors import FlyJaxError
from fly_jax.models.llama import Llama, lies_on_cpu
from fly_jax.models.tokenizer import Tokenizer
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory
from fly_jax.verification.rules import Rule

DEFAULT_LENGTH = 2048
# So many waiting requests are searched for those that can be run with the first.
_LOOKAHEAD = 64
# Programs that are compiled at a time: XLA takes gigabytes for each large one.
_MOST_COMPILED = 8

Listener = Callable[[RoundOutput, Sequence[RequestState | None]], None]


class Engine:
    """Decodes any number of requests, as many at a time as it has slots.

    The answer to a request depends on nothing else, but for how other widths round, and a loosened
    or drawn one on `earlier`: its rule, its draws and its limit are its own. All rules that it may
    ask for run in one program.
    On a mesh of several processes each makes the same engine and is asked the same in the same
    order; where only one of them is asked, see `fly_jax.serving.lockstep`.

    Attributes:
      waiting: the requests that have no slot yet, the first to come in front.
      prefill_seconds: in which prompts alone were run so far; those beside rounds count little.
      memory: of corrections; what it learns depends on what is decoded together.
      earlier: the last answers, if the lookup wants them; drawn and loosened ones depend on them.
      costs: from what K is chosen; None where it is fixed.
      listener: is told of every dispatch's rounds, on the host, with who was in which slot, before
        their tokens are handed out.
    """

    def __init__(
        self, target: Llama, draft: Llama | Sequence[Llama] | Drafter | None, spec: RoundSpec, *,
        num_slots: int = 8, max_length: int | None = None, prefill_chunk: int = 256,
        rules: Sequence[Rule] = (), protected_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None, load_may_change_text: bool = False,
        memory: CorrectionMemory | None = None, offline: bool = False,
        listener: Listener | None = None, shared_block: int = BLOCK,
    ) -> None:  # fmt: skip
        """Checks the pair against the rule. The caches are made when they are first needed.

        Args:
          draft: the model that proposes, or several, each of which proposes to the one before it;
            or any other drafter. Without one the spec's lookup proposes alone, if it has one.
          spec: of the rounds; its rule is that of requests without one of their own. They are
            decoded greedily, unless they say otherwise. With `depths` K is chosen for the batch,
            round by round, while all requests in it are lossless and greedy; beside another one it
            is the largest.
          max_length: tokens of a request, its prompt included, at most the target's context; None
            for 2048, or the context if that is less.
          prefill_chunk: prompt tokens that are run between two rounds.
          rules: one of every kind that may be asked for, besides `spec`'s and the lossless one.
          protected_token_ids: control tokens, never rescued; the ends of text are added.
          tokenizer: fills `Settled.texts` and finds stop strings; None if nobody asks for text.
          load_may_change_text: K is chosen for loosened and for drawn requests too. What they give
            then depends on K, and so on what else is decoded: no rule keeps what it would not keep
            alone, and draws stay the target's.
          memory: what rules with `uses_memory` look up; it learns with `reports_mismatches`.
          offline: nobody waits for a reply, and all requests have the rule and the sampling of
            `spec`: free slots are filled between two rounds, however long that takes, and rounds
            are made for all slots, however few are in use.
          shared_block: the beginning that a prompt has in common with what a slot holds is not run
            again, in multiples of so many tokens; 0 for always.

        Raises:
          FlyJaxError: no slot or no room; a sampling of all requests that are not offline; rules
            whose windows cannot be deferred together; K without anything that proposes, a level
            without a size, vocabularies of different sizes, or no memory where one is needed.
        """
        context, self._vocab_size = target.config.max_context, target.config.vocab_size
        length = min(DEFAULT_LENGTH, context) if max_length is None else max_length
        check_sizes(num_slots, prefill_chunk, length, context)
        if not offline:
            check_spec(spec, rules)
        self._own, self._tokenizer = spec.rule, tokenizer
        self.drafter = checked_drafter(target, draft, spec.static)
        self._programs = Programs(target, self.drafter, spec.static)
        kinds = None if offline else rules
        self._rows = RowInputs(self._programs, spec, kinds, protected_token_ids, num_slots)
        self.spec = dataclasses.replace(spec, rule=self._rows.united)
        if memory is None and (self.spec.rule.uses_memory or spec.static.reports_mismatches):
            raise FlyJaxError(
                "This rule looks mismatches up in a memory, or is to teach one, and none was "
                "given; pass memory=CorrectionMemory(…), empty or filled."
            )
        self.memory, self.listener = memory, listener
        kept = 0 if self.drafter is None else self.drafter.num_earlier_tokens
        self.earlier = EarlierAnswers(kept) if kept else None
        self.max_length = length
        self._buckets = self._programs.attention_buckets(length, num_slots)
        self._capacity = self._buckets.steps[-1]
        few = self._programs.has_few_shapes
        tokens = OFFLINE_TOKENS if offline else prefill_chunk
        tokens = min(tokens, SMALL_TOKENS) if lies_on_cpu(target) else tokens
        longest, self._prefill_chunk = self._capacity if few else length, prefill_chunk
        plan = ChunkPlan(
            self._buckets.steps, tokens=tokens, num_slots=num_slots, longest=longest,
            together=tokens if few else None,
        )  # fmt: skip
        self._prefill = Prefill(self._programs, self.spec, plan, self._capacity, length)
        self._row_steps = (num_slots,) if offline else self._programs.row_steps(num_slots)
        unseen = 2 if self.drafter is None else self.drafter.unseen
        block = shared_block if self.drafter is None or self.drafter.resumes else 0
        self.slots = Slots(self._row_steps, block, unseen)
        self.waiting: collections.deque[RequestState] = collections.deque()
        self.prefill_seconds = 0.0
        self.costs = None
        if spec.static.depths:
            rated = self.drafter is not None and self.drafter.rates_drafts
            copies = spec.static.may_copy(self.drafter)
            self.costs = DepthCosts(spec.static.depths, rated=rated, copies=copies)
        self._load_may_change_text = load_may_change_text
        self._last_read, self._offline = 0.0, offline
        self._seated: list[Seated] = []  # since the last dispatch
        self._pending = collections.deque[Dispatch]()  # on their way, oldest first
        self._state: DecodeState | None = None
        self._stats: AcceptanceStats | None = None  # of the state that was given back
        self._compiled: set[object] = set()

    @classmethod
    def of(
        cls, pair: Pair, config: DecodingConfig | None = None, *,
        prompts: Sequence[Sequence[int]] | None = None, max_new_tokens: int = 128,
        num_slots: int = 8, max_length: int | None = None, prefill_chunk: int = 256,
        rules: Sequence[Rule] = (), audits: bool = False, max_logprobs: int = 0,
        reports_evidence: bool = False, reports_mismatches: bool = False,
        load_may_change_text: bool = False, memory: CorrectionMemory | None = None,
        listener: Listener | None = None, with_texts: bool = True, offline: bool = False,
        shared_block: int = BLOCK, **given: Any,
    ) -> Self:  # fmt: skip
        """Makes an engine of a pair; see `__init__` and `RoundStatic` for the other arguments.

        FlyJaxError as the class and `DecodingConfig`, and for a memory of another vocabulary.

        Args:
          config: how requests are decoded that do not say; None for `default_config`.
          prompts: all that will be decoded, where that is known: the engine is offline then, with
            no more slots and no longer caches than they need.
          memory: of corrections; None for the config's file, or an empty one, if the rule uses one.
          with_texts: fills `Settled.texts`.
          **given: values of a `DecodingConfig`, laid over the config's.
        """
        config = pair.config(config, **given)
        spec = pair.spec(config, audits=audits)
        learns = spec.static.reports_mismatches or reports_mismatches
        spec = spec.with_static(
            max_logprobs=max_logprobs, reports_evidence=reports_evidence, reports_mismatches=learns
        )
        offline = offline or prompts is not None
        if memory is not None:
            memory.check_vocabulary(pair.tokenizer.digest, "The memory")
        elif spec.rule.uses_memory and (path := config.limits.memory) is not None:
            digest, least = pair.tokenizer.digest, config.limits.csd_min_count
            memory = load_memory(Path(path), digest, min_count=least)
        elif offline and (spec.rule.uses_memory or spec.static.reports_mismatches):
            memory = CorrectionMemory(pair.tokenizer.digest, min_count=config.limits.csd_min_count)
        if prompts is not None:
            num_slots = min(num_slots, max(len(prompts), 1))
            context = pair.target.config.max_context
            longest = max(map(len, prompts), default=1)
            max_length = max(min(longest + max_new_tokens, context), 2)
        return cls(
            pair.target, pair.proposing(spec), spec, num_slots=num_slots, max_length=max_length,
            prefill_chunk=prefill_chunk, rules=rules,
            protected_token_ids=pair.protected_token_ids(config.limits.protect),
            tokenizer=pair.tokenizer if with_texts else None,
            load_may_change_text=load_may_change_text or offline, memory=memory, offline=offline,
            listener=listener, shared_block=shared_block,
        )  # fmt: skip

    def requests(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> list[Request]:
        """Makes requests as `spec` says, seeded from `seed` on; FlyJaxError for a bad prompt."""
        config = self._programs.config
        sampling, requests = self.spec.sampling, list[Request]()
        for at, prompt in enumerate(prompts):
            prompt = check_prompt(prompt, config, name=f"Prompt {at + 1}")
            requests.append(Request(prompt, max_new_tokens, sampling=sampling, seed=seed + at))
        return requests

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, seed: int = 0
    ) -> list[Generation]:
        """Decodes prompts, and returns the continuation of each; see `requests` and `submit`."""
        requests = self.requests(prompts, max_new_tokens, seed=seed)
        return [one.generation for one in self.answer(requests)]

    def answer(self, requests: Sequence[Request]) -> list[RequestState]:
        """Decodes requests to their end, and returns their states; see `submit`."""
        if self.costs is not None:  # which are measured before the first round
            self.warm_up_for(requests)
        handed_in = self.submit_all(requests)
        try:
            collections.deque(self.run(()), maxlen=0)  # to its end
        except BaseException:  # nobody else knows of them
            for one in handed_in:
                self.cancel(one)
            raise
        return handed_in

    def submit(self, request: Request) -> RequestState:
        """Queues a request.

        FlyJaxError for a prompt that leaves no room, a value that is none, or what the engine was
        not made for: log-probabilities, a kind of rule, another sampling than an offline one's.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Iterable[Request]) -> list[RequestState]:
        """Queues requests; none if `submit` refuses one of them."""
        states = [self._checked(request) for request in requests]
        self.waiting.extend(states)
        return states

    def _checked(self, request: Request) -> RequestState:
        prompt = check_prompt(request.prompt, self._programs.config)
        rule = self._own if request.rule is None else request.rule
        has_tokenizer = self._tokenizer is not None
        check_request(request, rule, self.spec.static, self.max_length, has_tokenizer=has_tokenizer)
        most = None if self.drafter is None else self.drafter.most_tokens
        if most is not None and not self.spec.static.deferred_window:
            rule.check(most)
        if not self.takes(rule):
            own = "leave it out, as an offline engine decodes all with its own"
            raise FlyJaxError(
                f"A request asks for the rule {type(rule).__name__}, of a kind that the engine was "
                f"not made for; {own if self._offline else 'name one of its kind in `rules`'}."
            )
        if self._offline and request.sampling != self.spec.sampling:
            raise FlyJaxError(
                f"A request has sampling={request.sampling} and an offline engine decodes all with "
                f"its own, {self.spec.sampling}; give that, or make the engine with offline=False."
            )
        # As it was checked, whatever its owner does with the lists.
        protected = request.protected_token_ids
        given = dataclasses.replace(
            request, prompt=prompt, seed=int(request.seed) % 2**32, stop=tuple(request.stop),
            protected_token_ids=None if protected is None else tuple(protected),
        )  # fmt: skip
        return RequestState(given, rule, self._tokenizer)

    def takes(self, rule: Rule) -> bool:
        """Tells whether the engine was made for a rule of this kind, whatever its numbers."""
        return self._rows.takes(rule)

    def cancel(self, request_state: RequestState) -> None:
        """Stops a request. Its slot is free for the next round; nothing more is read of it."""
        if request_state.is_finished:
            return
        # In this order, since others may look whether it is finished, and then why.
        request_state.generation.finish_reason = "cancelled"
        request_state.finished = time.perf_counter()
        if request_state in self.waiting:
            self.waiting.remove(request_state)
        if all(one.is_finished for one, _ in self._prefill.group):  # until then their rows go on
            self._prefill.end()
        self._forget_rounds()
        if request_state in self.slots.occupants:
            self._free(request_state)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self.waiting) + len(self._prefill.group)

    @property
    def is_idle(self) -> bool:
        """Tells whether no request waits or is decoded, and no rounds are on their way."""
        return not (self.num_waiting or self.slots.live or self._pending)

    def step(self) -> list[tuple[RequestState, Settled]]:
        """Runs prompts and dispatches rounds; returns what the rounds before have settled.

        If it is interrupted while it waits for those, the next step goes on; if elsewhere, or if
        it fails, all requests are cancelled.
        """
        follows = bool(self._pending)
        try:
            # 1) Prompts, in chunks: the rows in the slots wait for a round or two.
            self._run_prompts()

            # 2) Rounds. They run while those before them are read.
            if self.slots.live and len(self._pending) < 2:  # there are two only after Ctrl-C
                self._pending.append(self._dispatch(follows=follows))
        except BaseException:
            self._cancel_all()
            raise

        # 3) Read the rounds before; after the last row nothing else is waited for. Nothing is lost
        # if Ctrl-C comes before they are there.
        found: list[tuple[RequestState, Settled]] = []
        if follows:
            is_there = False
            try:
                output = self._pending[0].output
                is_late = output.count.is_ready()  # type: ignore[attr-defined]
                for seated in self._pending[0].seated:
                    self._note_prefill(seated, is_late=is_late)
                output, is_there = jax.device_get(output), True
                found = self._read(self._pending.popleft(), output)
            except BaseException as error:
                if is_there or not isinstance(error, KeyboardInterrupt):
                    self._cancel_all()
                raise
        self._forget_rounds()
        return found

    def _cancel_all(self) -> None:
        """Cancels all; a program may have taken what rows had, and not given it back."""
        self.slots.forget()
        self._state, self._seated = None, []
        held = [one for _, one in self.slots.live]
        for one in held:
            self.slots.give_back(one)
        for one in (*self.waiting, *(one for one, _ in self._prefill.group), *held):
            self.cancel(one)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[RequestState, Settled]]:
        """Decodes requests, yielding what settles; leaving the loop cancels what is not done."""
        handed_in = self.submit_all(requests)
        try:
            while not self.is_idle:
                yield from self.step()
        except BaseException:  # nobody reads on
            for one in handed_in:
                self.cancel(one)
            raise

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program; `on_progress` gets the numbers done and in all, after each.

        FlyJaxError for one that is to be compiled while requests wait or are being decoded.
        """
        drawn = {self.spec.sampling is not None} if self._offline else {False, True}
        chunks, steps = self._prefill.plan.all(), self._buckets.steps
        self._compile(chunks, steps, drawn, on_progress or (lambda _, __: None))

    def warm_up_for(self, requests: Sequence[Request]) -> None:
        """Compiles the programs that these requests need and no request before them has needed.

        A request that shares less with the slots than with any other prompt may still compile.
        FlyJaxError as `warm_up`, or for a request that `submit` refuses.
        """
        if not (prompts := [self._checked(one).request.prompt for one in requests]):
            return
        chunks = self._prefill.plan.needed(prompts, self.slots.texts, self.slots.block)
        lengths = [(len(one.prompt), self._prefill.limit(one)) for one in requests]
        drawn = {one.is_drawn for one in requests}
        self._compile(chunks, self._buckets.all(lengths), drawn, lambda _, __: None)

    def forget(self) -> None:
        """Gives the caches back; raises FlyJaxError while requests wait or are being decoded."""
        self._check_idle("give its caches back")
        self.slots.forget()
        if self._state is not None and not self._state.length.is_deleted():
            jax.block_until_ready(self._state)  # a round that nobody reads may still run
        follows = self.costs is not None and not self.spec.static.deferred_window
        if follows and self._state is not None:
            self._stats = self._state.stats
        self._state = None

    def trace_slots(self) -> Traced:
        """Traces the program that makes the slots, of an engine of abstract models (shapes)."""
        return cast(Traced, self._slots())

    def trace_rows(self, number: int) -> Traced:
        """Traces the program that makes rows in which so many prompts are run together."""
        return cast(Traced, self._prefill.rows([], number))

    def trace_prefill(self, rows: DecodeState, chunk: Chunk) -> Traced:
        """Traces the program of a chunk, given the abstract rows whose prompts are run."""
        size, start = chunk.size, chunk.start
        return cast(Traced, self._programs.prefill_chunk(rows, size, start, chunk.attended))

    def trace_insert(self, state: DecodeState, rows: DecodeState) -> Traced:
        """Traces the program that puts rows whose prompts have been run into slots."""
        return cast(Traced, self._programs.insert(state, rows, [0] * len(rows.length)))

    def trace_rounds(self, state: DecodeState) -> Traced:
        """Traces a dispatch for all slots, given their abstract state; some are drawn."""
        state, inputs = state.attending(self._buckets.steps[-1]), self._inputs(sampled=True)
        return cast(Traced, self._programs.run(state, inputs, self._row_steps[-1]))

    def _check_idle(self, what: str) -> None:
        if not self.is_idle:
            raise FlyJaxError(
                f"The engine was asked to {what} while it decodes, which would take a slot from a "
                "request; do so before the first one, or when all are done."
            )

    def _slots(self) -> DecodeState:
        """A new state of all slots."""
        return self._prefill.rows([], self._row_steps[-1], self._capacity)

    def _held(self) -> DecodeState:
        """The state of all slots, made anew where it was given back or lost."""
        if self._state is None or self._state.length.is_deleted():
            # Ctrl-C may come where a program has taken the state and not given it back.
            self.slots.forget()
            self._state = self._slots().without_stats()
            if self._stats is not None and not self._stats.matched.is_deleted():
                self._state = dataclasses.replace(self._state, stats=self._stats)
        return self._state

    def _compile(
        self,
        chunks: Iterable[tuple[int, int, int]],  # of prompts: rows, size and positions
        attended: Sequence[int],  # positions of rounds
        drawn: Iterable[bool],  # kinds of rounds
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Compiles what was not yet, several programs at a time; what slots hold stays there."""
        programs = self._programs
        new_chunks = sorted(set(chunks) - self._compiled)
        kinds = sorted({one and not self.spec.static.deferred_window for one in drawn})
        every = [(one, *at) for at in itertools.product(attended, self._row_steps) for one in kinds]
        rounds = [one for one in every if one not in self._compiled]
        if not (new_chunks or rounds):
            return
        self._check_idle("warm up")
        self._rows.protect(0, None)
        state, inputs = self._held(), {one: self._inputs(sampled=one) for one in kinds}
        tracing, jobs = programs.tracing(), list[Callable[[], Any]]()
        for number, some in itertools.groupby(new_chunks, key=lambda chunk: chunk[0]):
            # The rows that are put into slot 0 are what it holds.
            rows = self._prefill.rows(self.slots.held(0), number)
            rows = programs.copy_row(rows, state, 0, 0)
            state, _ = programs.insert(state, rows, [0] * number)
            rows = jax.tree.map(shape_of, rows)  # they are not held while rounds run
            for _, size, end in some:
                where = size, min(end, self._prefill.plan.positions(number) - size), end
                jobs.append(functools.partial(tracing.prefill_chunk, rows, *where))
        state = programs.release(state, 0)
        if len(self._row_steps) > 1:
            state = programs.move(state, 0, 0)
        for drawn_too, end, number in rounds:
            given = state.attending(end), inputs[drawn_too], number
            jobs.append(functools.partial(tracing.run, *given))
        # XLA uses about one core for each; processes of one mesh must compile in the same order.
        at_a_time = 1 if programs.spans_processes else min(os.cpu_count() or 1, _MOST_COMPILED)
        for done in compiled(jobs, at_a_time):
            on_progress(done, len(jobs))
        if rounds and self.costs is None and not self.slots.texts:
            # Each runs once: XLA's libraries prepare their products when they are first asked.
            one = self._prefill.rows([RequestState(Request([0], 1), self._own)], 1)
            seated = programs.put_numbers(np.arange(self._row_steps[-1]) < 1)
            for drawn_too, end, number in rounds:
                whose = dataclasses.replace(inputs[drawn_too], seated=seated)
                state = programs.insert(state, one, [0])[0].attending(end)
                state = programs.run(state, whose, number)[0].attending(None)
            state = programs.release(state, 0)
        if self.costs is not None and rounds:
            places = sorted({(end, number) for _, end, number in rounds})
            state = self._time_depths(state, inputs[kinds[0]], places)
        if self.costs is not None and new_chunks and programs.may_skip_prompts:
            number, size, end = max(new_chunks, key=lambda chunk: chunk[1])
            rows = self._prefill.rows([], number)
            self.costs.measure_reading(programs, rows, size, end)
        self._state = jax.block_until_ready(state.without_stats())
        self._compiled |= {*new_chunks, *rounds}

    def _time_depths(
        self, state: DecodeState, inputs: RuleInputs, places: Sequence[tuple[int, int]]
    ) -> DecodeState:
        """Times rounds of each K, by positions and rows, in slots that then hold nothing.

        Texts have half the positions, as requests about do: attention is a third of a CPU's round.
        """
        assert self.costs is not None
        # A lookup alone must find something, at every depth; one below a draft model must not.
        periods = (self.spec.static.num_speculative_tokens + 1, self._vocab_size)
        for attended, number in places:
            length = range(min(max(attended // 2, 1), self.max_length - 1))
            repeating, prompt = ([end - 1 - at % end for at in length] for end in periods)
            prompt = repeating if isinstance(self.drafter, Lookup) else prompt
            row, lacking = self._row_read(prompt), None
            if self._programs.may_skip_prompts:
                lacking = self._row_read(prompt, min(len(length) // 2, 2 * CATCH_UP_AFTER))
            seated = self._programs.put_numbers(np.arange(self._row_steps[-1]) < number)
            inputs = dataclasses.replace(inputs, seated=seated)
            given = row, lacking, number, self._row_read(repeating)
            state = self.costs.measure(self._programs, state.attending(attended), inputs, *given)
            state = state.attending(None)
        self.slots.forget()
        return state

    def _row_read(self, prompt: list[int], lacks: int = 0) -> DecodeState:
        """A row of which all but the target lack so many tokens: what is read changes no time."""
        row = self._prefill.rows([RequestState(Request(prompt, self.max_length), self._own)], 1)
        read = len(prompt) - 1 - lacks
        known = map_lengths(lambda length: length + read, row.drafter)
        return dataclasses.replace(row, drafter=known)

    def _forget_rounds(self) -> None:
        """Forgets the rounds on their way in which all requests are finished."""
        self._pending = collections.deque(
            pending
            for pending in self._pending
            if not all(one is None or one.is_finished for one in pending.occupants)
        )

    def _run_prompts(self) -> None:
        prefill, num_run = self._prefill, 0
        while self._offline or num_run < self._prefill_chunk:
            if not prefill.group:
                if not (group := self._next_group()):
                    return
                prefill.begin(group, self._held(), drafts=self._is_read_by_draft(group))
            # Where no rows are waited for, the chunk before is: who cancels a prompt is heard.
            num_tokens, rows = prefill.run(waits=not (self._offline or self.slots.live))
            num_run += num_tokens
            if rows is not None:  # so that they are in the next rounds
                self._seat(prefill.group, rows)
                prefill.end()

    def _is_read_by_draft(self, group: Sequence[tuple[RequestState, Prefix]]) -> bool:
        """Tells whether drafts are likely to pay for reading these prompts."""
        if self.costs is None or not self._lets_k_vary([one for one, _ in group]):
            return True
        lengths = [len(one.request.prompt) - prefix.length for one, prefix in group]
        new = sum(min(one.request.max_new_tokens, FORESEEN_TOKENS) for one, _ in group)
        return self._programs.agreed(self.costs.pays_to_read(*self._soon(len(group)), lengths, new))

    def _lets_k_vary(self, more: Sequence[RequestState] = ()) -> bool:
        """Tells whether K is free in rounds of what is decoded, and of more requests."""
        live = (one for _, one in self.slots.live)
        return self._load_may_change_text or all(one.lets_k_vary for one in (*live, *more))

    def _soon(self, number: int) -> tuple[int, int]:
        """Rows of a round once so many prompts are run, and all that wait; and requests in them."""
        requests = min(len(self.slots.live) + number + len(self.waiting), self._row_steps[-1])
        return next(step for step in self._row_steps if step >= requests), requests

    def _next_group(self) -> list[tuple[RequestState, Prefix]]:
        """The first request that waits, with others whose prompts are run in the same passes."""
        plan, found = self._prefill.plan, list[tuple[RequestState, Prefix]]()
        if self.waiting:
            self._held()  # before anything is shared with it: it may be lost
        kind: tuple[int, int] | None = None
        for one in itertools.islice(self.waiting, _LOOKAHEAD):
            if len(found) == min(self.slots.num_free, plan.rows[-1]):
                break
            prefix = self.slots.shared(one.request)
            its_kind = plan.kind(prefix.length, len(one.request.prompt))
            if not found:
                found, kind = [(one, prefix)], its_kind
            elif its_kind == kind:
                found.append((one, prefix))
            elif not self._offline:  # nobody overtakes
                break
            if kind is None:
                break
        for one, _ in found:
            self.waiting.remove(one)
        return found

    def _seat(self, group: Sequence[tuple[RequestState, Prefix]], rows: DecodeState) -> None:
        """Puts prompts that have been run into slots."""
        now, slots = time.perf_counter(), list[int]()
        for request_state, prefix in group:
            request_state.seated, request_state.num_reused = now, prefix.length
            slot, moves = self.slots.take(request_state, prefix)
            self._move(moves)
            slots.append(slot)
        # Rows that only fill the pass go to the slot of the first request, which replaces them.
        places = [*slots, *slots[:1] * (len(rows.length) - len(slots))]
        self._state, is_there = self._programs.insert(self._held(), rows, places)
        requests = tuple(one for one, _ in group)
        self._seated.append(Seated(requests, self._prefill.begun, is_there))
        for request_state in requests:
            if request_state.is_finished:  # it was cancelled while its prompt was run
                self._free(request_state)

    def _dispatch(self, *, follows: bool) -> Dispatch:
        # Of requests that wait some would come into the first slots.
        moved = [] if self.num_waiting else self.slots.gather()
        self._move(moved)
        live, rows = self.slots.live, self.slots.reach
        known = ((one.generation.num_tokens, self._prefill.limit(one.request)) for _, one in live)
        samples = any(one.request.is_drawn for _, one in live)
        attended = self._buckets.next_dispatch(known)
        state = self._held().attending(attended)
        if self.costs is not None:
            may_vary = self._lets_k_vary()
            # As for all that will be decoded: while requests wait, a longer round delays them.
            soon, _ = self._soon(len(self._prefill.group))
            costs = self.costs.next((max(rows, soon), attended), may_vary=may_vary)
            costs = np.asarray(self._programs.agreed(costs.tolist()), np.float32)
            state = state.choosing(self._programs.put(costs))
        state, output = self._programs.run(state, self._inputs(sampled=samples), rows)
        self._state = state.attending(None)
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        seated, self._seated = tuple(self._seated), []
        is_timed = follows and not (moved or seated or self._prefill.group)
        return Dispatch(output, tuple(self.slots.occupants[:rows]), attended, is_timed, seated)

    def _inputs(self, *, sampled: bool = False) -> RuleInputs:
        """The numbers of all slots; with deferred windows nothing is ever drawn."""
        sampled = sampled and not self.spec.static.deferred_window
        return self._rows.of(self.slots.occupants, self.memory, self.earlier, sampled=sampled)

    def _read(self, dispatch: Dispatch, output: RoundOutput) -> list[tuple[RequestState, Settled]]:
        now = time.perf_counter()
        taken, self._last_read = now - self._last_read, now
        if self.memory is not None and self.spec.static.reports_mismatches:
            self.memory.add(corrections(output, dispatch.teaching))
        if self.listener is not None:
            self.listener(output, dispatch.occupants)
        if self.costs is not None:
            program = (len(dispatch.occupants), dispatch.attended)
            self.costs.observe(program, rounds_run(output), taken if dispatch.is_timed else None)
        found = []
        for index in range(output.count.shape[0]):
            for row, request_state in enumerate(dispatch.occupants):
                if request_state is None or request_state.is_finished:
                    continue
                settled = request_state.update_from_output(output, (index, row), self.spec)
                if settled is None:
                    continue
                request_state.first_token = request_state.first_token or now
                request_state.generation.seconds = now - (request_state.prefilled or now)
                if (shown := request_state.detokenize(settled)) is None:
                    continue
                if shown.finish_reason is not None:
                    request_state.finished = now
                    if self.earlier is not None and not request_state.request.cache_salt:
                        self.earlier.add(request_state.generation.token_ids)
                    if settled.finish_reason is None:  # a stop string, of which the row knows not
                        self._free(request_state)
                    else:
                        self.slots.give_back(request_state)
                found.append((request_state, shown))
        return found

    def _note_prefill(self, seated: Seated, *, is_late: bool) -> None:
        """Waits until prompts have been run; if it `is_late`, nobody knows when that was."""
        jax.block_until_ready(seated.is_there)
        now = time.perf_counter()
        self.prefill_seconds += now - max(seated.dispatched, self._last_read)
        self._last_read = now
        for request_state in seated.requests:
            request_state.prefilled = request_state.seated if is_late else now

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        for slot, to in moves:
            self._state = self._programs.move(self._held(), slot, to)

    def _free(self, request_state: RequestState) -> None:
        """Frees a slot before its row is done."""
        slot = self.slots.give_back(request_state)
        try:
            self._state = self._programs.release(self._held(), slot)
        except BaseException:  # the row would go on, and be nobody's
            self._cancel_all()
            raise
