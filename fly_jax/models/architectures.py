"""The shape of a model, its parameters, and the families that are run, with their `config.json`.

A family is Llama but for its entry in `ARCHITECTURES`; transformers' v4 and v5 spelling are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fly_jax.errors import FlyJaxError
from fly_jax.models import head_config
from fly_jax.models.head_config import Block, Eagle3, Given, TargetHead

# The names in `config.json` of sizes, and of all that is read and written unchanged.
_SIZES = {
    "vocab_size": "vocab_size", "embed_size": "hidden_size", "ffw_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_size": "head_dim",
    "max_context": "max_position_embeddings",
}  # fmt: skip
_OF_DRAFTERS = ("draft_vocab_size", "pard_token")
_STRETCHED = {"factor": "factor", "original_context": "original_max_position_embeddings"}
_LLAMA3_SCALING = {
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
} | _STRETCHED
_YARN_SCALING = _STRETCHED | {
    "attention_factor": "attention_factor", "fast_turns": "beta_fast", "slow_turns": "beta_slow",
    "truncate": "truncate",
}  # fmt: skip


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of the rotary frequencies (`rope_type: "yarn"`, arXiv 2309.00071).

    Pairs of features that turn fewer than `slow_turns` times within `original_context` are
    stretched by `factor`, those that turn more than `fast_turns` times are kept, those between are
    blended, from one pair to the next in equal steps.
    """

    factor: float
    original_context: int  # positions that the model was trained for before
    attention_factor: float  # that queries and keys are multiplied with
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncate: bool = True  # the band of blended pairs is widened to whole pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The configuration of a Llama or its kin: all that is static under `jit`; hashable."""

    vocab_size: int  # each has a row of the embedding, unless there is a `draft_vocab_size`
    embed_size: int
    ffw_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    norm_epsilon: float = 1e-5
    tied_embeddings: bool = False  # the unembedding is the embedding (Llama 3.2)
    bos_token_id: int | None = 1  # begins a text; the tokenizer may put it before a prompt
    eos_token_ids: tuple[int, ...] = (2,)
    architecture: str = "llama"  # the family, one of `ARCHITECTURES`
    attention_biases: bool = False  # of queries, keys and values (Qwen 2)
    head_norms: bool = False  # of each head's queries and keys, before they are rotated (Qwen 3)
    sliding_window: int | None = None  # tokens that a layer with one sees, itself among them
    windowed_layers: tuple[int, ...] = ()  # those that have it (Mistral 0.1: all), ascending
    unrotated_layers: tuple[int, ...] = ()  # without rotary positions (SmolLM3), ascending
    # Rows of the embedding of a drafter that knows only the most frequent of its target's tokens;
    # the last row stands for all others, which it never proposes. None where each token has a row.
    # Of a head these are rows of the unembedding alone, all of tokens.
    draft_vocab_size: int | None = None
    pard_token: int | None = None
    head: TargetHead | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._check(getattr(self, name) >= 1, "it must be at least 1", name)
        tokens = (*self.eos_token_ids, 0 if self.bos_token_id is None else self.bos_token_id)
        are_ids = all(isinstance(token, int) and token >= 0 for token in tokens)
        self._check(are_ids, "token ids are numbers of at least 0", "bos_token_id", "eos_token_ids")
        is_known = self.pard_token is None or self.pard_token in range(self.vocab_size)
        self._check(is_known, "the first must be below the second", "pard_token", "vocab_size")
        has_room = self.sliding_window is None or self.sliding_window >= 1
        self._check(has_room, "it must be at least 1, or null", "sliding_window")
        rows = self.draft_vocab_size
        has_rows = rows is None or 2 <= rows <= self.vocab_size
        few = "the first must be at least 2 and at most the second"
        self._check(has_rows, few, "draft_vocab_size", "vocab_size")
        is_whole, whole = self.num_heads % self.num_kv_heads == 0, "the first must be a multiple"
        self._check(is_whole, f"{whole} of the second", "num_heads", "num_kv_heads")

    def _check(self, is_right: bool, needed: str, *names: str) -> None:
        if not is_right:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in names)
            raise FlyJaxError(f"The configuration has {given}; {needed}: correct config.json.")

    def check_layers(self, num_tensors: int) -> None:
        """Raises FlyJaxError where there are fewer tensors than layers."""
        has_all = self.num_layers <= num_tensors
        self._check(has_all, f"there are {num_tensors} tensors", "num_layers")

    @property
    def unknown_row(self) -> int:
        """The value in `token_rows` of a token that is never drafted, where not all have a row."""
        assert self.draft_vocab_size is not None
        return self.draft_vocab_size - (self.head is None)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


