"""The lockstep of one engine in several processes: process 0 tells the others what it was told."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState, Settled
from fly_jax.sharding.processes import Json, broadcast
from fly_jax.verification.rules import RULES, Budget, Exact
from fly_jax.verification.rules.rule import Combination
from fly_jax.verification.sampling import Sampling

# The parts of a request; a message can make nothing else.
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Request, Sampling, Exact, Budget, Combination, *RULES.values())
}


class LeadingEngine(Engine):
    """The engine of process 0, which tells the others; `end` it when nothing more is to come.

    A message is a request to submit, or the place of one to cancel among the open ones.
    """

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self._messages: list[Json] = []
        self._going: list[RequestState] = []

    def submit_all(self, requests: Iterable[Request]) -> list[RequestState]:
        """Submits requests here and in the other processes; see `Engine`."""
        states = super().submit_all(requests)
        self._messages += [encoded(one.request) for one in states]
        self._going += states
        return states

    def cancel(self, state: RequestState) -> None:
        """Cancels a request here and in the other processes; see `Engine`."""
        if not state.is_finished:
            self._messages.append(self._going.index(state))
        super().cancel(state)

    def step(self) -> list[tuple[RequestState, Settled]]:
        """Steps here and in the other processes; see `Engine`."""
        broadcast(self._messages)
        self._messages = []
        self._going = [one for one in self._going if not one.is_finished]
        return super().step()

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Warms up every process; if `on_progress` raises, that ends the others' too."""

        def tell(done: int, total: int) -> None:
            goes_on = False
            try:
                if on_progress is not None:
                    on_progress(done, total)
                goes_on = True
            finally:
                broadcast(goes_on)

        super().warm_up(tell)

    def end(self) -> None:
        """Ends `follow` in the other processes."""
        broadcast(None)


def follow(engine: Engine) -> None:
    """Repeats with this process's engine what process 0 does with its own, until that ends."""

    def go_on(done: int, total: int) -> None:
        if not broadcast(None):
            raise _Ended

    going: list[RequestState] = []
    with contextlib.suppress(_Ended):
        engine.warm_up(go_on)
    while (messages := broadcast(None)) is not None:
        for one in messages:
            if isinstance(one, int):
                engine.cancel(going[one])
            else:
                going.append(engine.submit(decoded(one)))
        going = [one for one in going if not one.is_finished]
        engine.step()


class _Ended(Exception):
    """A signal that process 0 does not go on."""


def encoded(value: Any) -> Json:
    """A request as a message: its parts by name, under its kind; numbers and texts as they are."""
    if dataclasses.is_dataclass(value):
        parts = {one.name: encoded(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {type(value).__name__: parts}
    if isinstance(value, list | tuple):
        return [encoded(one) for one in value]
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value


def decoded(message: Json) -> Any:
    """The request that `encoded` made a message of."""
    if not isinstance(message, dict):
        return message
    ((kind, parts),) = message.items()
    return _KINDS[kind](**{name: decoded(part) for name, part in parts.items()})
