"""Devices of a TPU slice that is not there: libtpu compiles for them on any Linux machine."""

from __future__ import annotations

import importlib.util
import math
import os

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from fly_jax.errors import FlyJaxError
from fly_jax.sharding.chips import Chip
from fly_jax.sharding.mesh import MeshSpec

# libtpu looks for a TPU host around it unless it is told of one. The values decide nothing about
# what it compiles for.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # It would let one process in at a time, as if there were chips to share.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


def slice_of(chip: Chip, spec: MeshSpec) -> str:
    """The slice with as many chips as the mesh, such as "8x8".

    Raises:
      FlyJaxError: there is none.
    """
    if not chip.slices:
        return str(spec.num_devices)
    slices = {math.prod(map(int, shape.split("x"))): shape for shape in chip.slices}
    if spec.num_devices not in slices:
        raise FlyJaxError(
            f"The mesh {spec} needs {spec.num_devices} chips, and slices of {chip.name} have "
            f"{', '.join(map(str, slices))}: ask for a mesh whose sizes multiply to one of these."
        )
    return slices[spec.num_devices]


def slice_mesh(chip: Chip, spec: MeshSpec) -> Mesh:
    """The mesh over the slice's devices, none of which has to be there.

    Raises:
      FlyJaxError: no such slice, or libtpu is not installed.
    """
    shape = slice_of(chip, spec)
    if importlib.util.find_spec("libtpu") is None:
        raise FlyJaxError(
            f"Planning for {chip.name} compiles with libtpu, which is not installed; install it "
            'with pip install "fly_jax[tpu]", or plan from shapes alone with --no_compile.'
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if spec.num_devices == 1 else {}
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip.name}:{shape}", **bounds
    )
    return jax.make_mesh(
        spec.sizes,
        spec.names,
        axis_types=(AxisType.Auto,) * len(spec.axes),
        devices=topology.devices,
    )


def abstract_mesh(spec: MeshSpec) -> AbstractMesh:
    """The mesh over no devices: enough to tell how much each would hold."""
    return AbstractMesh(spec.sizes, spec.names, axis_types=(AxisType.Auto,) * len(spec.axes))