# The models of a family pad one vocabulary to several sizes: Qwen 2.5 to 151,936 and 152,064.
_MOST_PADDING = 0.01


def shared_vocabulary(target: LlamaConfig, draft: LlamaConfig, named: int = 0) -> int:
    """Tokens that both models number, without padding; FlyJaxError if they differ by more.

    None of the `named` tokens that their tokenizer has, if that is known, is padding.
    """
    fewest, most = sorted((target.vocab_size, draft.vocab_size))
    if most - fewest > _MOST_PADDING * most or fewest < min(named, most):
        raise FlyJaxError(
            f"The target has a vocabulary of {target.vocab_size} tokens and the draft one of "
            f"{draft.vocab_size}; they must share one: take a draft of the target's family."
        )
    return fewest


Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of models: what it has beyond Llama, in the words of its `config.json`."""

    name: str
    class_name: str
    # Fields of `LlamaConfig`: those that are the same in all its models, and the others, from those
    # of a `config.json` and the number of layers. May raise as a wrong kind of field does.
    fields: Given = dataclasses.field(default_factory=dict)
    read: Callable[[Given, int], Fields] = lambda hf, num_layers: {}
    # Fields of its `config.json`: its own, those that it may leave out, where they are not Llama's,
    # and those of transformers' class that no published model sets, and that are not run.
    written: Callable[[LlamaConfig], Fields] = lambda config: {}
    defaults: Given = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ()
    gguf: str | None = None  # its name in GGUF files, where it is known there
    gguf_pairs: bool = False  # GGUF files have the two numbers of a rotary pair side by side


def _read_mistral(hf: Given, num_layers: int) -> Fields:
    """Reads the window of all layers: version 0.1 has one, and its files need not state it."""
    window = hf.get("sliding_window", 4096)
    if window is None:
        return {}
    return {"sliding_window": int(window), "windowed_layers": tuple(range(num_layers))}


def _read_windows(hf: Given, num_layers: int, is_windowed: Callable[[int], bool]) -> Fields:
    """Reads the window and its layers, listed or `is_windowed`, in the form of Qwen and SmolLM3."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    if window is None:
        return {}
    kinds, layers = hf.get("layer_types"), range(num_layers)
    has_one = [kinds[at] == "sliding_attention" if kinds else is_windowed(at) for at in layers]
    found = tuple(at for at in layers if has_one[at])
    return {"sliding_window": int(window), "windowed_layers": found} if found else {}


def _read_qwen(hf: Given, num_layers: int) -> Fields:
    # transformers' defaults; neither counts without a window.
    hf = {"sliding_window": 4096, **hf}
    return _read_windows(hf, num_layers, lambda at: at >= int(hf.get("max_window_layers", 28)))


def _read_smollm3(hf: Given, num_layers: int) -> Fields:
    """Reads the layers without rotary positions, by default every fourth."""
    layers = range(num_layers)
    interval = int(hf.get("no_rope_layer_interval", 4))
    rotated = hf.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
    unrotated = tuple(layer for layer in layers if not rotated[layer])
    windows = _read_windows(hf, num_layers, lambda layer: layer in unrotated)
    return {"unrotated_layers": unrotated, **windows}


def _written_windows(config: LlamaConfig) -> Fields:
    """The fields that `_read_windows` reads."""
    kinds = ("full_attention", "sliding_attention")
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": [kinds[at in config.windowed_layers] for at in range(config.num_layers)],
    }


def _written_smollm3(config: LlamaConfig) -> Fields:
    layers = range(config.num_layers)
    return {
        "no_rope_layers": [int(layer not in config.unrotated_layers) for layer in layers],
        "pad_token_id": None,  # transformers' default is a token that a small vocabulary lacks
        **_written_windows(config),
    }


