"""What a checkpoint gives, whatever its format: its configuration, and its weights by groups.

A group is what is read and written together, so that neither ever needs the whole model.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array

from fly_jax.models.config import LlamaConfig
from fly_jax.models.specs import INT8, ParameterSpec, parameter_specs, scale_name
from fly_jax.sharding.rules import Layout

# What a reader may hold beyond the arrays that it fills.
READ_BUFFER_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Group:
    """All parameters of one layer, or one parameter outside the layers.

    Attributes:
      name: such as `layer_007` or `embedding`.
      layer: its index, or None outside the layers.
    """

    name: str
    layer: int | None

    def specs(self, config: LlamaConfig, *, int8: bool = False) -> dict[str, ParameterSpec]:
        """The group's own part of `parameter_specs`: a layer's without the axis `layers`."""
        specs = parameter_specs(config, INT8 if int8 else None)
        if self.layer is None:
            own = (self.name, scale_name(self.name))
            return {name: specs[name] for name in own if name in specs}
        return {
            name: dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
            for name, spec in specs.items()
            if spec.axes[0] == "layers"
        }


def groups(config: LlamaConfig) -> list[Group]:
    """Every group of a model; those outside the layers, which are the largest, come first."""
    outer = [name for name, spec in parameter_specs(config).items() if spec.axes[0] != "layers"]
    layers = [Group(f"layer_{index:03}", index) for index in range(config.num_layers)]
    return [Group(name, None) for name in outer] + layers


def parameter_sharding(layout: Layout | None, spec: ParameterSpec) -> Sharding:
    """Where a parameter lies: as the layout says, or on the first device."""
    if layout is None:
        return SingleDeviceSharding(jax.devices()[0])
    return layout.sharding(spec.axes, spec.shape)


class Source(Protocol):
    """A checkpoint of which everything was checked that can be without reading a weight.

    Attributes:
      config: of the model.
      int8: its matrices are int8 and have scales.
    """

    config: LlamaConfig
    int8: bool

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """The group's parameters as they are stored, by name.

        Raises:
          FlyJaxError: a file is damaged.
        """
        ...

    def arranged(self, name: str, stored: Array, spec: ParameterSpec) -> Array:
        """A parameter of a group as `Llama` takes it, from what is stored; runs under `jit`."""
        ...

    def describe(self, group: Group, name: str) -> str:
        """Where a parameter of a group lies, in words that begin a sentence."""
        ...
