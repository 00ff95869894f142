"""GGUF files: configuration and tokenizer from the metadata, tensors matrix by matrix."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import numpy as np
import sentencepiece
import tokenizers
from jaxtyping import Array
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import (
    GGUF_ARCHITECTURES,
    Group,
    LlamaConfig,
    ParameterSpec,
    RopeScaling,
    config_of,
    groups,
)
from fly_jax.models.attention import inverse_frequencies
from fly_jax.models.checkpoints import hugging_face
from fly_jax.models.checkpoints.gguf_file import GgufFile
from fly_jax.models.checkpoints.source import Source
from fly_jax.models.tokenizer import JsonVocabulary, SentencePieceVocabulary, Tokenizer, Vocabulary
from fly_jax.sharding.rules import Layout

_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later state their frequency scaling as factors; these made all that are known.
_llama_3_1 = functools.partial(
    RopeScaling, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
)
# Kinds of tokens, which both GGUF and SentencePiece number so.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
_END_NAMES = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")


def _config(file: GgufFile) -> LlamaConfig:
    """The configuration in the metadata; FlyJaxError for an unknown family or a wrong key."""
    if int(file.values.get("split.count", 1)) > 1:
        raise FlyJaxError(
            f"{file.path} is one of {file.values['split.count']} files of a model; fly_jax reads "
            "models in one file: merge them with llama-gguf-split."
        )
    family = str(file.needed("general.architecture"))
    if family not in GGUF_ARCHITECTURES or file.values.get(f"{family}.expert_count", 0):
        kind = f"{family} with experts" if family in GGUF_ARCHITECTURES else family
        raise FlyJaxError(
            f"{file.path} holds a model of architecture '{kind}'; fly_jax runs "
            f"{', '.join(GGUF_ARCHITECTURES)}: give the file of one."
        )

    def size(key: str) -> Any:
        return file.needed(f"{family}.{key}")

    def optional(key: str, default: object) -> Any:
        return file.values.get(f"{family}.{key}", default)

    factor = optional("rope.scaling.factor", 1.0) or 1.0
    scaling = optional("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if scaling != "none":
        raise FlyJaxError(
            f"{file.path} asks for rotary scaling '{scaling}'; fly_jax knows none, and the factors "
            "of Llama 3.1: give a file with one of these."
        )
    heads, width = size("attention.head_count"), size("embedding_length")
    head_size = optional("attention.key_length", width // heads)
    rotated = optional("rope.dimension_count", head_size)
    if rotated != head_size or optional("rope.scale_linear", 1.0) != 1.0:
        raise FlyJaxError(
            f"{file.path} has a rotary embedding of its own, which the original models of this "
            "architecture do not have; give the file of one."
        )
    # llama.cpp has no name for Mistral.
    window = optional("attention.sliding_window", 0) or None
    model_type = GGUF_ARCHITECTURES[family].name
    if window is not None and model_type == "llama":
        model_type = "mistral"
    names = file.values.get("tokenizer.ggml.tokens", ())
    config = config_of(
        {
            "model_type": model_type, "sliding_window": window, "hidden_size": width,
            "vocab_size": optional("vocab_size", len(names)), "num_attention_heads": heads,
            "intermediate_size": size("feed_forward_length"), "head_dim": head_size,
            "num_hidden_layers": size("block_count"),
            "num_key_value_heads": optional("attention.head_count_kv", heads),
            "max_position_embeddings": size("context_length"),
            "rope_theta": optional("rope.freq_base", 10_000.0),
            # The file has float32, and people wrote 1e-05.
            "rms_norm_eps": float(f"{size('attention.layer_norm_rms_epsilon'):.6g}"),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": _special_id(file, "bos"),
            "eos_token_id": _ends(file),
        },
        str(file.path),
    )  # fmt: skip
    if _ROPE_FACTORS not in file.tensors:
        return config
    factors = file.rows(_ROPE_FACTORS, slice(None))
    scaled = dataclasses.replace(config, rope_scaling=_llama_3_1(factor=float(factors.max())))
    plain = inverse_frequencies(config)
    if factors.shape != plain.shape or not np.allclose(
        inverse_frequencies(scaled), plain / factors, rtol=1e-3
    ):
        raise FlyJaxError(
            f"The tensor {_ROPE_FACTORS} in {file.path} has other factors than Llama 3.1 and 3.2; "
            "fly_jax knows these alone: give the safetensors checkpoint of the model."
        )
    return scaled


def _special_id(file: GgufFile, kind: str) -> int | None:
    """A special token; SentencePiece's own where such a file names none, as in llama.cpp."""
    is_sentencepiece = file.values.get("tokenizer.ggml.model") == "llama"
    usual = _SENTENCEPIECE_IDS.get(kind) if is_sentencepiece else None
    return file.values.get(f"tokenizer.ggml.{kind}_token_id", usual)


