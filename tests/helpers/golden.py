"""The tiny models of tests/fixtures/golden, altered and equal ones, and layouts on the devices."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fly_jax.models.llama import Llama
from fly_jax.planning.plan_spec import abstract_mesh
from fly_jax.sharding.mesh import create_mesh, parse_mesh
from fly_jax.sharding.rules import RULES, Layout

# It orders sums over heads as tiny as these by the rows of a product; over real ones it does not.
BITS_OF_TINY_HEADS = pytest.mark.skipif(
    jaxlib.version.__version_info__ >= (0, 12), reason="JAX 0.12 has other bits for tiny heads"
)
FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN = FIXTURES / "golden"


def layout_on(mesh: str | None, rules: str = "tensor") -> Layout | None:
    """A layout; None without a mesh."""
    return None if mesh is None else Layout(create_mesh(parse_mesh(mesh)), RULES[rules])


def pod_layout(mesh: str, rules: str = "tensor") -> Layout:
    """A layout on more devices than there are here; it places nothing, but tells where."""
    return Layout(abstract_mesh(parse_mesh(mesh)), RULES[rules])


def altered(source: Path, to: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of a checkpoint with these fields and tensors too; None stands for no tensor."""
    shutil.copytree(source, to, dirs_exist_ok=True)
    config, weights = to / "config.json", to / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    kept = {name: one for name, one in (load_file(weights) | tensors).items() if one is not None}
    save_file(kept, weights)
    return to


def assert_same(found: Llama, expected: Llama, dtype: jnp.dtype | None = None) -> None:
    """Every array of every parameter is the same, in the type of the expected one or another."""
    assert found.config == expected.config
    assert found.parameters().keys() == expected.parameters().keys()
    for name, values in expected.parameters().items():
        arrays = (jax.tree.leaves(one) for one in (found.parameters()[name], values))
        for one, other in zip(*arrays, strict=True):
            other = other if dtype is None else other.astype(dtype)
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            np.testing.assert_array_equal(one, other, err_msg=name)
