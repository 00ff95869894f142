"""Which parameters are read and written together, so that neither ever needs the whole model."""

from __future__ import annotations

import dataclasses

from fly_jax.models.config import LlamaConfig
from fly_jax.models.llama import ParameterSpec, parameter_specs, scale_name


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
        specs = parameter_specs(config, int8=int8)
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