ARCHITECTURES = {
    one.name: one
    for one in (
        # Llama 2 and 3, SmolLM 1 and 2, DeepSeek-R1-Distill-Llama.
        Architecture(
            name="llama", class_name="LlamaForCausalLM", refused=("attention_bias", "mlp_bias"),
            gguf="llama", gguf_pairs=True,
        ),
        # GGUF files call it llama, and those of version 0.1 may not say that it has a window.
        Architecture(
            name="mistral", class_name="MistralForCausalLM", read=_read_mistral,
            written=lambda config: {"sliding_window": config.sliding_window},
            defaults={
                "num_key_value_heads": 8, "max_position_embeddings": 131_072, "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        # Qwen 2 and 2.5, DeepSeek-R1-Distill-Qwen.
        Architecture(
            name="qwen2", class_name="Qwen2ForCausalLM", fields={"attention_biases": True},
            read=_read_qwen, written=_written_windows,
            defaults={"max_position_embeddings": 32_768}, gguf="qwen2",
        ),
        # Without experts.
        Architecture(
            name="qwen3", class_name="Qwen3ForCausalLM", fields={"head_norms": True},
            read=_read_qwen, written=_written_windows,
            defaults={"head_dim": 128, "max_position_embeddings": 32_768},
            refused=("attention_bias",), gguf="qwen3",
        ),
        Architecture(
            name="smollm3", class_name="SmolLM3ForCausalLM", read=_read_smollm3,
            written=_written_smollm3, refused=("attention_bias", "mlp_bias"), gguf="smollm3",
            gguf_pairs=True,
            defaults={
                "num_key_value_heads": 4, "max_position_embeddings": 32_768,
                "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "bos_token_id": 128_000,
                "eos_token_id": 128_001,
            },
        ),
    )
}  # fmt: skip
GGUF_ARCHITECTURES = {one.gguf: one for one in ARCHITECTURES.values() if one.gguf is not None}


def read_config(folder: Path) -> LlamaConfig:
    """Reads `config.json`, with `generation_config.json`'s ends of text; else FlyJaxError."""
    config = config_of(read_json(folder / "config.json"), str(folder / "config.json"))
    ids = tuple(dict.fromkeys(config.eos_token_ids + ends_of_text(folder)))
    return dataclasses.replace(config, eos_token_ids=ids)


def ends_of_text(folder: Path) -> tuple[int, ...]:
    """The tokens that end texts, by both files of a model of any family; FlyJaxError for others."""
    paths = (folder / name for name in ("config.json", "generation_config.json"))
    said = {path: read_json(path).get("eos_token_id") for path in paths if path.exists()}
    found: tuple[int, ...] = ()
    for path, value in said.items():
        try:
            found += _token_ids(value)
        except TypeError as error:
            raise FlyJaxError(f"{path} has {error}; give a number, or a list of them.") from error
    return found


def config_of(fields: Given, source: str = "config.json") -> LlamaConfig:
    """The configuration that the fields of a `config.json` describe; errors name the source.

    v4 keeps `rope_theta` and `rope_scaling` at the top level, v5 puts both into `rope_parameters`.
    FlyJaxError for an unknown family or rotary scaling, or a field that is missing or wrong.
    """
    try:
        head = None
        named = str(fields.get("architectures"))
        if head_config.HEADS.search(named) or not head_config.HEAD_FIELDS.isdisjoint(fields):
            fields, head = head_config.read_head(fields, source)
        name = fields.get("model_type", "llama")
        if name not in ARCHITECTURES:
            raise FlyJaxError(
                f"{source} describes a model of type '{name}'; fly_jax runs "
                f"{', '.join(ARCHITECTURES)}: give the folder of such a checkpoint."
            )
        architecture = ARCHITECTURES[name]
        hf = {"max_position_embeddings": 2048, **architecture.defaults, **fields}
        odd = [field for field in architecture.refused if hf.get(field)]
        odd += ["hidden_act"] if hf.get("hidden_act", "silu") != "silu" else []
        if odd:
            raise FlyJaxError(
                f"{source} has {odd[0]}={json.dumps(hf[odd[0]])}; fly_jax runs models of type "
                f"'{name}' without such biases and with activation silu: give the folder of one."
            )
        heads = hf["num_attention_heads"]
        hf["num_key_value_heads"] = hf.get("num_key_value_heads") or heads
        hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // heads
        sizes: Fields = {own: int(hf[theirs]) for own, theirs in _SIZES.items()}
        if sizes["num_layers"] > 10_000:  # many times those of any model
            raise ValueError(f"num_hidden_layers={sizes['num_layers']}")
        # An EAGLE-3 head may have a window whatever the family of its layer.
        told = {"use_sliding_window": "sliding_attention" in (hf.get("layer_types") or ()), **hf}
        of_head = _read_windows(told, 1, lambda _: False) if isinstance(head, Eagle3) else {}
        theta, scaling = _read_rope(hf, source, sizes["max_context"])
        if isinstance(scaling, YarnScaling):  # a Qwen's file still has the context without it
            stretched = int(scaling.factor * scaling.original_context)
            sizes["max_context"] = max(sizes["max_context"], stretched)
        return LlamaConfig(
            **sizes, rope_theta=float(theta), rope_scaling=scaling,
            norm_epsilon=float(hf.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            bos_token_id=hf.get("bos_token_id"), eos_token_ids=_token_ids(hf.get("eos_token_id")),
            architecture=name, draft_vocab_size=hf.get("draft_vocab_size"),
            pard_token=hf.get("pard_token"), head=head, **architecture.fields,
            **(architecture.read(hf, sizes["num_layers"]) | of_head),
        )  # fmt: skip
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


def config_fields(config: LlamaConfig) -> Fields:
    """The `config.json` for transformers, with both rotary spellings; a head's for speculators."""
    if config.head is not None:
        known = config.draft_vocab_size or config.vocab_size
        layer = dataclasses.replace(config, head=None, draft_vocab_size=None)
        return head_config.written_head(config.head, config_fields(layer), known)
    architecture, scaling = ARCHITECTURES[config.architecture], config.rope_scaling
    rope: Fields = {"rope_type": "default"}
    if scaling is not None:
        is_yarn = isinstance(scaling, YarnScaling)
        kind, names = ("yarn", _YARN_SCALING) if is_yarn else ("llama3", _LLAMA3_SCALING)
        values = {theirs: getattr(scaling, own) for own, theirs in names.items()}
        rope = {"rope_type": kind, **values}
    eos = config.eos_token_ids
    return {
        "architectures": [architecture.class_name], "model_type": architecture.name,
        **{theirs: getattr(config, own) for own, theirs in _SIZES.items()}, "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon, "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied_embeddings, "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        **{name: getattr(config, name) for name in _OF_DRAFTERS if getattr(config, name)},
        **dict.fromkeys(architecture.refused, False), **architecture.written(config),
    }  # fmt: skip


_ROPE_FIELDS = {
    "default": set[str](),
    "llama3": set(_LLAMA3_SCALING.values()),
    "yarn": {*_YARN_SCALING.values(), "mscale", "mscale_all_dim", "finetuned", "attn_factor"},
}


def _read_rope(
    hf: Given, source: str, max_context: int
) -> tuple[Any, RopeScaling | YarnScaling | None]:
    """The rotary base and scaling; raises FlyJaxError for a field that is not understood.

    What YaRN's scaling leaves out is the paper's or transformers' default.
    """
    old, new = (dict(hf.get(name) or {}) for name in ("rope_scaling", "rope_parameters"))
    rope = new or old
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    known = {"rope_type", "type", "rope_theta"} | _ROPE_FIELDS.get(kind, set())
    odd: Fields = {} if kind in _ROPE_FIELDS else {"rope_type": kind}
    odd |= {"partial_rotary_factor": hf.get("partial_rotary_factor") or 1}
    odd |= {name: value for name, value in rope.items() if name not in known}
    if old and new and {*old.items()} - {*new.items()} - {("type", kind)}:
        odd["rope_scaling"] = old
    for name, value in odd.items():
        if name != "partial_rotary_factor" or value != 1:
            raise FlyJaxError(
                f"{source} has {name}={json.dumps(value)} beside the rotary scaling '{kind}', "
                "which fly_jax does not understand and which would change the text; it runs one "
                f"of {', '.join(_ROPE_FIELDS)} for all layers and whole heads: give such a model."
            )
    theta = rope.get("rope_theta", hf.get("rope_theta", 10_000.0))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        values: Fields = {own: float(rope[theirs]) for own, theirs in _LLAMA3_SCALING.items()}
        return theta, RopeScaling(**values | {"original_context": int(values["original_context"])})
    factor = float(rope["factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        weight, of_all = (float(rope.get(key) or 0) for key in ("mscale", "mscale_all_dim"))
        has_both = weight and of_all
        attention_factor = magnitude(weight) / magnitude(of_all) if has_both else magnitude(1.0)
        attention_factor *= float(rope.get("attn_factor") or 1)  # vLLM's; DeepSeek's Qwen 3 has it
    return theta, YarnScaling(
        factor=factor,
        original_context=int(rope.get("original_max_position_embeddings") or max_context),
        attention_factor=float(attention_factor), fast_turns=float(rope.get("beta_fast") or 32),
        slow_turns=float(rope.get("beta_slow") or 1), truncate=bool(rope.get("truncate", True)),
    )  # fmt: skip


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(one, int) for one in ids):
        raise TypeError(f"eos_token_id={json.dumps(value)}")
    return ids


def read_json(path: Path) -> Fields:
    """Reads the object in a JSON file; FlyJaxError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FlyJaxError(
            f"{path} does not exist; a checkpoint folder needs it: give the folder of a Hugging "
            "Face checkpoint, or a hub id."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise FlyJaxError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise FlyJaxError(f"{path} holds no JSON object; download the file again.")
    return content


@dataclasses.dataclass(frozen=True)
class MatrixType:
    """A type of matrices of integers, with scales."""

    dtype: np.dtype
    # So many consecutive inputs share a scale, or the largest divisor of them that the last axis of
    # the inputs takes; None for one scale for every output.
    group: int | None = None
    outer: bool = True  # the embedding and the unembedding are integers, too


INT8 = MatrixType(np.dtype(np.int8))
_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """The shape and type of a parameter."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # the logical name of each
    inputs: tuple[str, ...] = ()  # axes that a product with it sums over; none for norms and scales
    dtype: np.dtype | None = None  # of a parameter that has its own; None is the model's


def parameter_specs(
    config: LlamaConfig, matrices: MatrixType | None = None
) -> dict[str, ParameterSpec]:
    """The parameters of a model, by their attribute names. Matrices are stored [in, out].

    An unstacked model on a CPU holds them otherwise (`Llama.unstacked`). Those of integers, of the
    type `matrices`, have scales in float32, as parameters of their own (`scale_of`). The
    embedding's outputs are its rows, which suits both its uses.
    """
    sizes = {
        "layers": config.num_layers, "vocab": config.draft_vocab_size or config.vocab_size,
        "embed": config.embed_size, "ffw": config.ffw_size, "q_heads": config.num_heads,
        "kv_heads": config.num_kv_heads, "head": config.head_size,
    }  # fmt: skip

    def spec(axes: str, inputs: str = "") -> ParameterSpec:
        names = tuple(axes.split())
        return ParameterSpec(tuple(sizes[name] for name in names), names, tuple(inputs.split()))

    specs = {
        "embedding": spec("vocab embed", "embed"), "attention_norm": spec("layers embed"),
        "query": spec("layers embed q_heads head", "embed"),
        "key": spec("layers embed kv_heads head", "embed"),
        "value": spec("layers embed kv_heads head", "embed"),
        "output": spec("layers q_heads head embed", "q_heads head"),
        "mlp_norm": spec("layers embed"), "gate": spec("layers embed ffw", "embed"),
        "up": spec("layers embed ffw", "embed"), "down": spec("layers ffw embed", "ffw"),
        "final_norm": spec("embed"),
    }  # fmt: skip
    if config.attention_biases:
        specs["query_bias"] = spec("layers q_heads head")
        specs["key_bias"] = specs["value_bias"] = spec("layers kv_heads head")
    if config.head_norms:
        specs["query_norm"] = specs["key_norm"] = spec("layers head")
    if not config.tied_embeddings:
        specs["unembedding"] = spec("embed vocab", "embed")
    if config.draft_vocab_size is not None:  # the row of each of the target's tokens
        rows = np.dtype(np.int32)
        specs["token_rows"] = ParameterSpec((config.vocab_size,), ("vocab",), (), rows)
    if config.head is not None:
        specs = _of_head(specs, config, config.head)
    return specs if matrices is None else _with_scales(specs, matrices)


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of parameters: a layer's, or one outside the layers: `layer_007`, `embedding`."""

    name: str
    layer: int | None

    def specs(self, config: LlamaConfig, *, int8: bool = False) -> dict[str, ParameterSpec]:
        """The group's own part of `parameter_specs`: a layer's without the axis `layers`."""
        specs = parameter_specs(config, INT8 if int8 else None)
        if self.layer is None:
            own = (self.name, scale_of(self.name))
            return {name: specs[name] for name in own if name in specs}
        return {
            name: dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
            for name, spec in specs.items()
            if spec.axes[0] == "layers"
        }


def groups(config: LlamaConfig) -> list[Group]:
    """The groups of a model; those outside the layers, which are the largest, come first."""
    outer = [name for name, spec in parameter_specs(config).items() if spec.axes[0] != "layers"]
    layers = [Group(f"layer_{index:03}", index) for index in range(config.num_layers)]
    return [Group(name, None) for name in outer] + layers


def _of_head(
    specs: dict[str, ParameterSpec], config: LlamaConfig, head: TargetHead
) -> dict[str, ParameterSpec]:
    """The parameters of a head: the features are fused into one, and read as its kind does."""
    embed, width = config.embed_size, head.target_embed_size
    wide, vocab = head.num_features * width, config.draft_vocab_size or config.vocab_size
    table = dataclasses.replace(specs.pop("embedding"), shape=(config.vocab_size, embed))
    specs |= {"embedding": table} if head.has_embedding else {}
    specs["fusion"] = ParameterSpec((wide, embed), ("features", "embed"), ("features",))
    if isinstance(head, Eagle3):  # its attention reads token and feature side by side
        for name in ("query", "key", "value"):
            one = specs[name]
            specs[name] = dataclasses.replace(one, shape=(1, 2 * embed, *one.shape[2:]))
        specs["hidden_norm"] = specs["attention_norm"]
        if head.feature_norms == "all":
            specs["features_norm"] = ParameterSpec((wide,), ("embed",))
        for index in range(head.num_features if head.feature_norms == "each" else 0):
            specs[f"feature_norm_{index}"] = ParameterSpec((width,), ("embed",))
    if isinstance(head, Block):
        rank, reads = head.markov_rank, embed + head.markov_rank * head.confidence_reads_markov
        specs["fused_norm"] = ParameterSpec((embed,), ("embed",))
        if not head.has_unembedding:
            del specs["unembedding"]
        if rank:
            table = ParameterSpec((config.vocab_size, rank), ("vocab", "head"), ("head",))
            specs["markov_rows"] = table
            specs["markov_bias"] = ParameterSpec((rank, vocab), ("head", "vocab"), ("head",))
        if head.has_confidence:
            specs["confidence"] = ParameterSpec((reads, 1), ("embed", "head"), ("embed",))
            specs["confidence_bias"] = ParameterSpec((1,), ("head",))
    return specs


def scale_of(name: str) -> str:
    """The name of the parameter that holds the scales of a matrix of integers."""
    return f"{name}_scale"


def scale_groups(spec: ParameterSpec, group: int) -> tuple[int, int]:
    """The axis of a matrix along which inputs share scales, and how many inputs share one."""
    axis = max(spec.axes.index(name) for name in spec.inputs)
    return axis, math.gcd(spec.shape[axis], group)


def _with_scales(specs: dict[str, ParameterSpec], matrices: MatrixType) -> dict[str, ParameterSpec]:
    found: dict[str, ParameterSpec] = {}
    for name, spec in specs.items():
        found[name] = spec
        if not spec.inputs or not (matrices.outer or spec.axes[0] == "layers"):
            continue
        found[name] = dataclasses.replace(spec, dtype=matrices.dtype)
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        if matrices.group is None:
            sizes = {axis: size for axis, size in sizes.items() if axis not in spec.inputs}
        else:
            axis, group = scale_groups(spec, matrices.group)
            sizes[spec.axes[axis]] //= group
        found[scale_of(name)] = ParameterSpec(tuple(sizes.values()), tuple(sizes), (), _FLOAT32)
    return found
