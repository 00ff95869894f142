"""A rule for each request of a batch, in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fly_jax.errors import FlyJaxError
from fly_jax.verification.data import data_tree
from fly_jax.verification.rules.budget import Budget
from fly_jax.verification.rules.clause import Clause
from fly_jax.verification.rules.rule import Loose, Rule


@data_tree
@dataclasses.dataclass(frozen=True)
class Alternatives(Loose):
    """A loosened rule that is given by its clauses, of which each row has some.

    Attributes:
      alternatives: see `Rule.clauses`.
    """

    alternatives: tuple[Clause, ...]

    def clauses(self) -> tuple[Clause, ...]:
        """Those that it is made of."""
        return self.alternatives


def per_row(rules: Sequence[Rule], like: Sequence[Rule] = ()) -> Loose:
    """One rule that gives each row of a batch what the row's own rule would give it alone.

    It has the alternatives of all of them, with a number for each row, and each alternative is
    switched off in the rows whose rule lacks it. Two batches run the same program if their rules
    differ in numbers and in the order of rows only, so for a server: pass as `like` a rule of every
    kind that a request may ask for, and each batch runs the same program, whoever is in it.

    It works on the host; rules that read an entropy must all read the same.

    Args:
      rules: of each row; every number in them one number.
      like: rules whose alternatives and limits the program has as well, without rows.

    Raises:
      FlyJaxError: a rule whose numbers are arrays of one for each row.
    """
    owned: list[dict[tuple[str, int], Clause]] = []
    for rule in (*rules, *like):
        clauses: dict[tuple[str, int], Clause] = {}
        for clause in rule.clauses():
            clause = clause if clause.enabled is not None else _switched(clause, True)
            kind = str(jax.tree.structure(clause))
            # A rule may have several alternatives of one kind.
            number = sum(kind == other for other, _ in clauses)
            clauses[kind, number] = clause
        owned.append(clauses)
    # In an order that does not depend on the order of rows.
    alternatives = []
    for name in sorted({name for clauses in owned for name in clauses}):
        absent = _switched(next(clauses[name] for clauses in owned if name in clauses), False)
        column = [clauses.get(name, absent) for clauses in owned[: len(rules)]]
        alternatives.append(jax.tree.map(lambda *numbers: _stacked(numbers), *column))
    united = Alternatives(tuple(alternatives))
    _ = united.needs  # which must be the same for all
    budgets = [rule.budget for rule in (*rules, *like)]
    if all(budget is None for budget in budgets):
        return united
    none = np.float32(np.inf)
    return Budget(united, _stacked([none if one is None else one for one in budgets[: len(rules)]]))


def _switched(clause: Clause, enabled: bool) -> Clause:
    return dataclasses.replace(clause, enabled=enabled)


def _stacked(numbers: Sequence[Any]) -> np.ndarray:
    """A number for each row, of the types that arrays on a device have."""
    arrays = [np.asarray(number) for number in numbers]
    if any(array.ndim for array in arrays):
        raise FlyJaxError(
            "per_row was given a rule with an array of numbers; give it one rule for each row, "
            "with one number for each parameter."
        )
    stacked = np.stack(arrays)
    narrow = {"f": np.float32, "i": np.int32, "b": np.bool_}
    return stacked.astype(narrow[stacked.dtype.kind])
