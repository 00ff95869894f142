"""What of a dataclass is data, and what is structure."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fly_jax.errors import FlyJaxError
from fly_jax.parameters import parameters_of
from fly_jax.verification.data import STATIC, column, data_tree, log
from fly_jax.verification.rules import RULES, Csd, Exact, Fly, Margin


@data_tree
@dataclasses.dataclass(frozen=True)
class Pair:
    number: float
    name: str = dataclasses.field(default="a", metadata=STATIC)
    other: float | None = None


def test_numbers_are_leaves_and_the_rest_is_structure() -> None:
    leaves, structure = jax.tree.flatten(Pair(2.0, "b"))
    assert leaves == [2.0]
    assert structure == jax.tree.structure(Pair(jnp.ones(3), "b"))
    assert structure != jax.tree.structure(Pair(2.0, "c"))
    assert structure != jax.tree.structure(Pair(2.0, "b", 1.0)), "None is no number"
    assert jax.tree.unflatten(structure, leaves) == Pair(2.0, "b")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(Pair(1.0))]
    assert paths == [".number"]


def test_rebuilding_a_rule_checks_nothing() -> None:
    with pytest.raises(FlyJaxError, match="margin_gap"):
        Margin(gap=-1.0)
    leaves, structure = jax.tree.flatten(Margin())
    for placeholder in (object(), None, -1.0):
        rebuilt = jax.tree.unflatten(structure, [placeholder] * len(leaves))
        assert rebuilt.gap is placeholder
    Margin(gap=np.full(3, -1.0))  # an array is data, and so not checked


def test_numbers_meet_positions_row_by_row() -> None:
    assert column(2) == 2
    assert column(jnp.float32(2)).shape == ()
    assert column(np.arange(3)).shape == (3, 1)
    assert (log(0), log(1)) == (-math.inf, 0)
    np.testing.assert_allclose(log(np.array([0.5, 1])), np.log([0.5, 1]))


def test_every_rule_is_registered_with_its_parameters() -> None:
    names = [one.name for rule in RULES.values() for one in parameters_of(rule)]
    assert names == [
        "entropy_threshold", "window_size", "entropy", "entropy_top_k", "window",
        "csd_consistency", "csd_memory", "lossy_threshold", "lenience", "typical_epsilon",
        "typical_delta", "margin_gap",
    ]  # fmt: skip
    helps = [one.help for rule in RULES.values() for one in parameters_of(rule)]
    assert all(text and not text.endswith(".") for text in helps)
    assert jax.tree.leaves(Exact()) == []
    assert jax.tree.leaves(Fly()) == [0.3, 6]
    assert jax.tree.leaves(Csd()) == [0.01]
