"""EAGLE-3 heads (arXiv 2503.01840, 2605.09992): what one has beyond a Llama of one layer.

A head is described by a `config.json` in one of two formats. That of speculators nests the layer's
fields, and lists the target's layers whose *inputs* it reads. That of EAGLE itself and of SpecForge
is a Llama's, and where it lists layers it means those whose *outputs* are read, one below.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from fly_jax.errors import FlyJaxError

# What the class of a head is called.
EAGLE3 = "Eagle3"
# Of the package that writes the nested format, the versions whose fields are known.
_VERSIONS = re.compile(r"0\.[1-9](\..*)?")
# Fields that say how features are normalised, and the default in all formats: they are not.
_NORMS = {"fc_norm": "each", "norm_before_fc": "all"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3:
    """A head's own part of `LlamaConfig`.

    Attributes:
      target_embed_size: width of the target.
      layers: of the target, whose inputs are the features; None for the third one, the middle one
        and the last but two.
      feature_norms: features are normalised each for itself, all as one, or not (EAGLE-3.1).
      residual_is_normed: what the layer adds to is normalised, as what goes into its attention is.
      feeds_normed: what a pass gives to the next is normalised, as for the unembedding (3.1).
      has_embedding: an embedding of its own, not the target's.
    """

    target_embed_size: int
    layers: tuple[int, ...] | None = None
    feature_norms: Literal["none", "each", "all"] = "none"
    residual_is_normed: bool = False
    feeds_normed: bool = False
    has_embedding: bool = False

    @property
    def num_features(self) -> int:
        """Layers of the target that are read."""
        return 3 if self.layers is None else len(self.layers)

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers that are read of a target with so many."""
        return self.layers or (2, num_layers // 2, num_layers - 3)


def read_head(fields: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], Eagle3]:
    """The fields of a head's layer, and what it has besides, from those of its `config.json`.

    Raises:
      FlyJaxError: a head of another kind or of more layers, or an unknown version.
    """
    kind = fields.get("speculators_model_type")
    layer, own = fields, fields.get("eagle_config") or {}
    listed = own.get("eagle_aux_hidden_state_layer_ids")
    layers = None if listed is None else tuple(one + 1 for one in listed)
    if kind is not None:
        version = str(fields.get("speculators_version"))
        if kind != "eagle3" or not _VERSIONS.fullmatch(version):
            raise FlyJaxError(
                f"{source} has speculators_model_type={json.dumps(kind)} of version {version}; "
                "fly_jax reads eagle3 of 0.1 to 0.9: give such a head."
            )
        listed = fields.get("eagle_aux_hidden_state_layer_ids")
        layers = None if listed is None else tuple(listed)
        nested = dict(fields.get("transformer_layer_config") or {})
        layer = nested | {"draft_vocab_size": fields.get("draft_vocab_size")}
    given = {
        "num_hidden_layers": layer.get("num_hidden_layers", 1) == 1,
        "norm_before_fc": not (fields.get("norm_before_fc") and fields.get("fc_norm")),
        "sliding_window": "sliding_attention" not in (layer.get("layer_types") or ()),
        "eagle_config": own.get("use_aux_hidden_state", True),
    }
    for name in (name for name, is_right in given.items() if not is_right):
        raise FlyJaxError(
            f"{source} describes an EAGLE-3 head with {name}={json.dumps(layer.get(name, True))}; "
            "fly_jax runs heads of one layer that sees all, reads several layers of the target, "
            "and normalises them in one way: give such a head."
        )
    norms = [value for name, value in _NORMS.items() if fields.get(name)]
    head = Eagle3(
        target_embed_size=int(fields.get("target_hidden_size") or layer.get("hidden_size", 0)),
        layers=layers,
        feature_norms=next(iter(norms), "none"),  # type: ignore[arg-type]
        residual_is_normed=bool(fields.get("norm_before_residual")),
        feeds_normed=bool(fields.get("norm_output")),
    )
    if layer.get("draft_vocab_size") == layer.get("vocab_size"):  # then nothing is left out
        layer = {**layer, "draft_vocab_size": None}
    return {**layer, "tie_word_embeddings": False}, head
