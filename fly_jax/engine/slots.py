"""The requests in slots, what the slots' caches hold, and the numbers that rounds read of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int32

from fly_jax.decoding.config import RoundSpec
from fly_jax.decoding.programs import Programs
from fly_jax.decoding.state import RoundOutput, RuleInputs
from fly_jax.engine.request import Request, RequestState
from fly_jax.shapes import Index
from fly_jax.verification.correction_memory import CorrectionMemory
from fly_jax.verification.rules import Exact, Rule, per_row
from fly_jax.verification.sampling import Sampling, sampling_per_row

# Default multiple of tokens in which beginnings are shared: to copy a row for fewer takes longer
# than to run them, and prompts that share a block begin at one position.
BLOCK = 16

_Who = Sequence[RequestState | None]


class Prefix(NamedTuple):
    """The beginning of a prompt that a slot's caches hold, of no tokens where none hold enough."""

    slot: int = 0
    length: int = 0


class EarlierAnswers:
    """The last tokens that requests were answered with, for a lookup; -1 where there are none."""

    def __init__(self, num_tokens: int) -> None:
        self.tokens = np.full(num_tokens, -1, np.int32)

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds an answer behind the others, the oldest of which go; `tokens` is a new array."""
        self.tokens = np.append(self.tokens, np.asarray(token_ids, np.int32))[len(token_ids) :]


class Slots:
    """The rows of the engine's state; they share beginnings in multiples of `block` (0: never)."""

    def __init__(self, steps: Sequence[int], block: int = BLOCK, unseen: int = 2) -> None:
        """Begins with free slots; rounds are made for the first few of them, as `steps` says."""
        self.block, self._unseen = block, unseen
        number = steps[-1]
        self.occupants: list[RequestState | None] = [None] * number
        self._last: list[RequestState | None] = [None] * number
        self._steps = steps
        # Slots that are free, the one with the stalest text, or with none, in front.
        self._free = list(range(number))

    @property
    def live(self) -> list[tuple[int, RequestState]]:
        """The slots in use, with their requests."""
        return [(slot, one) for slot, one in enumerate(self.occupants) if one is not None]

    @property
    def reach(self) -> int:
        """The number of slots that the next rounds are made for; 0 for none."""
        used = max((slot + 1 for slot, _ in self.live), default=0)
        return next(step for step in (0, *self._steps) if step >= used)

    def held(self, slot: int) -> list[RequestState]:
        """A request for the tokens that the caches of a slot hold; empty if they hold none."""
        last = self._last[slot]
        return [] if last is None else [RequestState(Request(_text(last)), last.rule)]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The tokens that the caches of each slot hold; slots that hold none are left out."""
        return [_text(one) for one in self._last if one is not None]

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def shared(self, request: Request) -> Prefix:
        """The longest beginning of a prompt that a slot's caches hold, in whole blocks.

        Requests of another salt are left out, and answers that are not finished.
        """
        if not self.block:
            return Prefix()
        found = [
            Prefix(slot, self._shared_blocks(_text(one, so_far=False), request.prompt))
            for slot, one in enumerate(self._last)
            if one is not None and one.request.cache_salt == request.cache_salt
        ]
        return max([Prefix(), *found], key=lambda prefix: prefix.length)

    def take(
        self, request_state: RequestState, prefix: Prefix
    ) -> tuple[int, list[tuple[int, int]]]:
        """Gives a request one of the first free slots.

        What that holds goes to the slot whose text the request continues, or to the stalest.
        Returns the slot, and the moves from slot to slot that come before.
        """
        to, held, prompt = self._free[0], self._last[prefix.slot], request_state.request.prompt
        if prefix.length > 0 and prefix.slot in self._free and held is not None:
            text = _text(held)
            # Nothing of what it holds is lost that could be relied on.
            ends = [self._shared_blocks(text, one) for one in (prompt, (*text, 0))]
            to = prefix.slot if ends == [prefix.length] * 2 else to
        first = min(self._free)
        few = max(next(step for step in self._steps if step > first), self.reach)
        slot = to if to < few else first
        moves = self._vacate(slot, to)
        self.occupants[slot] = self._last[slot] = request_state
        return slot, moves

    def gather(self) -> list[tuple[int, int]]:
        """Moves requests to the first slots, if rounds can then be made for fewer.

        Returns the moves from slot to slot, in order.
        """
        used, moves = [slot for slot, _ in self.live], list[tuple[int, int]]()
        few = next(step for step in self._steps if step >= len(used))
        for slot in [slot for slot in used if slot >= few < self.reach]:
            to = next(to for to in self._free if to < few)
            moves += [*self._vacate(to, self._free[0]), (slot, to)]
            self.occupants[to] = self._last[to] = self.occupants[slot]
            self.occupants[slot] = self._last[slot] = None
            self._free.insert(0, slot)
        return moves

    def _vacate(self, slot: int, to: int) -> list[tuple[int, int]]:
        """Takes a free slot, once what it holds has been moved to another free one."""
        self._last[to] = self._last[slot]
        self._free.remove(to)
        if slot == to:
            return []
        self._free[self._free.index(slot)] = to
        return [(slot, to)] if self.block and self._last[to] is not None else []

    def forget(self) -> None:
        """Shares nothing more of what the caches of the slots hold; all must be free."""
        self._last = [None] * len(self._last)

    def give_back(self, request_state: RequestState) -> int:
        """Frees and returns a request's slot; what its caches hold stays to be shared."""
        slot = next(slot for slot, one in self.live if one is request_state)
        self.occupants[slot] = None
        self._free.append(slot)
        return slot

    def _shared_blocks(self, row: Sequence[int], prompt: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that the caches of a row hold, in whole blocks."""
        # A drafter has not seen the row's last ones when a round ends, and a finished row is fed
        # its last one again, with too little attended to. Of the prompt, something has to be run.
        most = min(len(row) - self._unseen, len(prompt) - 1)
        same = next((at for at in range(most) if row[at] != prompt[at]), most)
        return same // self.block * self.block  # may be negative


def _text(request_state: RequestState, *, so_far: bool = True) -> tuple[int, ...]:
    """The prompt and the answer; the latter `so_far`, or only if it is finished."""
    one = request_state.generation
    has_answer = so_far or request_state.is_finished
    return (*one.prompt_token_ids, *(one.token_ids if has_answer else ()))


class Seated(NamedTuple):
    """Requests whose prompts were run together."""

    requests: tuple[RequestState, ...]
    dispatched: float  # when that began
    is_there: Array  # when they have been run


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Rounds that were dispatched, and what is to be known when they are read."""

    output: RoundOutput  # of the rounds, perhaps not there yet
    occupants: tuple[RequestState | None, ...]  # of the slots that are decoded
    attended: int
    is_timed: bool  # they run right after those before them, with nothing in between
    seated: tuple[Seated, ...] = ()  # that have come into slots since the dispatch before it

    @property
    def teaching(self) -> list[bool]:
        """Tells from which slots a memory may learn: greedy ones whose tokens are handed out."""
        return [
            one is not None and not one.is_finished and not one.request.is_drawn
            for one in self.occupants
        ]


class RowInputs:
    """The numbers that rounds read of each slot, put on the devices when they have changed."""

    def __init__(
        self, programs: Programs, spec: RoundSpec, rules: Sequence[Rule] | None,
        protected_token_ids: Sequence[int], num_slots: int,
    ) -> None:  # fmt: skip
        """Begins with free slots; the ends of text are protected for all requests.

        Of every other kind but the lossless one there is one in `rules`; None where all requests
        are decoded as `spec` says.
        """
        self._programs, self._own, self._sampling = programs, spec.rule, spec.sampling
        self._like = None if rules is None else (spec.rule, Exact(), *rules)
        rows = [spec.rule] * num_slots
        self.united: Any = spec.rule if self._like is None else per_row(rows, self._like)
        self._last: tuple[tuple[RequestState | None, ...], RuleInputs] | None = None
        self._protected_ids, self._eos = tuple(protected_token_ids), spec.static.eos_token_ids
        self._given: list[Sequence[int] | None] = [None] * num_slots
        self._protected = programs.put_protected([*self._protected_ids, *self._eos], num_slots)
        self._taken: Rule | None = None
        self._known: tuple[CorrectionMemory, int] | None = None
        self._keys: Int32[Array, "pairs 2"] | None = None
        self._earlier: tuple[np.ndarray, Int32[Array, " earlier"]] | None = None

    def takes(self, rule: Rule) -> bool:
        """Tells whether a rule is of one of the kinds."""
        if self._like is None:
            return rule is self._own
        if rule is self._taken:  # as all answers to a client's request have it
            return True
        kind: Any = jax.tree.structure(self.united)
        is_known = bool(jax.tree.structure(per_row([rule], self._like)) == kind)
        self._taken = rule if is_known else None
        return is_known

    def of(
        self, occupants: _Who, memory: CorrectionMemory | None, earlier: EarlierAnswers | None, *,
        sampled: bool,
    ) -> RuleInputs:  # fmt: skip
        """The numbers of the requests in all slots; `sampled` where some of them are drawn."""
        programs, who = self._programs, tuple(occupants)
        if self._last is None or self._last[0] != who:
            seated = np.array([one is not None for one in who])
            ends = np.array([one is None or not one.request.ignores_eos for one in who])
            rows = {"seated": programs.put_numbers(seated), "ends": programs.put_numbers(ends)}
            for slot, one in enumerate(who):  # where there is no request nothing is rescued
                if one is not None and one.request.protected_token_ids != self._given[slot]:
                    self.protect(slot, one.request.protected_token_ids)
            rows["protected"] = self._protected
            if self._like is not None or self._last is None:
                rule, sampling = map(programs.put_numbers, self._of_rows(who))
                inputs = RuleInputs(rule, sampling, **rows)
            else:
                inputs = dataclasses.replace(self._last[1], **rows)
            self._last = (who, inputs)
        inputs = self._last[1]
        if memory is not None and self.united.uses_memory:
            known = (memory, memory.version)
            if self._keys is None or known != self._known:
                self._keys, self._known = programs.put(memory.keys()), known
            inputs = dataclasses.replace(inputs, memory=self._keys)
        if earlier is not None:
            if self._earlier is None or self._earlier[0] is not earlier.tokens:
                self._earlier = earlier.tokens, programs.put(earlier.tokens)
            inputs = dataclasses.replace(inputs, earlier=self._earlier[1])
        return inputs if sampled else dataclasses.replace(inputs, sampling=None)

    def protect(self, slot: int, token_ids: Sequence[int] | None) -> None:
        """Changes the tokens of a slot that are never rescued; None for the engine's own."""
        own = self._protected_ids if token_ids is None else token_ids
        row = self._programs.put_protected([*own, *self._eos])
        at = self._programs.put(np.asarray(slot, np.int32))
        self._protected = _replaced(self._protected, row, at)
        self._given[slot] = token_ids

    def _of_rows(self, who: _Who) -> tuple[Rule, Sampling | None]:
        if self._like is None:
            return self._own, self._sampling
        rules = [self._own if one is None else one.rule for one in who]
        samplings = [None if one is None else one.request.sampling for one in who]
        # With one more row, so that every step is in the program.
        sampling = sampling_per_row([*samplings, Sampling(0.0, top_k=0, top_p=1.0)])
        return per_row(rules, self._like), jax.tree.map(lambda leaf: leaf[:-1], sampling)


@jax.jit
def _replaced(
    rows: Bool[Array, "slots vocab"], row: Bool[Array, " vocab"], slot: Index
) -> Bool[Array, "slots vocab"]:
    # The rounds on their way read the rows as they were: nothing is donated.
    return jax.lax.dynamic_update_slice_in_dim(rows, row[None], slot, 0)
