"""Heads: drafters that read a target's hidden states, and their `config.json`.

EAGLE-3 (arXiv 2503.01840, 2605.09992) drafts token by token, DFlash (2602.06036) and DSpark
(2607.05147) a block in one pass. Each is a Llama or a Qwen with something beside. Their files are
of two kinds. Those of speculators nest the layers' fields, and list the target's layers whose
*inputs* are read. All others (EAGLE's, SpecForge's, z-lab's, DeepSpec's) are a model's own, and
list layers whose *outputs* are read, one below.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from fly_jax.errors import FlyJaxError

Given = Mapping[str, Any]  # the fields of a `config.json`, or of a part of it
# A `config.json` is a head's if its classes have such names, or it has one of these fields.
EAGLE3 = "Eagle3"
HEADS = re.compile(f"{EAGLE3}|DFlash|DSpark")
HEAD_FIELDS = frozenset({"speculators_model_type", "dflash_config"})
# The known versions of the package that writes the nested format.
_VERSIONS = re.compile(r"0\.[1-9](\..*)?")
# Fields for the norms of features; by default, in all formats, there are none.
_NORMS = {"fc_norm": "each", "norm_before_fc": "all"}
_CLASSES = {
    "eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetHead:
    """The part of `LlamaConfig` that heads of all kinds have."""

    target_embed_size: int
    # Of the target, whose inputs are the features; None: the third, the middle, the last but two.
    layers: tuple[int, ...] | None = None
    has_embedding: bool = False  # of its own, not the target's
    has_unembedding: bool = True  # the same, which EAGLE-3 heads always have

    @property
    def num_features(self) -> int:
        """The number of the target's layers that are read."""
        return 3 if self.layers is None else len(self.layers)

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers that are read of a target with so many."""
        return self.layers or (2, num_layers // 2, num_layers - 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(TargetHead):
    """An EAGLE-3 head, also one of EAGLE-3.1, which normalises features and what it feeds on."""

    feature_norms: Literal["none", "each", "all"] = "none"  # each by itself, or all as one
    residual_is_normed: bool = False  # that the layer adds to, like its attention's input
    feeds_normed: bool = False  # what a pass gives to the next, as for the unembedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(TargetHead):
    """A head that drafts a block in one pass: the text's last token, and masks behind it."""

    block_size: int
    mask_token: int  # stands for those that are wanted
    target_num_layers: int | None = None  # None where the files do not say
    # The place of the last token predicts the next one (DSpark), and each mask the one behind it;
    # otherwise each mask predicts the token in its own place (DFlash).
    anchor_predicts: bool = False
    markov_rank: int = 0  # of the bias that each token puts on the next one's logits; 0 for none
    has_confidence: bool = False  # it says how probable each token is to be accepted
    confidence_reads_markov: bool = False  # from the bias's row of the token before, too
    causal_windows: bool = False  # in a layer with a window a place sees none of the block behind
    windows_from_block: bool = False  # all places see the same before the block

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest draft."""
        return self.block_size - (not self.anchor_predicts)


def read_head(fields: Given, source: str) -> tuple[Given, TargetHead]:
    """Reads a head's `config.json`: the fields of its layers, and what it has besides.

    FlyJaxError for a head of another kind, an unknown version, a field that is missing or not run.
    """
    kind, layer = fields.get("speculators_model_type"), fields
    if kind is not None:
        version = str(fields.get("speculators_version"))
        if kind not in ("eagle3", "dflash", "dspark") or not _VERSIONS.fullmatch(version):
            raise FlyJaxError(
                f"{source} has speculators_model_type={json.dumps(kind)} of version {version}; "
                "fly_jax reads eagle3, dflash and dspark of 0.1 to 0.9: give such a head."
            )
        nested = dict(fields.get("transformer_layer_config") or {})
        layer = nested | {"draft_vocab_size": fields.get("draft_vocab_size")}
    is_eagle = kind == "eagle3" or EAGLE3 in str(fields.get("architectures"))
    read = _read_eagle3 if is_eagle else _read_block
    head = read(fields, layer, source, is_nested=kind is not None)
    if layer.get("draft_vocab_size") == layer.get("vocab_size"):  # then nothing is left out
        layer = {**layer, "draft_vocab_size": None}
    return {**layer, "tie_word_embeddings": False}, head


def _read_eagle3(fields: Given, layer: Given, source: str, *, is_nested: bool) -> Eagle3:
    own = fields.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    # At the top vLLM and llama.cpp take them for inputs; else, and by DeepSpec, outputs are meant.
    are_outputs = not (is_nested or fields.get(key))
    listed = own.get(key) or fields.get("target_layer_ids") if are_outputs else fields.get(key)
    given = {
        "num_hidden_layers": layer.get("num_hidden_layers", 1) == 1,
        "norm_before_fc": not (fields.get("norm_before_fc") and fields.get("fc_norm")),
        "eagle_config": own.get("use_aux_hidden_state", True),
    }
    for name in (name for name, is_right in given.items() if not is_right):
        raise FlyJaxError(
            f"{source} describes an EAGLE-3 head with {name}={json.dumps(layer.get(name, True))}; "
            "fly_jax runs heads of one layer that sees all, reads several layers of the target, "
            "and normalises them in one way: give such a head."
        )
    norms = [value for name, value in _NORMS.items() if fields.get(name)]
    return Eagle3(
        target_embed_size=int(fields.get("target_hidden_size") or layer.get("hidden_size", 0)),
        layers=tuple(int(one) + are_outputs for one in listed or ()) or None,
        feature_norms=next(iter(norms), "none"),  # type: ignore[arg-type]
        residual_is_normed=bool(fields.get("norm_before_residual")),
        feeds_normed=bool(fields.get("norm_output")),
    )


def _read_block(fields: Given, layer: Given, source: str, *, is_nested: bool) -> Block:
    own = {**fields, **(fields.get("dflash_config") or {})}
    is_dspark = "DSpark" in str(fields.get("architectures")) or "dspark" in (
        fields.get("speculators_model_type"), own.get("projector_type"),
    )  # fmt: skip
    rank = int(own.get("markov_rank", 256 if is_nested else 0)) if is_dspark else 0
    odd = {
        "projector_type": own.get("projector_type") not in (None, "dflash", "dspark"),
        "causal": bool(own.get("causal")),
        "is_causal": bool(own.get("is_causal")),
        "markov_head_type": rank and own.get("markov_head_type", "vanilla") != "vanilla",
    }
    for name in (name for name, is_odd in odd.items() if is_odd):
        raise FlyJaxError(
            f"{source} describes a head with {name}={json.dumps(own.get(name))}; fly_jax runs "
            "DFlash, whose block is not causal, and DSpark with the bias 'vanilla': give such one."
        )
    listed = own.get("aux_hidden_state_layer_ids" if is_nested else "target_layer_ids")
    block, mask = (own.get(name) for name in ("block_size", "mask_token_id"))
    least = 1 if is_dspark else 2
    wrong = {
        "target_layer_ids": not (is_nested or listed),
        "block_size": not isinstance(block, int) or block < least,
        "mask_token_id": not isinstance(mask, int) or not 0 <= mask < layer.get("vocab_size", 0),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise FlyJaxError(
            f"{source} describes a block drafter with {name}={json.dumps(own.get(name))}; it needs "
            f"the target's layers, a block of at least {least} tokens and a mask token within its "
            f"vocabulary of {layer.get('vocab_size')}: correct config.json."
        )
    sees_all = is_dspark or own.get("is_causal") is False  # as z-lab's form says
    sees_all = bool(own.get("sliding_window_non_causal")) if is_nested else sees_all
    has_confidence = is_dspark and bool(own.get("enable_confidence_head", is_nested))
    reads_markov = bool(own.get("confidence_head_with_markov", is_nested))
    return Block(
        target_embed_size=int(fields.get("target_hidden_size") or layer.get("hidden_size", 0)),
        layers=tuple(int(one) + (not is_nested) for one in listed or ()) or None,
        block_size=int(block), mask_token=int(mask),  # type: ignore[arg-type]
        target_num_layers=own.get("num_target_layers"), has_confidence=has_confidence,
        anchor_predicts=bool(own.get("sample_from_anchor", is_dspark)), markov_rank=rank,
        confidence_reads_markov=has_confidence and reads_markov and rank > 0,
        causal_windows=not sees_all, windows_from_block=is_nested,
    )  # fmt: skip


def written_head(head: TargetHead, layer: Given, draft_vocab_size: int) -> dict[str, Any]:
    """The inverse of `read_head`: a `config.json` for vLLM and speculators.

    `layer` has the fields of the head's layers and of its target, as those of a Llama.
    """
    own: dict[str, Any]
    if isinstance(head, Eagle3):
        kind, drafted = "eagle3", 4
        own = {
            "eagle_aux_hidden_state_layer_ids": head.layers,
            "norm_before_residual": head.residual_is_normed, "norm_output": head.feeds_normed,
            "embed_requires_grad": False,
            **{name: head.feature_norms == how for name, how in _NORMS.items()},
        }  # fmt: skip
    else:
        assert isinstance(head, Block)
        kind, drafted = "dspark" if head.anchor_predicts else "dflash", head.most_tokens
        own = {
            "aux_hidden_state_layer_ids": head.layers, "block_size": head.block_size,
            "mask_token_id": head.mask_token, "num_target_layers": head.target_num_layers,
            "sample_from_anchor": head.anchor_predicts, "markov_rank": head.markov_rank,
            "markov_head_type": "vanilla", "enable_confidence_head": head.has_confidence,
            "confidence_head_with_markov": head.confidence_reads_markov,
            "sliding_window_non_causal": not head.causal_windows,
        }  # fmt: skip
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": drafted, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {**layer, "architectures": None},
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": head.target_embed_size,
        "tie_word_embeddings": False,
        **own,
    }
