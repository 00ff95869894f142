"""Hugging Face's `config.json`, in transformers' v4 and v5 spelling: read and written."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures.registry import ARCHITECTURES
from fly_jax.models.config import LlamaConfig, RopeScaling, YarnScaling


def read_config(folder: Path) -> LlamaConfig:
    """Reads `config.json`, and the end-of-text ids that `generation_config.json` adds.

    Instruct checkpoints list ids there (`<|eot_id|>`, `<|eom_id|>`) that `config.json` lacks.

    Raises:
      FlyJaxError: no such file, not JSON, or no model that is known.
    """
    config = config_of(_read_json(folder / "config.json"), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = _token_ids(_read_json(generation).get("eos_token_id"))
    ids = tuple(dict.fromkeys(config.eos_token_ids + more))
    return dataclasses.replace(config, eos_token_ids=ids)


def config_of(fields: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
    """The configuration that the fields of a `config.json` describe.

    v4 keeps `rope_theta` and `rope_scaling` at the top level, v5 puts both into `rope_parameters`.

    Args:
      fields: the parsed JSON.
      source: named in errors.

    Raises:
      FlyJaxError: a family that is not known, a field is missing, or a rotary scaling that is not
        known.
    """
    name = fields.get("model_type", "llama")
    if name not in ARCHITECTURES:
        raise FlyJaxError(
            f"{source} describes a model of type '{name}'; fly_jax runs "
            f"{', '.join(ARCHITECTURES)}: give the folder of such a checkpoint."
        )
    architecture = ARCHITECTURES[name]
    hf = {**architecture.defaults, **fields}
    odd = [field for field in architecture.refused if hf.get(field)]
    odd += ["hidden_act"] if hf.get("hidden_act", "silu") != "silu" else []
    if odd:
        raise FlyJaxError(
            f"{source} has {odd[0]}={json.dumps(hf[odd[0]])}; fly_jax runs models of type '{name}' "
            "without biases of this kind and with the activation silu: give the folder of one."
        )
    try:
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        theta = rope.get("rope_theta", hf.get("rope_theta", 10_000.0))
        num_layers = int(hf["num_hidden_layers"])
        max_context = int(hf.get("max_position_embeddings", 2048))
        scaling = _rope_scaling(rope, max_context, source)
        if isinstance(scaling, YarnScaling):  # a Qwen's file still has the context without it
            max_context = max(max_context, int(scaling.factor * scaling.original_context))
        return LlamaConfig(
            vocab_size=int(hf["vocab_size"]),
            embed_size=int(hf["hidden_size"]),
            ffw_size=int(hf["intermediate_size"]),
            num_layers=num_layers,
            num_heads=int(hf["num_attention_heads"]),
            num_kv_heads=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]),
            head_size=int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]),
            max_context=max_context,
            rope_theta=float(theta),
            rope_scaling=scaling,
            norm_epsilon=float(hf.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=_token_ids(hf.get("eos_token_id")),
            architecture=name,
            draft_vocab_size=hf.get("draft_vocab_size"),
            **(architecture.read(hf, num_layers) if architecture.read else {}),
        )
    except KeyError as error:
        raise FlyJaxError(
            f"{source} lacks the field {error}; a checkpoint of this type needs it: "
            "download the file again or add the field."
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        if isinstance(error, FlyJaxError):
            raise
        raise FlyJaxError(
            f"{source} has a field of the wrong kind ({error}); sizes must be numbers, as in a "
            "Hugging Face config.json: download the file again."
        ) from error


def config_fields(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` that transformers reads, with the rotary fields in both spellings."""
    architecture = ARCHITECTURES[config.architecture]
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, YarnScaling):
        rope = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.fast_turns,
            "beta_slow": scaling.slow_turns,
            "truncate": scaling.truncate,
        }
    elif scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    eos = config.eos_token_ids
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_size,
        "intermediate_size": config.ffw_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        **({"draft_vocab_size": config.draft_vocab_size} if config.draft_vocab_size else {}),
        **architecture.written(config),
    }


def _rope_scaling(
    rope: Mapping[str, Any], max_context: int, source: str
) -> RopeScaling | YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "yarn":
        return _yarn(rope, max_context)
    if kind != "llama3":
        raise FlyJaxError(
            f"{source} asks for rotary scaling '{kind}'; fly_jax knows 'default', 'llama3' and "
            "'yarn': use a checkpoint with one of these."
        )
    return RopeScaling(
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def _yarn(rope: Mapping[str, Any], max_context: int) -> YarnScaling:
    """YaRN, with what the file leaves to the paper and to transformers."""
    factor = float(rope["factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        weight, of_all = (float(rope.get(key) or 0) for key in ("mscale", "mscale_all_dim"))
        has_both = weight and of_all
        attention_factor = magnitude(weight) / magnitude(of_all) if has_both else magnitude(1.0)
    return YarnScaling(
        factor=factor,
        original_context=int(rope.get("original_max_position_embeddings") or max_context),
        attention_factor=float(attention_factor),
        fast_turns=float(rope.get("beta_fast") or 32),
        slow_turns=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FlyJaxError(
            f"{path} does not exist; a checkpoint folder needs it: give the folder of a Hugging "
            "Face checkpoint, or a hub id."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise FlyJaxError(
            f"{path} is not valid JSON ({error}); download the file again."
        ) from error
    if not isinstance(content, dict):
        raise FlyJaxError(f"{path} holds no JSON object; download the file again.")
    return content
