"""Weights of a GGUF file: which tensor is which parameter, dequantised matrix by matrix."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jaxtyping import Array

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.gguf_config import gguf_config
from fly_jax.models.checkpoints.gguf_file import GgufFile
from fly_jax.models.checkpoints.hugging_face import arranged, row_sharding, tensor_shape
from fly_jax.models.config import GGUF_ARCHITECTURES
from fly_jax.models.specs import Group, ParameterSpec, groups
from fly_jax.sharding.rules import Layout

_OUTER = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "unembedding": "output",
}
_LAYER = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _unpaired(name: str, stored: Array, spec: ParameterSpec) -> Array:
    """A tensor of a family in which a head's rotary pairs lie side by side.

    Hugging Face has their two halves one after the other.
    """
    if name in ("query", "key"):
        pairs = stored.reshape(-1, spec.shape[-1] // 2, 2, stored.shape[1])
        stored = pairs.swapaxes(1, 2).reshape(stored.shape)
    return arranged(name, stored, spec)


class GgufSource:
    """A GGUF file of a model; each process reads only the rows that its devices take.

    Attributes:
      file: what was opened.
    """

    int8 = False

    def __init__(self, file: GgufFile) -> None:
        """Checks the file without reading a weight.

        Raises:
          FlyJaxError: another architecture, a key or a tensor is missing, or a tensor has a shape
            that the metadata does not ask for.
        """
        self.file = file
        self.config = gguf_config(file)
        # The file's own word: there a Mistral is a llama.
        has_pairs = GGUF_ARCHITECTURES[file.needed("general.architecture")].gguf_pairs
        self.arranged = _unpaired if has_pairs else arranged
        needed: set[str] = set()
        for group in groups(self.config):
            for name, spec in group.specs(self.config).items():
                tensor, shape = _tensor_name(group, name), tensor_shape(name, spec)
                needed.add(tensor)
                if tensor not in file.tensors:
                    raise FlyJaxError(
                        f"{file.path} lacks the tensor {tensor}; its metadata asks for it: "
                        "download the file again, or convert the model anew."
                    )
                if file.shape(tensor) != shape:
                    raise FlyJaxError(
                        f"The tensor {tensor} in {file.path} has shape "
                        f"{list(file.shape(tensor))}; the metadata asks for {list(shape)}: "
                        "download the file again, or convert the model anew."
                    )

        odd = next((one for one in file.tensors if one.endswith(".bias") and one not in needed), "")
        if odd:
            raise FlyJaxError(
                f"{file.path} has the tensor {odd}, which the original models of type "
                f"'{self.config.architecture}' do not have; give the file of one."
            )

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """The group's tensors [out, in] in float32, split by rows."""
        found: dict[str, Array] = {}
        for name, spec in group.specs(self.config).items():
            tensor = _tensor_name(group, name)
            shape = self.file.shape(tensor)
            found[name] = jax.make_array_from_callback(
                shape,
                row_sharding(layout, spec, shape[0]),
                functools.partial(_part, self.file, tensor),
            )
        return found

    def describe(self, group: Group, name: str) -> str:
        """The tensor and its file."""
        return f"The tensor {_tensor_name(group, name)} in {self.file.path}"


def _tensor_name(group: Group, name: str) -> str:
    if group.layer is None:
        return f"{_OUTER[name]}.weight"
    kind = "bias" if name.endswith("_bias") else "weight"
    return f"blk.{group.layer}.{_LAYER[name.removesuffix('_bias')]}.{kind}"


def _part(file: GgufFile, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
    """What one device takes of a tensor."""
    return file.rows(tensor, index[0])[(slice(None), *index[1:])]
