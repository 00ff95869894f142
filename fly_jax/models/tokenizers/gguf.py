"""The tokenizer that a GGUF file carries, made again with the libraries that made it."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fly_jax.errors import FlyJaxError
from fly_jax.models.checkpoints.gguf_source import GgufFile
from fly_jax.models.tokenizers.tokenizer import (
    JsonVocabulary,
    SentencePieceVocabulary,
    Tokenizer,
    Vocabulary,
)

# Kinds of tokens, which both GGUF and SentencePiece number so.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp calls the way of Llama 3.
_LLAMA_3_NAMES = ("llama3", "llama-v3", "llama-bpe")
_SMOLLM_3_NAME = "smaug-bpe"  # cut as Llama 3's, and nothing is put before a text
_QWEN_2_NAMES = ("qwen2", "deepseek-r1-qwen")
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# Mistral's own since Nemo: words are cut where small letters turn into capitals.
_TEKKEN_NAME = "tekken"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A text that is a token stays one, however its merges would cut it.
_WHOLE_TOKENS = (*_LLAMA_3_NAMES, _SMOLLM_3_NAME, _TEKKEN_NAME)
# A text begins with a token of its own where the file does not say.
_BEGUN = (*_LLAMA_3_NAMES, _TEKKEN_NAME)


def gguf_tokenizer(file: GgufFile, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """The file's tokenizer.

    Raises:
      FlyJaxError: the file has none, or one of a kind that is not known.
    """
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
        vocabulary = SentencePieceVocabulary(_sentence_piece(file), _begin(file))
    else:
        raise FlyJaxError(
            f"{file.path} has a tokenizer of kind '{kind}'; fly_jax knows gpt2 and llama: give the "
            "safetensors checkpoint of the model."
        )
    return Tokenizer(
        vocabulary=vocabulary,
        eos_token_ids=eos_token_ids,
        control_token_ids=tuple(
            sorted(vocabulary.control_ids | set(_named_ids(file).values()) | set(eos_token_ids))
        ),
        chat_template=file.value("tokenizer.chat_template"),
        special_tokens=_named(file),
    )


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes the file's tokenizer as Hugging Face keeps one, for a folder that is to have it."""
    if file.needed("tokenizer.ggml.model") == "llama":
        model = _sentence_piece(file).serialized_model_proto()
        (folder / "tokenizer.model").write_bytes(model)
    else:
        _byte_level(file).save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {**_named(file), "add_bos_token": _begin(file) is not None}
    if file.value("tokenizer.chat_template") is not None:
        settings["chat_template"] = file.value("tokenizer.chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _begin(file: GgufFile) -> int | None:
    """The token that is put before a prompt, if any."""
    is_sentencepiece = file.needed("tokenizer.ggml.model") == "llama"
    usual = is_sentencepiece or file.value("tokenizer.ggml.pre") in _BEGUN
    adds = file.value("tokenizer.ggml.add_bos_token", usual)
    return file.value("tokenizer.ggml.bos_token_id") if adds else None


def _named(file: GgufFile) -> dict[str, str]:
    """The special tokens, by the names that templates have for them."""
    tokens = file.needed("tokenizer.ggml.tokens")
    return {name: tokens[index] for name, index in _named_ids(file).items()}


def _named_ids(file: GgufFile) -> dict[str, int]:
    names = {
        "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    }  # fmt: skip
    ids = {name: file.value(f"tokenizer.ggml.{own}_token_id") for name, own in names.items()}
    known = {name: int(index) for name, index in ids.items() if index is not None}
    for name, index in known.items():
        if not 0 <= index < len(file.needed("tokenizer.ggml.tokens")):
            raise FlyJaxError(
                f"{file.path} has {index} as its {name}, which is no token of it; download the "
                "file again."
            )
    return known


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    """Byte-level BPE, as the tokenizers library has it for this model."""
    names: list[str] = file.needed("tokenizer.ggml.tokens")
    kinds: list[int] = file.needed("tokenizer.ggml.token_type")
    while kinds and kinds[-1] == _UNUSED:  # what pads the model's vocabulary, and no text has
        names, kinds = names[:-1], kinds[:-1]
    merges = [tuple(one.split(" ")) for one in file.needed("tokenizer.ggml.merges")]
    split = file.needed("tokenizer.ggml.pre")
    made = tokenizers.Tokenizer(
        BPE(
            {name: index for index, name in enumerate(names)},
            merges,
            ignore_merges=split in _WHOLE_TOKENS,
        )
    )
    made.pre_tokenizer = _pre_tokenizer(file, split)
    if split in _QWEN_2_NAMES:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    for name, kind in zip(names, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            made.add_tokens([AddedToken(name, special=special, normalized=False)])
    bos = _begin(file)
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{names[bos]} $A", special_tokens=[(names[bos], bos)]
        )
    return made


def _pre_tokenizer(file: GgufFile, split: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before pairs are merged, by the name that llama.cpp has for it."""
    if split == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    patterns = {
        **dict.fromkeys((*_LLAMA_3_NAMES, _SMOLLM_3_NAME), _LLAMA_3),
        **dict.fromkeys(_QWEN_2_NAMES, _QWEN_2),
        _TEKKEN_NAME: _TEKKEN,
    }
    if split not in patterns:
        raise FlyJaxError(
            f"{file.path} has the pre-tokenizer '{split}'; fly_jax knows gpt-2, smollm, "
            f"{', '.join(patterns)}: give the safetensors checkpoint of the model."
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


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
    model.normalizer_spec.add_dummy_prefix = file.value("tokenizer.ggml.add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
