"""Rows of an engine's state: all slots before anybody is in them, and the row of one request."""

from __future__ import annotations

import math

import numpy as np

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.spec import RoundSpec
from fly_jax.decoding.state import DecodeState
from fly_jax.serving.request import Ticket


def empty_rows(programs: Programs, spec: RoundSpec, num_slots: int, capacity: int) -> DecodeState:
    """Rows that are finished from the start."""
    ones = np.ones(num_slots, np.int32)
    text = np.zeros((num_slots, capacity), np.int32)
    return _begun(programs, spec, text, ones, ones, ones).unpaced()


def row_of(
    programs: Programs, spec: RoundSpec, ticket: Ticket, limit: int, capacity: int
) -> DecodeState:
    """A state of one row, of whose prompt nothing has been run.

    Args:
      programs: that will run it.
      spec: of the rounds.
      ticket: whose row it is.
      limit: length at which it is done.
      capacity: of the caches.
    """
    prompt = ticket.request.prompt
    text = np.zeros((1, capacity), np.int32)
    text[0, : len(prompt)] = prompt
    length, end, seed = (
        np.array([number]) for number in (len(prompt), limit, ticket.request.seed % 2**32)
    )
    return _begun(programs, spec, text, length, end, seed, ticket.budget)


def _begun(
    programs: Programs,
    spec: RoundSpec,
    text: np.ndarray,
    lengths: np.ndarray,
    limits: np.ndarray,
    seeds: np.ndarray,
    budget: float | None = None,
) -> DecodeState:
    budgets = None
    if spec.rule.budget is not None:
        budgets = np.full(len(text), math.inf if budget is None else budget, np.float32)
    needs_pace = spec.depths or spec.deferred_window
    rows = programs.put_rows(
        text,
        lengths.astype(np.int32),
        limits.astype(np.int32),
        seeds.astype(np.uint32),
        budgets,
        np.zeros(len(programs.structure.choices), np.float32) if needs_pace else None,
    )
    return programs.begin(rows)
