"""The tiny models of tests/fixtures/golden, layouts on the simulated devices, and equal models."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fly_jax.models.llama import Llama
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


def layout_on(mesh: str | None, rules: str = "tensor") -> Layout | None:
    """A layout; None without a mesh."""
    return None if mesh is None else Layout(create_mesh(parse_mesh(mesh)), RULES[rules])


def assert_same(found: Llama, expected: Llama, dtype: jnp.dtype | None = None) -> None:
    """Every parameter is the same, in the type of the expected one or another."""
    assert found.config == expected.config
    assert found.parameters().keys() == expected.parameters().keys()
    for name, values in expected.parameters().items():
        values = values if dtype is None else values.astype(dtype)
        assert found.parameters()[name].dtype == values.dtype, name
        np.testing.assert_array_equal(found.parameters()[name], values, err_msg=name)
