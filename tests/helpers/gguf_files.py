"""GGUF files of a tiny model, written with the library that llama.cpp's makers have for it."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import tokenizers
from gguf import GGMLQuantizationType
from tokenizer_makers import CONTROLS, write_sentencepiece

from fly_jax.models.architectures import LlamaConfig, groups
from fly_jax.models.checkpoints.hugging_face import is_transposed, tensor_name, tensor_shape
from fly_jax.models.llama import Llama

Put = Callable[[gguf.GGUFWriter], None]  # a tokenizer, into a file

# Rows of 256 numbers, which the types with two levels of scales need.
CONFIG = LlamaConfig(
    vocab_size=24, embed_size=256, ffw_size=256, num_layers=2, num_heads=8, num_kv_heads=4,
    head_size=32, max_context=64, rope_theta=5e4, norm_epsilon=1e-6, bos_token_id=1,
    eos_token_ids=(2,),
)  # fmt: skip
_KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def tensors_of(model: Llama) -> dict[str, np.ndarray]:
    """Hugging Face's tensors [out, in] of a model, by GGUF's names and in its order of heads."""
    found: dict[str, np.ndarray] = {}
    kind = _KINDS.get(model.config.architecture, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(kind, model.config.num_layers)
    for group in groups(model.config):
        for name, spec in group.specs(model.config).items():
            part = np.asarray(model.parameters()[name], np.float32)
            part = part if group.layer is None else part[group.layer]
            shape = tensor_shape(name, spec)
            part = part.reshape(*reversed(shape)).T if is_transposed(name, spec) else part
            part = part.reshape(shape)
            paired = model.config.architecture in ("llama", "smollm3")
            if paired and name in ("query", "key"):  # the two halves of a head become neighbours
                heads = model.config.num_heads if name == "query" else model.config.num_kv_heads
                halves = part.reshape(heads, 2, model.config.head_size // 2, -1)
                part = halves.swapaxes(1, 2).reshape(shape)
            found[names.get_name(tensor_name(group, name), (".weight", ".bias"))] = part
    return found


def ends(writer: gguf.GGUFWriter) -> None:
    """Where a text begins and ends, in every file here."""
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write(
    path: Path, tensors: dict[str, np.ndarray], kind: str = "F32", *, config: LlamaConfig = CONFIG,
    architecture: str = "llama", tokenizer: Put | None = None,
) -> Path:  # fmt: skip
    """A file of these tensors, matrices in the type of that name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.embed_size)
    writer.add_feed_forward_length(config.ffw_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_key_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    (tokenizer or ends)(writer)
    stored = GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantised(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(tensor: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The tensor in that type; where the library only reads it, blocks of random bytes."""
    try:
        return gguf.quantize(tensor, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (tensor.shape[0], tensor.shape[1] // block * size)
        # Bytes below 60 are finite whatever number of two bytes they are a part of.
        return np.random.default_rng(3).integers(0, 60, shape, dtype=np.uint8)


def write_sized(
    path: Path, tensors: dict[str, np.ndarray], vocab_size: int, tokenizer: Put
) -> Path:
    """A file with this tokenizer, whose embeddings are as many as its tokens."""
    config = LlamaConfig(**{**vars(CONFIG), "vocab_size": vocab_size})
    shape, names = (vocab_size, config.embed_size), ("token_embd.weight", "output.weight")
    sized = tensors | {name: np.resize(tensors[name], shape) for name in names}
    return write(path, sized, config=config, tokenizer=tokenizer)


def byte_level_writer(
    made: tokenizers.Tokenizer, pre: str, *, adds_bos: bool | None, padding: int = 0,
    renamed: dict[str, str] | None = None,
) -> Put:  # fmt: skip
    """What puts a byte-level tokenizer into a file, cut as `pre` says."""

    def put(writer: gguf.GGUFWriter) -> None:
        names = [made.id_to_token(index) for index in range(made.get_vocab_size())]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        kinds = [3 if name in CONTROLS else 1 for name in names]
        names = [(renamed or {}).get(name, name) for name in names]
        writer.add_token_list([*names, *(f"[PAD{number}]" for number in range(padding))])
        writer.add_token_types([*kinds, *[5] * padding])
        merges = json.loads(made.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
        ends(writer)
        writer.add_eot_token_id(3)
        if adds_bos is not None:
            writer.add_add_bos_token(adds_bos)
        writer.add_chat_template("{{ messages[0].content }}<|eot|>")

    return put


def sentence_piece_writer(folder: Path) -> tuple[int, Put]:
    """A SentencePiece model, written into the folder, and what puts it into a GGUF file."""
    write_sentencepiece(folder / "tokenizer.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(pieces.get_piece_size())

    def put(writer: gguf.GGUFWriter) -> None:
        others = {2: pieces.is_unknown, 3: pieces.is_control, 6: pieces.is_byte}
        kinds = [next((kind for kind in others if others[kind](one)), 1) for one in ids]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([pieces.id_to_piece(one) for one in ids])
        writer.add_token_scores([pieces.get_score(one) for one in ids])
        writer.add_token_types(kinds)
        ends(writer)

    return len(ids), put