def _ends(file: GgufFile) -> list[int]:
    """The tokens that end a text; files name one of each kind, others are known by text."""
    found = [_special_id(file, kind) for kind in ("eos", "eot", "eom")]
    names = file.values.get("tokenizer.ggml.tokens", ())
    found += [index for index, name in enumerate(names) if name in _END_NAMES]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


class GgufSource:
    """A GGUF file of a model; each process reads only the rows that its devices take."""

    int8 = False
    stored_types = frozenset({"GGUF"})  # whatever they are, not as safetensors have them
    arranged = staticmethod(hugging_face.arranged)

    def __init__(self, file: GgufFile) -> None:
        """Checks the file without reading a weight; FlyJaxError for a wrong key or tensor."""
        self.file = file
        try:
            self.config = _config(file)
        except (TypeError, ValueError, ArithmeticError, IndexError) as error:
            if isinstance(error, FlyJaxError):
                raise
            raise FlyJaxError(
                f"{file.path} has metadata of the wrong kind ({error}); download the file again, "
                "or convert the model anew."
            ) from error
        # The file's own word: there a Mistral is a llama.
        self._has_pairs = GGUF_ARCHITECTURES[file.needed("general.architecture")].gguf_pairs
        self.config.check_layers(len(file.tensors))
        # Qwen 3 has the names of all families.
        self._names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, self.config.num_layers)
        needed: set[str] = set()
        for group in groups(self.config):
            for name, spec in group.specs(self.config).items():
                tensor, shape = self._tensor(group, name), hugging_face.tensor_shape(name, spec)
                needed.add(tensor)
                if tensor not in file.tensors:
                    raise FlyJaxError(
                        f"{file.path} lacks the tensor {tensor}; its metadata asks for it: "
                        "download the file again, or convert the model anew."
                    )
                if file.tensors[tensor].shape != shape:
                    raise FlyJaxError(
                        f"The tensor {tensor} in {file.path} has shape "
                        f"{list(file.tensors[tensor].shape)}; the metadata asks for {list(shape)}: "
                        "download the file again, or convert the model anew."
                    )
        if odd := next((one for one in file.tensors if one not in {*needed, _ROPE_FACTORS}), ""):
            raise FlyJaxError(
                f"{file.path} has the tensor {odd}, which the original models of type "
                f"'{self.config.architecture}' do not have; give the file of one."
            )

    def shares_tokenizer(self, other: Source) -> bool:
        """Tells whether the other file has the same tokenizer, which takes a second to make."""
        if not isinstance(other, GgufSource):
            return False
        one, two = self.file, other.file
        keys = {key for key in (*one.values, *two.values) if key.startswith("tokenizer.")}
        return all(one.values.get(key) == two.values.get(key) for key in keys)

    def read(self, group: Group, layout: Layout | None) -> dict[str, Array]:
        """Reads the group's tensors [out, in] in float32, split by rows."""
        specs = group.specs(self.config).items()
        return {name: self._read(group, name, spec, layout) for name, spec in specs}

    def _read(self, group: Group, name: str, spec: ParameterSpec, layout: Layout | None) -> Array:
        shape = self.file.tensors[self._tensor(group, name)].shape

        @functools.cache  # devices that keep the same rows share them
        def part(begin: int, end: int) -> np.ndarray:
            found = np.empty((end - begin, *shape[1:]), np.float32)

            def fill(rows: slice) -> None:
                some = slice(begin + rows.start, begin + rows.stop)
                found[rows] = self.read_rows(group, name, some)

            hugging_face.on_all_cores(fill, hugging_face.row_blocks(found.shape))
            return found

        def kept(index: Any) -> np.ndarray:
            return part(*index[0].indices(shape[0])[:2])

        sharding = hugging_face.row_sharding(layout, spec, shape[0])
        return jax.make_array_from_callback(shape, sharding, kept)

    def read_rows(self, group: Group, name: str, rows: slice) -> np.ndarray:
        """Reads rows of a parameter's tensor in float32, in Hugging Face's order."""
        tensor = self._tensor(group, name)
        # Some families have a head's rotary pairs side by side, and Hugging Face two halves.
        if not self._has_pairs or name not in ("query", "key"):
            return self.file.rows(tensor, rows)
        rotated = np.arange(self.file.tensors[tensor].shape[0])
        pairs = rotated.reshape(-1, self.config.head_size // 2, 2)
        return self.file.rows(tensor, pairs.swapaxes(1, 2).ravel()[rows])

    def _tensor(self, group: Group, name: str) -> str:
        """The name in GGUF files of a tensor of Hugging Face."""
        found = self._names.get_name(hugging_face.tensor_name(group, name), (".weight", ".bias"))
        assert found is not None
        return found

    def describe(self, group: Group, name: str) -> str:
        """The tensor and its file, in words."""
        return f"The tensor {self._tensor(group, name)} in {self.file.path}"


_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Mistral's own since Nemo: words are cut where small letters turn into capitals.
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytewise])


