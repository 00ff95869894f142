"""The shape of a Llama: read from a Hugging Face `config.json`, or taken from a preset."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fly_jax.errors import FlyJaxError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (`rope_type: "llama3"`).

    Wavelengths longer than `original_context / low_frequency_factor` are stretched by `factor`,
    shorter ones than `original_context / high_frequency_factor` are kept, those between are
    blended (Llama 3.1 model card and reference code).
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


_SIZES = (
    "vocab_size", "embed_size", "ffw_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
    "max_context",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything about a Llama that is static under `jit`; hashable.

    Attributes:
      vocab_size: rows of the embedding.
      embed_size: width of the residual stream.
      ffw_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides `num_heads`.
      head_size: width of one head.
      max_context: positions the model was trained for.
      rope_theta: base of the rotary frequencies.
      rope_scaling: Llama 3.1's scaling, if any.
      norm_epsilon: added to the mean square in RMSNorm.
      tied_embeddings: the unembedding is the embedding (Llama 3.2).
      bos_token_id: token that begins a text, which the tokenizer may put before a prompt, if any.
      eos_token_ids: every id that ends a text.
    """

    vocab_size: int
    embed_size: int
    ffw_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tied_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise FlyJaxError(
                    f"The configuration has {name}={getattr(self, name)}; it must be at least 1: "
                    "correct config.json."
                )
        begin = () if self.bos_token_id is None else (self.bos_token_id,)
        if not all(isinstance(token, int) and token >= 0 for token in begin + self.eos_token_ids):
            raise FlyJaxError(
                f"The configuration has bos_token_id={self.bos_token_id} and eos_token_ids="
                f"{self.eos_token_ids}; token ids are numbers of at least 0: correct config.json."
            )
        if self.num_heads % self.num_kv_heads:
            raise FlyJaxError(
                f"The configuration has {self.num_heads} query heads and {self.num_kv_heads} "
                "key/value heads; the first must be a multiple of the second: correct config.json."
            )

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
        """Reads the fields of a Hugging Face `config.json`, in transformers' v4 or v5 spelling.

        v4 keeps `rope_theta` and `rope_scaling` at the top level, v5 puts both into
        `rope_parameters`.

        Args:
          hf: the parsed JSON.
          source: named in errors.

        Raises:
          FlyJaxError: not a Llama, a field is missing, or a rotary scaling that is not known.
        """
        model_type = hf.get("model_type", "llama")
        if model_type != "llama":
            raise FlyJaxError(
                f"{source} describes a model of type '{model_type}'; fly_jax runs Llama models: "
                "give the folder of a Llama checkpoint."
            )
        if hf.get("hidden_act", "silu") != "silu" or hf.get("attention_bias") or hf.get("mlp_bias"):
            raise FlyJaxError(
                f"{source} asks for biases or an activation other than silu; Llama has neither: "
                "give the folder of an original Llama checkpoint."
            )
        try:
            rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
            theta = rope.get("rope_theta", hf.get("rope_theta", 10_000.0))
            return cls(
                vocab_size=int(hf["vocab_size"]),
                embed_size=int(hf["hidden_size"]),
                ffw_size=int(hf["intermediate_size"]),
                num_layers=int(hf["num_hidden_layers"]),
                num_heads=int(hf["num_attention_heads"]),
                num_kv_heads=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]),
                head_size=int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]),
                max_context=int(hf.get("max_position_embeddings", 2048)),
                rope_theta=float(theta),
                rope_scaling=_rope_scaling(rope, source),
                norm_epsilon=float(hf.get("rms_norm_eps", 1e-6)),
                tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
                bos_token_id=hf.get("bos_token_id"),
                eos_token_ids=_token_ids(hf.get("eos_token_id")),
            )
        except KeyError as error:
            raise FlyJaxError(
                f"{source} lacks the field {error}; a Llama checkpoint needs it: "
                "download the file again or add the field."
            ) from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if isinstance(error, FlyJaxError):
                raise
            raise FlyJaxError(
                f"{source} has a field of the wrong kind ({error}); sizes must be numbers, as in a "
                "Hugging Face config.json: download the file again."
            ) from error

    @classmethod
    def from_folder(cls, folder: Path) -> LlamaConfig:
        """Reads `config.json`, and the end-of-text ids that `generation_config.json` adds.

        Instruct checkpoints list ids there (`<|eot_id|>`, `<|eom_id|>`) that `config.json` lacks.

        Raises:
          FlyJaxError: no such file, not JSON, or not a Llama.
        """
        config = cls.from_hf(_read_json(folder / "config.json"), str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.exists():
            return config
        more = _token_ids(_read_json(generation).get("eos_token_id"))
        ids = tuple(dict.fromkeys(config.eos_token_ids + more))
        return dataclasses.replace(config, eos_token_ids=ids)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads, with the rotary fields in both spellings."""
        scaling = self.rope_scaling
        rope: dict[str, Any] = {"rope_type": "default"}
        if scaling is not None:
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
        eos = self.eos_token_ids
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.embed_size,
            "intermediate_size": self.ffw_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope if scaling is not None else None,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        }


def _rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise FlyJaxError(
            f"{source} asks for rotary scaling '{kind}'; fly_jax knows 'default' and 'llama3': "
            "use a checkpoint with one of these."
        )
    return RopeScaling(
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
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
            "Face Llama checkpoint, or a hub id."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise FlyJaxError(
            f"{path} is not valid JSON ({error}); download the file again."
        ) from error
    if not isinstance(content, dict):
        raise FlyJaxError(f"{path} holds no JSON object; download the file again.")
    return content
