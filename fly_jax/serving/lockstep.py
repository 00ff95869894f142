"""One engine in several processes: process 0 is asked, and the others do what it does.

All processes make the same engine, whose programs need all of them. What process 0's engine was
told since its last step goes to the others before the next one, as messages between the hosts; what
comes of it, each of them reads from the arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from fly_jax.decoding.generation import Settled
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, Ticket
from fly_jax.sharding.processes import Json, broadcast
from fly_jax.verification.rules import RULES, Budget, Exact
from fly_jax.verification.rules.rule import Both, Either
from fly_jax.verification.sampling import Sampling

# What a request is made of; nothing else is made of a message.
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Request, Sampling, Exact, Budget, Both, Either, *RULES.values())
}


class LeadingEngine(Engine):
    """The engine of process 0, which tells the others; `end` it when nothing more is to come."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        """Makes an engine; see `Engine`."""
        super().__init__(*arguments, **given)
        self._told: list[Json] = []
        self._going = _Going()

    def submit(self, request: Request) -> Ticket:
        """See `Engine`."""
        ticket = super().submit(request)
        self._told.append(encoded(ticket.request))
        self._going.add(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """See `Engine`."""
        if not ticket.is_finished:
            self._told.append(self._going.number(ticket))
        super().cancel(ticket)

    def step(self) -> list[tuple[Ticket, Settled]]:
        """See `Engine`."""
        broadcast(self._told)
        self._told = []
        self._going.forget_finished()
        return super().step()

    def warm_up(self, told: Callable[[int, int], None] | None = None) -> None:
        """See `Engine`. Where `told` raises, the others' ends as well."""

        def tell(done: int, total: int) -> None:
            goes_on = False
            try:
                if told is not None:
                    told(done, total)
                goes_on = True
            finally:
                broadcast(goes_on)

        super().warm_up(tell)

    def end(self) -> None:
        """Lets the others go."""
        broadcast(None)


def follow(engine: Engine) -> None:
    """Does with another process's engine what process 0 does with its own, until that ends."""
    going = _Going()
    with contextlib.suppress(_Ended):
        engine.warm_up(_go_on)
    while (told := broadcast(None)) is not None:
        for one in told:
            if isinstance(one, int):
                engine.cancel(going.ticket(one))
            else:
                going.add(engine.submit(decoded(one)))
        going.forget_finished()
        engine.step()


class _Ended(Exception):
    """Process 0 does not go on."""


def _go_on(done: int, total: int) -> None:
    if not broadcast(None):
        raise _Ended


class _Going:
    """The requests that are not finished, numbered in the order in which they were handed in."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._count = 0

    def add(self, ticket: Ticket) -> None:
        self._tickets[self._count] = ticket
        self._count += 1

    def ticket(self, number: int) -> Ticket:
        return self._tickets[number]

    def number(self, ticket: Ticket) -> int:
        return next(number for number, one in self._tickets.items() if one is ticket)

    def forget_finished(self) -> None:
        for number, ticket in list(self._tickets.items()):
            if ticket.is_finished:
                del self._tickets[number]


def encoded(value: Any) -> Json:
    """A request as a message: its parts by name, under its kind; numbers and texts as they are."""
    if dataclasses.is_dataclass(value):
        parts = {one.name: encoded(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {type(value).__name__: parts}
    if isinstance(value, list | tuple):
        return [encoded(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def decoded(message: Json) -> Any:
    """What `encoded` made a message of."""
    if not isinstance(message, dict):
        return message
    ((kind, parts),) = message.items()
    return _KINDS[kind](**{name: decoded(part) for name, part in parts.items()})