class _Cut(NamedTuple):
    """The cuts of text before pairs are merged."""

    cutter: pre_tokenizers.PreTokenizer
    keeps_tokens: bool = False  # a text that is a token stays one, however its merges would cut it
    begins: bool = False  # a text begins with a token of its own where the file does not say
    normalizer: normalizers.Normalizer | None = None


# By the names that llama.cpp has for them; "smaug-bpe" is SmolLM3's.
_CUTS = {
    "gpt-2": _Cut(_GPT_2),
    "smollm": _Cut(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _GPT_2])),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _Cut(_split(_LLAMA_3), True, True)),
    "smaug-bpe": _Cut(_split(_LLAMA_3), keeps_tokens=True),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen"), _Cut(_split(_QWEN_2), normalizer=normalizers.NFC())
    ),
    "tekken": _Cut(_split(_TEKKEN), keeps_tokens=True, begins=True),
}


def gguf_tokenizer(file: GgufFile, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """The file's tokenizer; raises FlyJaxError where it has none, or an unknown kind."""
    try:
        return _made(file, eos_token_ids)
    except FlyJaxError:
        raise
    except Exception as error:  # each library raises errors of its own for a damaged tokenizer
        raise FlyJaxError(
            f"The tokenizer in {file.path} is damaged ({' '.join(str(error).split())}); download "
            "the file again."
        ) from error


def _made(file: GgufFile, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    kind = file.needed("tokenizer.ggml.model")
    vocabulary: Vocabulary
    if kind == "gpt2":
        vocabulary = JsonVocabulary(_byte_level(file))
    elif kind == "llama":
        names, kinds = (file.needed(f"tokenizer.ggml.{one}") for one in ("tokens", "token_type"))
        added = [name for name, kind in zip(names, kinds, strict=True) if kind == _USER_DEFINED]
        model, begin = _sentence_piece(file), _begin(file)
        vocabulary = SentencePieceVocabulary(model, begin, added, cuts_at_added=True)
    else:
        raise FlyJaxError(
            f"{file.path} has a tokenizer of kind '{kind}'; fly_jax knows gpt2 and llama: give the "
            "safetensors checkpoint of the model."
        )
    controls = vocabulary.control_ids | set(_named_ids(file).values()) | set(eos_token_ids)
    template = file.values.get("tokenizer.chat_template")
    return Tokenizer(vocabulary, eos_token_ids, tuple(sorted(controls)), template, _named(file))


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes the file's tokenizer into a folder, in Hugging Face's files."""
    settings: dict[str, object] = {**_named(file), "add_bos_token": _begin(file) is not None}
    if file.needed("tokenizer.ggml.model") == "llama":
        (folder / "tokenizer.model").write_bytes(_sentence_piece(file).serialized_model_proto())
        settings["cuts_at_added"] = True  # added pieces cut a text, as in llama.cpp
    else:
        _byte_level(file).save(str(folder / "tokenizer.json"))
    if file.values.get("tokenizer.chat_template") is not None:
        settings["chat_template"] = file.values.get("tokenizer.chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _begin(file: GgufFile) -> int | None:
    """The token that is put before a prompt, if any."""
    is_sentencepiece = file.needed("tokenizer.ggml.model") == "llama"
    cut = _CUTS.get(file.values.get("tokenizer.ggml.pre", ""))
    usual = is_sentencepiece or (cut is not None and cut.begins)
    adds = file.values.get("tokenizer.ggml.add_bos_token", usual)
    return _special_id(file, "bos") if adds else None


def _named(file: GgufFile) -> dict[str, str]:
    """The special tokens, by the names that templates have for them."""
    tokens = file.needed("tokenizer.ggml.tokens")
    return {name: tokens[index] for name, index in _named_ids(file).items()}


def _named_ids(file: GgufFile) -> dict[str, int]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _special_id(file, own) for name, own in names.items()}
    known = {name: int(index) for name, index in ids.items() if index is not None}
    for name, index in known.items():
        if not 0 <= index < len(file.needed("tokenizer.ggml.tokens")):
            raise FlyJaxError(
                f"{file.path} has {index} as its {name}, which is no token of it; download the "
                "file again."
            )
    return known


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    """The byte-level BPE of this model, in the tokenizers library."""
    names: list[str] = file.needed("tokenizer.ggml.tokens")
    kinds: list[int] = file.needed("tokenizer.ggml.token_type")
    # What pads the model's vocabulary is no text's.
    used = max((at + 1 for at, kind in enumerate(kinds) if kind != _UNUSED), default=0)
    names, kinds = names[:used], kinds[:used]
    merges = [tuple(one.split(" ")) for one in file.needed("tokenizer.ggml.merges")]
    split = file.needed("tokenizer.ggml.pre")
    if split not in _CUTS:
        raise FlyJaxError(
            f"{file.path} has the pre-tokenizer '{split}'; fly_jax knows {', '.join(_CUTS)}: give "
            "the safetensors checkpoint of the model."
        )
    cut = _CUTS[split]
    ids = {name: index for index, name in enumerate(names)}
    made = tokenizers.Tokenizer(BPE(ids, merges, ignore_merges=cut.keeps_tokens))
    made.pre_tokenizer = cut.cutter
    if cut.normalizer is not None:
        made.normalizer = cut.normalizer
    made.decoder = decoders.ByteLevel()
    for name, kind in zip(names, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            made.add_tokens([AddedToken(name, special=kind == _CONTROL, normalized=False)])
    if (bos := _begin(file)) is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{names[bos]} $A", special_tokens=[(names[bos], bos)]
        )
    return made


def _sentence_piece(file: GgufFile) -> sentencepiece.SentencePieceProcessor:
    """The SentencePiece model whose pieces and scores the file has."""
    # Only here, since it refuses a protobuf that is older than itself.
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()  # type: ignore[attr-defined]
    names = file.needed("tokenizer.ggml.tokens")
    scores = file.needed("tokenizer.ggml.scores")
    kinds = file.needed("tokenizer.ggml.token_type")
    for name, score, kind in zip(names, scores, kinds, strict=True):
        model.pieces.add(piece=name, score=score, type=int(kind))
    model.trainer_spec.model_type = proto.TrainerSpec.BPE  # type: ignore[attr-defined]
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(names)
    named = _named(file)
    model.trainer_spec.bos_piece = named.get("bos_token", "<s>")
    model.trainer_spec.eos_piece = named.get("eos_token", "</s>")
    model.trainer_spec.unk_piece = named.get("unk_token", "<unk>")
    model.normalizer_spec.name = "identity"
    adds_space = file.values.get("tokenizer.ggml.add_space_prefix", True)
    model.normalizer_spec.add_dummy_prefix = adds_space
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
